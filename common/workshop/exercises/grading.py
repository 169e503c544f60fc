"""Grades a kernel that was written for an exercise. No GPU needed.

It runs on the emulator, under the race detector. Its output is compared with the exact answer, also on inputs that a
softmax which is not quite right does not survive, and which are drawn anew each time. Its figures are compared with
those of the start and of the rung, which are found in the same way.
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sass import read
from flashladder.common.emulator import Report
from flashladder.common.errors import EmulatorError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.workshop.exercises.exercise import Exercise
from flashladder.common.workshop.exercises.measures import MEASURES

GPU = "h100"  # compiled for, wherever it is graded
MOST_SEEDS = 1_000_000

Figures = dict[str, int]  # by the name of the measure


@dataclass(frozen=True)
class Grade:
    """What became of a kernel. Faults are in words; without figures it did not run to its end."""

    exercise: Exercise
    start: Figures
    rung: Figures
    own: Figures
    faults: tuple[str, ...]
    kernel: Artifact
    error: EmulatorError | None = None  # that ended its run, a race for example; the last of the faults

    @property
    def bound(self) -> int:
        """The most that the goal's figure may be; a fault is mended with no more than the rung has."""
        goal = self.exercise.goal
        if self.exercise.fault:
            return self.rung[goal]
        return self.exercise.measure.bound(self.start[goal], self.rung[goal])

    @property
    def reached(self) -> bool:
        """Whether the goal is reached, be the kernel right or wrong."""
        return bool(self.own) and self.own[self.exercise.goal] <= self.bound

    @property
    def solved(self) -> bool:
        return self.reached and not self.faults


def grade(exercise: Exercise, kernel: Path) -> Grade:
    """The grade of a kernel. Raises BuildError where it does not compile, or spills where the rung does not."""
    problem, gpu = exercise.problem, load_gpu(GPU)
    config = exercise.version.config_for(problem, gpu)
    kernels = (exercise.start_kernel, exercise.version.kernel, kernel.resolve())
    versions = [dataclasses.replace(exercise.version, kernel=each) for each in kernels]
    start, rung, own = build([BuildRequest(version, config, gpu.arch) for version in versions])
    faults: list[str] = []
    figures: Figures = {}
    ended: EmulatorError | None = None
    try:
        figures = _figures(_run(own, problem, faults), own)
        for family in exercise.families:
            _run(own, dataclasses.replace(problem, family=family), faults)
        unseen = 1 + secrets.randbelow(MOST_SEEDS)  # else a kernel could know all inputs, and skip work for them
        _run(own, dataclasses.replace(problem, seed=unseen), faults, race=False)
    except EmulatorError as error:
        faults.append(str(error))
        ended = error
    return Grade(exercise, _known(start, problem), _known(rung, problem), figures, tuple(faults), own, ended)


def _run(artifact: Artifact, problem: Problem, faults: list[str], race: bool = True) -> Report:
    """Runs a kernel; what is wrong with its output is added to the faults. Races are looked for on normal inputs."""
    tensors = make_inputs(problem)
    report = on_emulator(artifact, problem, tensors, race=race and problem.family == NORMAL)
    check = verify(expect(problem, tensors), tensors.outputs, tensors.buffers)
    inputs = f" (inputs: {problem.family}, seed {problem.seed})" if problem.family != NORMAL or problem.seed else ""
    faults += [f"{fault}{inputs}" for fault in check.faults]
    return report


@cache
def _known(artifact: Artifact, problem: Problem) -> Figures:
    """The figures of a kernel of the ladder."""
    return _figures(on_emulator(artifact, problem, make_inputs(problem), race=False), artifact)


def _figures(report: Report, artifact: Artifact) -> Figures:
    code = read(artifact)
    return {name: measure.of(report, code) for name, measure in MEASURES.items()}
