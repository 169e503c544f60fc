"""How references are timed on the CPU."""

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


class CpuTimer:
    """Times what runs on the CPU, for common/measure/timing.py."""

    def __init__(self, mode: str) -> None:
        if mode != "hot":
            raise ConfigError(f"--mode {mode} is for GPUs; on a CPU there is only hot")

    def plan(self, launch: Callable[[], object]) -> SamplePlan:
        """As many launches as make a sample long enough, after a warm-up."""
        launch()
        begin = time.perf_counter()
        launch()
        once_us = (time.perf_counter() - begin) * 1e6
        return SamplePlan(launch, launches=max(1, round(SAMPLE_US / once_us)), lead=0, hold_us=0)

    def sample(self, plan: SamplePlan) -> tuple[float, GpuState]:
        """Microseconds a launch."""
        begin = time.perf_counter()
        for _ in range(plan.launches):
            plan.launch()
        return (time.perf_counter() - begin) * 1e6 / plan.launches, GpuState()

    def once(self, launch: Callable[[], object], before: Queue, after: Queue) -> float:
        """Microseconds of a single launch, between what prepares it and what looks at it."""
        before()
        begin = time.perf_counter()
        launch()
        microseconds = (time.perf_counter() - begin) * 1e6
        after()
        return microseconds

    def warnings(self) -> tuple[str, ...]:
        """What else kept the CPU busy."""
        busy = os.getloadavg()[0]
        return (f"the load of this machine is {busy:.1f} on {threads()} cores",) if busy > threads() + 0.5 else ()
