"""The CPU that references run on, how they are timed there, and against what."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashladder.common.baselines import BASELINES, Baseline, Run
from flashladder.common.errors import ConfigError
from flashladder.common.measure import Plan
from flashladder.common.nvml import GpuState
from flashladder.common.problem import Problem, Tensors

SAMPLE_US = 20e3


def threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


@cache
def identity() -> str:
    """The CPU's name and features: code that was compiled for one CPU is not for another."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    wanted = ("model name", "flags", "CPU part", "Features")  # the latter two on Arm
    return "\n".join(sorted(line for line in lines if line.startswith(wanted))) or platform.machine()


def title() -> str:
    """The CPU in words."""
    names = [line.partition(":")[2].strip() for line in identity().splitlines() if line.startswith("model name")]
    cores = "1 core" if threads() == 1 else f"{threads()} cores"
    return f"{names[0] if names else platform.machine()}, {cores}"


class Clock:
    """Times what runs on the CPU, for common/measure.py."""

    def __init__(self, mode: str) -> None:
        if mode != "hot":
            raise ConfigError(f"--mode {mode} is for GPUs; on a CPU there is only hot")

    def plan(self, launch: Callable[[], object]) -> Plan:
        """As many launches as make a sample long enough, after a warm-up."""
        launch()
        begin = time.perf_counter()
        launch()
        once_us = (time.perf_counter() - begin) * 1e6
        return Plan(launch, launches=max(1, round(SAMPLE_US / once_us)), lead=0, hold_us=0)

    def sample(self, plan: Plan) -> tuple[float, GpuState]:
        """Microseconds a launch."""
        begin = time.perf_counter()
        for _ in range(plan.launches):
            plan.launch()
        return (time.perf_counter() - begin) * 1e6 / plan.launches, GpuState()

    def warnings(self) -> tuple[str, ...]:
        """What else kept the CPU busy."""
        busy = os.getloadavg()[0]
        return (f"the load of this machine is {busy:.1f} on {threads()} cores",) if busy > threads() + 0.5 else ()


class CpuBaseline(Baseline):
    """What torch computes on the CPU."""

    def missing(self) -> str | None:
        return None

    def refusal(self, problem: Problem) -> str | None:
        reason = self.refuses(problem)
        return f"{self.title} {reason}" if reason else None


def _sdpa(_: Any, problem: Problem, tensors: Tensors) -> Run:
    q, k, v = (tensor.transpose(1, 2) for tensor in (tensors.q, tensors.k, tensors.v))
    grouped = problem.num_heads != problem.num_heads_k

    def run() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, scale=problem.softmax_scale, enable_gqa=grouped
        ).transpose(1, 2)

    return run


_MATH = BASELINES["math"]
SDPA = CpuBaseline("sdpa", "scaled_dot_product_attention (torch)", "torch", "torch", "", _sdpa, _MATH.refuses)
CPU_BASELINES = {"sdpa": SDPA, "math": CpuBaseline(**vars(_MATH))}
