"""How references are timed on the CPU.

What else runs there only ever adds to a launch's time, and hits some samples and others not: a mean of launches is then
the machine's, and a sample is its quickest launch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from flashladder.common.errors import ConfigError
from flashladder.common.host import threads
from flashladder.common.measure.nvml import GpuState
from flashladder.common.measure.spot import Queue
from flashladder.common.measure.timing import SamplePlan

SAMPLE_US = 20e3
LEAST_LAUNCHES = 3  # of a sample, but for kernels that take longer than ...
SLOW_US = 100e3


class CpuTimer:
    """Times what runs on the CPU, for common/measure/timing.py."""

    def __init__(self, mode: str) -> None:
        if mode != "hot":
            raise ConfigError(f"--mode {mode} is for GPUs; on a CPU there is only hot")

    def plan(self, launch: Callable[[], object], elsewhere: object = None) -> SamplePlan:
        """As many launches as make a sample long enough, after a warm-up."""
        launch()
        once_us = _time_us(launch)
        least = LEAST_LAUNCHES if once_us < SLOW_US else 1
        return SamplePlan(launch, launches=max(least, round(SAMPLE_US / once_us)), lead=0, hold_us=0)

    def sample(self, plan: SamplePlan) -> tuple[float, GpuState]:
        """Microseconds of the quickest launch."""
        return min(_time_us(plan.launch) for _ in range(plan.launches)), GpuState()

    def once(self, launch: Callable[[], object], before: Queue, after: Queue) -> float:
        """Microseconds of a single launch, between what prepares it and what looks at it."""
        before()
        microseconds = _time_us(launch)
        after()
        return microseconds

    def warnings(self) -> tuple[str, ...]:
        """What else kept the CPU busy."""
        busy = os.getloadavg()[0]
        return (f"the load of this machine is {busy:.1f} on {threads()} cores",) if busy > threads() + 0.5 else ()


def _time_us(launch: Callable[[], object]) -> float:
    begin = time.perf_counter()
    launch()
    return (time.perf_counter() - begin) * 1e6
