"""How fast a kernel is on each family of inputs: beside itself on normal ones, in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from flashladder.common.console import progress
from flashladder.common.measure.entrants import assemble
from flashladder.common.measure.timing import Contender, TimingSettings, measure
from flashladder.common.problem.check import Check
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.inputs import Tensors, allocate, draw
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.runtime.execute import on_gpu
from flashladder.common.runtime.gpu import faults_named
from flashladder.common.studies.accuracy.deviation import LEAST_TIME_RATIO
from flashladder.common.studies.accuracy.study import MET, MISSED, Study

if TYPE_CHECKING:
    from flashladder.common.compiler.artifact import Artifact
    from flashladder.common.records.records import Row

HEADS, ROWS = 16, 4096  # of the problem that is timed
ROUNDS = 8
Wrong = Callable[[str, str, str], bool]  # whether a rung's output, by its label, dtype and family, missed a bar


def rows(study: Study, wrong: Wrong) -> Iterator[list[Row]]:
    """The rows of each kernel as soon as it is timed, but for the families where its output is wrong."""
    run = records.new_run()
    plain = {dtype: Problem(num_heads=HEADS, seqlen_q=ROWS, dtype=dtype, seed=study.seed) for dtype in study.dtypes}
    lineup, _ = assemble(study.entrants, list(plain.values()), study.place)
    total, done = sum(map(len, lineup.values())), 0
    with progress("kernels timed") as update:
        for normal, kernels in lineup.items():
            inputs = dict(_inputs(normal, study.families))
            for label, artifact in kernels.items():
                update(done, total, f"{label}, {normal.dtype}")
                done += 1
                right = {
                    family: given
                    for family, given in inputs.items()
                    if family == NORMAL or not wrong(artifact.version, normal.dtype, family)
                }
                place = {"run": run} | records.of_place(on_gpu=True) | records.of_code(artifact)
                yield [place | row for row in _timed(artifact, right)]


def _inputs(normal: Problem, families: Iterable[str]) -> Iterator[tuple[str, tuple[Problem, Tensors]]]:
    for family in dict.fromkeys((NORMAL, *families)):
        problem = Problem(num_heads=HEADS, seqlen_q=ROWS, dtype=normal.dtype, seed=normal.seed, family=family)
        yield family, (problem, _tensors(problem))


def _tensors(problem: Problem) -> Tensors:
    tensors = allocate(problem, "cuda")
    draw(problem, tensors.by_name, "cuda")  # where the CPU would take a second for each
    return tensors


def _timed(artifact: Artifact, inputs: Mapping[str, tuple[Problem, Tensors]]) -> Iterator[Row]:
    contenders = [_contender(artifact, family, *given) for family, given in inputs.items()]
    measured = measure(contenders, TimingSettings(rounds=ROUNDS))
    for family in [family for family in inputs if family != NORMAL]:
        ratio = measured.ratio(family)
        is_met = ratio.value >= LEAST_TIME_RATIO
        yield {
            **records.of_problem(inputs[family][0]),
            "verdict": MET if is_met else MISSED,
            "missed": "" if is_met else "time",
            "time_us": measured.time_us(family),
            "normal_us": measured.time_us(NORMAL),
            "time_ratio": ratio.value,
            "time_ratio_low": ratio.low,
            "time_ratio_high": ratio.high,
        }


def _contender(artifact: Artifact, family: str, problem: Problem, tensors: Tensors) -> Contender:
    """The kernel on a family's inputs. What it computes was judged before; here it has to repeat it to the bit."""
    launch = on_gpu(artifact, problem, tensors)
    with faults_named(artifact):
        launch()
    first = tensors.o.clone()

    def repeated(launch: Callable[[], object]) -> Check:
        tensors.poison()
        with faults_named(artifact):
            launch()
        is_same = bool((tensors.o.view(first.dtype) == first).all())
        return Check(0.0, 0.0, 0.0, 0.0, () if is_same else ("two runs on the same inputs differ",))

    return Contender(family, launch, repeated)
