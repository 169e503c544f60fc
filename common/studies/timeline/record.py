"""One launch of a kernel with time stamps on the GPU, and what the stamps cost it."""

from __future__ import annotations

import numpy as np

from flashladder.common.compiler import BuildRequest
from flashladder.common.errors import DeviceError
from flashladder.common.measure.contest import ProblemInstance
from flashladder.common.measure.timing import TimingSettings, measure
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.runtime import gpu
from flashladder.common.studies.timeline import stamps
from flashladder.common.studies.timeline.build import stamped
from flashladder.common.studies.timeline.events import Timeline, decode

ROUNDS = 16
WARM_UP = 3  # launches before the recorded one: instructions and tensors are in their caches


def record(request: BuildRequest, problem: Problem) -> Timeline:
    """What the first CTAs of SM 0 did. DeviceError without a GPU, VerificationError where an output is wrong.

    Both builds are checked and timed together. In the timed launches no stamp is stored, as the lanes are taken; all
    else of the stamps is done, on every SM.
    """
    gpu.require_gpu()
    with stamped(request) as kernel:
        instance = ProblemInstance(problem, "cuda")
        plain = instance.ours("without stamps", kernel.plain, timed=False)
        with_stamps = instance.ours("with stamps", kernel.artifact, timed=False)
        loaded = gpu.load(kernel.artifact)
        with_stamps.check().require("the kernel with time stamps")
        for _ in range(WARM_UP):
            with_stamps.launch()
        for variable in (stamps.BUFFER, stamps.TAKEN):
            loaded.clear_variable(variable)
        with_stamps.launch()
        lanes = decode(np.frombuffer(loaded.read_variable(stamps.BUFFER), np.uint32), kernel.sites)
        if not lanes:
            raise DeviceError(f"no CTA of {request} ran on SM 0, which is the one that takes stamps")
        measured = measure([plain, with_stamps], TimingSettings(rounds=ROUNDS))
        times = {name: float(np.median(measured.times(name))) for name in (plain.name, with_stamps.name)}
        clock = measured.clock_mhz(with_stamps.name)
        artifact, place = kernel.artifact, records.of_place(True)
        facts = {
            "version": kernel.plain.version,
            "config": kernel.plain.config.name,
            "problem": problem.name,
            "device": str(place["device"]),
            "time": str(place["time"]),
            "commit": str(place["commit"]),
            "driver": str(place["driver"]),
            "toolkit": str(place["toolkit"]),
            "block_n": str(artifact.launch.block_n),
            "head_dim": str(problem.head_dim),
            "sm_mhz": f"{clock:.0f}" if clock else "unknown",
            "us_without_stamps": f"{times[plain.name]:.2f}",
            "us_with_stamps": f"{times[with_stamps.name]:.2f}",
            "registers": f"{kernel.plain.registers} without stamps, {artifact.registers} with them",
            "flaw": kernel.flaw.replace("\n", " "),
        }
    return Timeline(lanes, facts)
