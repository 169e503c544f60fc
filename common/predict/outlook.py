"""What a run would take on a GPU that is not here, by the cost model."""

from __future__ import annotations

from collections.abc import Callable

from flashladder.common.compiler import build_one
from flashladder.common.emulator import Report
from flashladder.common.errors import FlashLadderError
from flashladder.common.measure.entrants import Entrant
from flashladder.common.predict import cost
from flashladder.common.predict.agreement import conflict_factor
from flashladder.common.problem.config import GpuDescription
from flashladder.common.problem.problem import Problem


def in_words(entrant: Entrant, ask: Callable[[], Problem], gpu: GpuDescription, report: Report) -> str:
    """The predicted time and how far it goes, or why there is none.

    `ask` gives the problem, unless there is none such; `report` tells of the kernel's bank conflicts, at any size.
    """
    try:
        problem = ask()
        artifact = build_one(entrant.version, entrant.config(problem, gpu), gpu.arch)
        time_us = cost.time_us(problem, artifact, gpu, conflict_factor(report))
    except FlashLadderError as error:
        return f"nothing: {error}"
    named = problem.name.replace(",", ", ")
    told = f"by the cost model: nothing was timed; {named}; {cost.experience(artifact)}"
    return f"{time_us:,.0f} us on {gpu.title}, {told}"
