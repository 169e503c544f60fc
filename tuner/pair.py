"""Two kernels of one problem timed beside each other on the GPU, in a worker's process: one that hangs harms nobody."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from flashladder.common.errors import DeviceError, VerificationError
from flashladder.common.measure.statistics import paired_ratio, verdict
from flashladder.common.measure.timing import Mode
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.target import Target
from flashladder.common.workshop.trial import Built, Idea, Timing
from flashladder.tuner.gpu_bench import OnGpu
from flashladder.tuner.worker import Quarantine, Worker

PATIENCE = 30.0  # seconds, until a kernel counts as hung


class PairTimer:
    """Times a rung beside its parent; the process is there from the first time on."""

    def __init__(self, gpu: str, mode: Mode, rounds: int | None, worker: Worker | None = None) -> None:
        self._mode = mode
        self._rounds = rounds
        self._worker = worker or Worker(OnGpu(gpu, mode, alone=True), patience=PATIENCE)
        self._requests = ThreadPoolExecutor(1)  # one after the other

    def warm_up(self, problem: Problem) -> None:
        """Has the process ready soon, and does not wait for it; what is wrong is said at the first time."""
        self._requests.submit(self._worker.warm_up, [problem])

    def __call__(self, idea: Idea, built: Built) -> Timing:
        """The times of both. VerificationError or DeviceError, naming the rung, where one of the two must not run."""
        parent, ours = idea.parent.name, idea.version.name
        if ours == parent:
            ours = f"{ours} with {built.ours.config.name}"
        entrants = {parent: [built.parent], ours: [built.ours]}
        found = self._requests.submit(self._worker.compare, [idea.problem], entrants, self._rounds).result()
        if isinstance(found, Quarantine):
            if found.verdict == "wrong":
                raise VerificationError(found.reason)
            raise DeviceError(f"{ours} {found.verdict} on the GPU, or {parent} did: {found.reason}")
        (times,) = found.times
        ratio, control = (paired_ratio(times[parent], times[name]) for name in (ours, found.control))
        parent_us, time_us = found.medians(parent)[0], found.medians(ours)[0]
        rounds, place = len(times[ours]), self._worker.place
        judged = verdict(ratio, control)
        return Timing(ratio, control, judged, rounds, self._mode, parent_us, time_us, place, found.notes)

    def stop(self) -> None:
        """Ends the process."""
        self._worker.stop()
        self._requests.shutdown(wait=False, cancel_futures=True)


@contextmanager
def timing(place: Target, problem: Problem, mode: Mode, rounds: int | None) -> Iterator[PairTimer | None]:
    """A timer while it is needed, which gets ready for a problem at once; None where there is no GPU."""
    if not place.on_gpu:
        yield None
        return
    timer = PairTimer(place.gpu.name, mode, rounds)
    timer.warm_up(problem)
    try:
        yield timer
    finally:
        timer.stop()
