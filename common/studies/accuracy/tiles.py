"""How many tiles of S a kernel computes twice on each family of inputs: what rows cost that jump out of range.

The emulator counts. Each tile takes the tensor cores the same work, so what they do beyond their work on normal inputs,
where no row jumps, are tiles that are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashladder.common.console import duration, progress, warn
from flashladder.common.measure.entrants import assemble
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.studies.accuracy.study import Study, emulation_of

if TYPE_CHECKING:
    from flashladder.common.compiler.artifact import Artifact
    from flashladder.common.records.records import Row


def rows(study: Study) -> Iterator[list[Row]]:
    """The rows of each kernel, dtype and number of keys; none of a kernel that uses no tensor cores."""
    run = records.new_run()
    plain = [study.problem(NORMAL, dtype, keys) for dtype in study.dtypes for keys in study.lengths]
    lineup, _ = assemble(study.entrants, plain, study.place)
    spelled = duration(len(study.families) * emulation_of(lineup))
    warn(f"about {spelled} more to count the tiles that are computed twice; --no-time counts none")
    total, done = sum(map(len, lineup.values())), 0
    with progress("tiles counted") as update:
        for normal, kernels in lineup.items():
            for label, artifact in kernels.items():
                update(done, total, f"{label}, {normal.dtype}, {normal.seqlen_k} keys")
                done += 1
                place = {"run": run} | records.of_place(on_gpu=False) | records.of_code(artifact)
                yield [place | row for row in _counted(study, artifact, normal)]


def _counted(study: Study, artifact: Artifact, normal: Problem) -> Iterator[Row]:
    least = _work(artifact, normal)
    if not least:
        return
    for family in study.families:
        problem = study.problem(family, normal.dtype, normal.seqlen_k)
        twice = 0.0 if family == NORMAL else _work(artifact, problem) / least - 1
        yield {**records.of_problem(problem), "computed_twice": twice}


def _work(artifact: Artifact, problem: Problem) -> int:
    """Operations of the tensor cores."""
    return on_emulator(artifact, problem, make_inputs(problem), race=False).mma_flops
