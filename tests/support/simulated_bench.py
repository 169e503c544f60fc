"""A bench without a GPU: kernels of known times, and some that misbehave. Workers import it, so it is light."""

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

from flashladder.common.errors import VerificationError
from flashladder.tuner.worker import Comparison

BASELINE_US = 100.0
NOISE = 0.002
ROUNDS = 24  # of a final


def time_us(config):
    """What a configuration's kernel takes: the best is block_m=128, block_n=64, num_warps=4, q_fragments=2."""
    values = config.as_dict()
    return (
        90.0
        * {64: 1.10, 128: 1.0}[values["block_m"]]
        * {32: 1.20, 64: 1.0, 128: 1.08}[values["block_n"]]
        * (1.0 if values["block_m"] // values["num_warps"] == 32 else 1.07)
        * {0: 1.15, 2: 1.0, 4: 1.01, 8: 1.03}[values["q_fragments"]]
        * {0: 1.02, 2: 1.0, 4: 1.005, 8: 1.012}[values["k_fragments"]]
    )


@dataclass(frozen=True)
class Simulated:
    """Makes the bench. `bad` maps a configuration's name to what goes wrong with it; a file keeps who was measured."""

    journal: str | None = None
    seconds: float = 0.0
    bad: tuple[tuple[str, str], ...] = ()

    def __call__(self):
        if ("start", "fails") in self.bad:
            from flashladder.common.errors import DeviceError

            raise DeviceError("there is no such GPU")
        return SimulatedBench(self)


class SimulatedBench:
    def __init__(self, options):
        self._options = options

    def place(self):
        return {"device": "simulated", "driver": str(os.getpid())}

    def prepare(self, problem):
        pass

    def compare(self, problems, entrants, rounds):
        for name, artifacts in entrants.items():
            self._misbehave(artifacts[0].config)
            if self._options.journal and rounds:
                with Path(self._options.journal).open("a") as file:
                    file.write(f"{name} {time.time()} {os.getpid()}\n")
        time.sleep(self._options.seconds)
        times = {name: time_us(artifacts[0].config) for name, artifacts in entrants.items()}
        times |= {"fa2": BASELINE_US, "control": BASELINE_US}
        rng = random.Random(f"{sorted(entrants)} {rounds}")
        noise = 20 * NOISE if any(self._is(a[0].config, "disturbed") for a in entrants.values()) else NOISE
        return Comparison("fa2", "control", tuple(_noisy(times, rng, rounds or ROUNDS, noise) for _ in problems))

    def _is(self, config, what):
        return any(part in config.name and fault == what for part, fault in self._options.bad)

    def _misbehave(self, config):
        for part, fault in self._options.bad:
            if part not in config.name:
                continue
            if fault == "wrong":
                raise VerificationError(f"{config.name} is wrong:\n  o[0, 0, 0, 0] is 2 instead of 1")
            if fault == "faulted":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if fault == "hung":
                time.sleep(3600)
            if fault == "crashed":
                print("free(): invalid pointer", flush=True)
                os.abort()
            if fault == "broken":
                raise KeyError("a mistake in the bench")


def _noisy(times, rng, rounds, noise):
    import numpy as np

    drift = [rng.gauss(1, 0.01) for _ in range(rounds)]
    return {name: np.array([us * d * rng.gauss(1, noise) for d in drift]) for name, us in times.items()}
