"""Runs kernels over families of inputs: rows with their errors, and whether they meet the bars.

Families that share a softmax_scale are the sequences of one batch, so that a kernel is launched once for all of them;
each is judged alone. Few rows of queries are enough, however many the keys: errors are means over rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flashladder.common.console import duration, progress, warn
from flashladder.common.measure.baselines import Baseline, official
from flashladder.common.measure.entrants import Entrant, Launched, assemble
from flashladder.common.own import FIRST
from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.inputs import Tensors, allocate, draw
from flashladder.common.problem.problem import DTYPES, Problem, operation_named
from flashladder.common.records import records
from flashladder.common.runtime.execute import emulation_seconds, on_emulator, on_gpu
from flashladder.common.runtime.gpu import faults_named
from flashladder.common.runtime.target import Target
from flashladder.common.studies.accuracy import yardstick
from flashladder.common.studies.accuracy.deviation import (
    OF_O,
    Bars,
    Deviation,
    Exact,
    bars,
    bars_of_gradient,
    compare,
    exact,
    exact_gradients,
)

if TYPE_CHECKING:
    from flashladder.common.compiler.artifact import Artifact
    from flashladder.common.records.records import Row

YARDSTICK, MET, MISSED = "yardstick", "met", "missed"  # verdicts
_BARS = {"mean": "mean_error", "rms": "rms_error", "max_ulps": "max_ulps", "lse": "lse_error"}

Attend = Callable[[], Sequence[Any]]  # gives the outputs in their order, tensors; a library may have None for LSE


@dataclass(frozen=True)
class Study:
    """What is run: kernels, on every family with each dtype and number of keys."""

    entrants: Sequence[Entrant | Launched]
    place: Target
    baselines: Sequence[Baseline] = ()
    families: Sequence[str] = tuple(FAMILIES)
    dtypes: Sequence[str] = tuple(DTYPES)
    lengths: Sequence[int] = (512,)
    rows: int = 128  # of queries
    heads: int = 1
    seed: int = 0
    operation: str = FIRST

    @property
    def device(self) -> str:
        """torch's."""
        return "cuda" if self.place.on_gpu else "cpu"

    def stacks(self) -> list[Stack]:
        """The batches, those of one dtype and length beside each other."""
        return [stack for dtype in self.dtypes for length in self.lengths for stack in self._stacked(dtype, length)]

    def problem(self, family: str, dtype: str, length: int) -> Problem:
        """One sequence."""
        sizes = operation_named(self.operation).of_rows(self.rows, self.heads)
        return Problem(operation=self.operation, seqlen_k=length, dtype=dtype, seed=self.seed, family=family, **sizes)

    def _stacked(self, dtype: str, length: int) -> Iterator[Stack]:
        groups: dict[float, list[Problem]] = {}
        for family in self.families:
            problem = self.problem(family, dtype, length)
            groups.setdefault(problem.softmax_scale, []).append(problem)
        for problems in groups.values():
            yield Stack(replace(problems[0], batch=len(problems), family="normal"), tuple(problems))


@dataclass(frozen=True)
class Stack:
    """One batch: a sequence for each problem."""

    problem: Problem
    parts: tuple[Problem, ...]

    def tensors(self, device: str) -> Tensors:
        """Each problem's inputs, drawn on the device."""
        tensors = allocate(self.problem, device)
        for i, part in enumerate(self.parts):
            draw(part, {name: tensor[i : i + 1] for name, tensor in tensors.by_name.items()}, device)
        return tensors


@dataclass(frozen=True)
class _Subject:
    """Something that computes attention: what a row says of it, and how it is run on a batch's tensors."""

    row: Row
    run: Attend


def rows(study: Study) -> Iterator[list[Row]]:
    """The rows of each kernel and batch as soon as it is done; what takes no part is said on the way."""
    run, stacks = records.new_run(), study.stacks()
    lineup, left_out = assemble(study.entrants, [stack.problem for stack in stacks], study.place)
    for reason in dict.fromkeys(left_out):
        warn(reason)
    absent: dict[str, str] = {}
    if not study.place.on_gpu and study.operation == FIRST:  # whose tiles are rows of one head
        spelled = duration(emulation_of(lineup))
        warn(f"about {spelled} on the emulator for errors; fewer rungs, --families or --dtypes take less")
    with progress("batches") as update:
        for done, stack in enumerate(stacks):
            update(done, len(stacks), f"{stack.problem.dtype}, {stack.problem.seqlen_k} keys")
            place = {"run": run} | records.of_place(study.place.on_gpu)
            for found in _rows(study, stack, lineup.get(stack.problem, {}), absent):
                yield [place | row for row in found]
    for name, reason in absent.items():
        warn(f"without {name}: {reason}")


