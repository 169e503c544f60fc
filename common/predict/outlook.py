"""What a run would take on a GPU that is not here, by the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashladder.common.compiler import build_one
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.emulator import Report
from flashladder.common.measure.entrants import Entrant
from flashladder.common.predict import cost
from flashladder.common.predict.agreement import conflict_factor
from flashladder.common.problem.config import GpuDescription
from flashladder.common.problem.problem import Problem


@dataclass(frozen=True)
class Outlook:
    """A predicted time, of which kernel and problem, and how far such predictions were off."""

    artifact: Artifact
    problem: Problem
    gpu: GpuDescription
    time_us: float
    experience: cost.Experience | None

    @property
    def interval_us(self) -> tuple[float, float] | None:
        """What the GPU took for what was predicted so, as far as that is known."""
        known = self.experience
        return (self.time_us * known.low, self.time_us * known.high) if known else None

    def __str__(self) -> str:
        said = "no prediction for this ladder was held against a GPU"
        if self.interval_us:
            said = f"{cost.span(*self.interval_us, ',.0f')} us, as {self.experience}"
        named = self.problem.name.replace(",", ", ")
        return f"{self.time_us:,.0f} us on {self.gpu.title}, by the cost model: nothing was timed; {named}; {said}"


def predict(entrant: Entrant, ask: Callable[[], Problem], gpu: GpuDescription, report: Report) -> Outlook:
    """The predicted time. FlashLadderError where there is no such problem or no prediction.

    `ask` gives the problem; `report` tells of the kernel's bank conflicts, at any size.
    """
    problem = ask()
    artifact = build_one(entrant.version, entrant.config(problem, gpu), gpu.arch)
    time_us = cost.time_us(problem, artifact, gpu, conflict_factor(report))
    return Outlook(artifact, problem, gpu, time_us, cost.experience(entrant.version))
