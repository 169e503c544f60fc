"""An experiment on the GPU, timed, or on the emulator, counted: rows for its log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from flashladder.common.catalog import Version
from flashladder.common.console import progress, warn
from flashladder.common.measure import baselines, contest
from flashladder.common.measure.entrants import assemble
from flashladder.common.measure.timing import TimingSettings
from flashladder.common.problem.check import Expected, expect, verify
from flashladder.common.problem.inputs import Tensors, make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.runtime import execute
from flashladder.common.runtime.target import Target
from flashladder.common.studies.experiments import traffic
from flashladder.common.studies.experiments.sweeps import Experiment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashladder.common.compiler.artifact import Artifact
    from flashladder.common.measure.entrants import Lineup
    from flashladder.common.records.records import Row

NUM_HEADS, TOKENS, HEAD_DIM = 16, 16384, 128  # of the GPU's problems


def rows(
    experiment: Experiment, rungs: Sequence[Version], place: Target, lengths: Sequence[int], settings: TimingSettings
) -> Iterator[list[Row]]:
    """The rows of each problem as soon as it is done; what takes no part is said on the way."""
    run = records.new_run()
    problems = [_problem(place, length, dtype) for dtype in experiment.dtypes for length in lengths]
    lineup, left_out = assemble(experiment.entrants(rungs), problems, place)
    for reason in dict.fromkeys(left_out):
        warn(reason)
    found = _measured(experiment, lineup, settings, run) if place.on_gpu else _counted(experiment, lineup, run)
    for by_label in found:
        yield [{**row, "label": label} for label, row in by_label.items()]


def _problem(place: Target, length: int, dtype: str) -> Problem:
    batch, heads = (max(1, TOKENS // length), NUM_HEADS) if place.on_gpu else (1, 1)
    return Problem(batch=batch, num_heads=heads, seqlen_q=length, head_dim=HEAD_DIM, dtype=dtype)


def _measured(experiment: Experiment, lineup: Lineup, settings: TimingSettings, run: str) -> Iterator[dict[str, Row]]:
    for problem, artifacts in lineup.items():
        others = [baselines.find(name, problem.operation) for name in experiment.baselines]
        result = contest.hold(problem, artifacts, others, settings)
        for remark in result.remarks:
            warn(remark)
        for name, reason in result.absent.items():
            warn(f"no {name} at {problem.name}: {reason}")
        found = records.of_contest(result, run, artifacts)
        if experiment.memory:
            for name, used in _memory(problem, artifacts, others).items():
                found[name]["memory_bytes"] = used
        yield found


def _memory(
    problem: Problem, artifacts: Mapping[str, Artifact], others: Sequence[baselines.Baseline]
) -> dict[str, int]:
    """Bytes of GPU memory that each takes beyond Q, K and V."""
    tensors = make_inputs(problem, "cuda")
    used = {}
    for label, artifact in artifacts.items():
        used[label] = tensors.o.nbytes + tensors.lse.nbytes + _allocated(execute.on_gpu(artifact, problem, tensors))
    for baseline in others:
        if not (baseline.missing() or baseline.refusal(problem)):
            used[baseline.name] = _allocated(baseline.prepare(problem, tensors))
    return used


def _allocated(launch: Callable[[], object]) -> int:
    """Bytes that a launch has allocated at most."""
    launch()  # libraries keep a workspace from their first launch on
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    launch()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _counted(experiment: Experiment, lineup: Lineup, run: str) -> Iterator[dict[str, Row]]:
    with progress(experiment.title) as update:
        total, done = sum(map(len, lineup.values())), 0
        for problem, artifacts in lineup.items():
            what = {"run": run} | records.of_place(on_gpu=False) | records.of_problem(problem)
            tensors = make_inputs(problem)
            expected = expect(problem, tensors)
            found = {}
            for label, artifact in artifacts.items():
                update(done, total, f"{label}, S = {problem.seqlen_q}")
                found[label] = what | _emulate(artifact, problem, tensors, expected)
                done += 1
            if experiment.memory:  # by formula: nothing is allocated here
                for row in found.values():
                    row["memory_bytes"] = traffic.outputs(problem)
                found["math"] = what | {"version": "math", "memory_bytes": traffic.textbook(problem)}
            yield found


def _emulate(artifact: Artifact, problem: Problem, tensors: Tensors, expected: Expected) -> Row:
    """What the emulator counts, of a kernel whose output is right; VerificationError otherwise."""
    tensors.poison()
    report = execute.on_emulator(artifact, problem, tensors)
    check = verify(expected, tensors.outputs, tensors.buffers)
    check.require(f"{artifact.version} with {artifact.config.name}")
    return records.of_artifact(artifact) | records.of_check(check) | records.of_report(report)