def emulation_of(lineup: Mapping[Problem, Mapping[str, Artifact]]) -> float:
    """Seconds that the emulator takes for all kernels: of each problem one is tried on a few blocks."""
    return sum(
        len(kernels) * emulation_seconds(next(iter(kernels.values())), problem, race=False)
        for problem, kernels in lineup.items()
        if kernels
    )


def _rows(study: Study, stack: Stack, kernels: Mapping[str, Artifact], absent: dict[str, str]) -> Iterator[list[Row]]:
    tensors = stack.tensors(study.device)
    truths = _truths(stack.problem, tensors)
    first, *others = _subjects(study, stack.problem, tensors, kernels, absent)
    yardsticks = _deviations(first, truths)
    judged = [
        (part, gradient, truth)
        for gradient, of_parts in truths.items()
        for part, truth in zip(stack.parts, of_parts, strict=True)
    ]
    limits = [_bars(*each, theirs) for each, theirs in zip(judged, yardsticks, strict=True)]
    for subject in (first, *others):
        found = yardsticks if subject is first else _deviations(subject, truths)
        yield [
            {
                **subject.row,
                **records.of_problem(part),
                "gradient": gradient,
                "yardstick": first.row["version"],
                **{name: _rounded(value) for name, value in asdict(ours).items()},
                **{f"{name}_bar": _rounded(getattr(limit, figure)) for name, figure in _BARS.items()},
                **({"verdict": YARDSTICK} if subject is first else _verdict(limit, ours)),
            }
            for (part, gradient, _), limit, ours in zip(judged, limits, found, strict=True)
        ]


def _truths(problem: Problem, tensors: Tensors) -> dict[str | None, list[Exact]]:
    """What is exact of each sequence, by the gradient's name; O has none."""
    if problem.outputs == OF_O:
        return {None: exact(problem, tensors).sequences()}
    return {name: truth.sequences() for name, truth in exact_gradients(problem, tensors).items()}


def _bars(part: Problem, gradient: str | None, truth: Exact, theirs: Deviation) -> Bars:
    if gradient:
        return bars_of_gradient(theirs, part.dtype)
    return bars(truth, theirs, part.dtype, part.seqlen_k, FAMILIES[part.family].one_hot)


def _deviations(subject: _Subject, truths: Mapping[str | None, Sequence[Exact]]) -> list[Deviation]:
    """Of each sequence of each output that is judged."""
    *outputs, lse = subject.run() if None in truths else (*subject.run(), None)
    return [
        compare(truth, output[i : i + 1], None if lse is None else lse[i : i + 1])
        for output, of_parts in zip(outputs, truths.values(), strict=True)
        for i, truth in enumerate(of_parts)
    ]


def _rounded(value: float | None) -> float | None:
    """Four digits are enough of an error, and keep the log small."""
    return None if value is None else float(f"{value:.3e}")


def _verdict(limit: Bars, ours: Deviation) -> Row:
    missed = limit.missed(ours)
    return {"verdict": MISSED, "missed": " ".join(missed)} if missed else {"verdict": MET}


def _subjects(
    study: Study, problem: Problem, tensors: Tensors, kernels: Mapping[str, Artifact], absent: dict[str, str]
) -> Iterator[_Subject]:
    """Other people's kernels, official FlashAttention-2 or what stands for it first, and ours."""
    present = []
    for baseline in study.baselines:
        if reason := baseline.missing() or baseline.refusal(problem):
            absent[baseline.name] = reason
        else:
            present.append(baseline)
    first = official(problem.operation).name
    if first not in [baseline.name for baseline in present]:
        yield _Subject({"version": yardstick.NAME}, partial(yardstick.run, problem, tensors))
    for baseline in sorted(present, key=lambda baseline: baseline.name != first):
        yield _Subject({"version": baseline.name}, baseline.prepare(problem, tensors))
    for artifact in kernels.values():
        yield _Subject(records.of_code(artifact), partial(_run, study.place, artifact, problem, tensors))


def _run(place: Target, artifact: Artifact, problem: Problem, tensors: Tensors) -> list[torch.Tensor]:
    tensors.poison()
    if place.on_gpu:
        with faults_named(artifact):
            on_gpu(artifact, problem, tensors)()
    else:
        on_emulator(artifact, problem, tensors, race=False)
    return [*tensors.outputs.values()]
