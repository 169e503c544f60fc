"""What a rung gives beside its parent: whether it is right, what the compiler made of it, and how fast it is.

Every part raises what is wrong with the rung: BuildError, EmulatorError (a race too), VerificationError, DeviceError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashladder.common.catalog import PTXAS_LEVEL, Version, find, one_operation
from flashladder.common.compiler import Artifact, BuildRequest, PtxModule, build
from flashladder.common.compiler.sass.code import Code, read
from flashladder.common.errors import ConfigError, FlashLadderError
from flashladder.common.problem.check import Check, expect, verify
from flashladder.common.problem.config import Value
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.runtime.target import Target

if TYPE_CHECKING:
    from flashladder.common.emulator import Report
    from flashladder.common.measure.statistics import Estimate, Verdict
    from flashladder.common.records.records import Row

EMULATED_BLOCKS = 4  # enough to go round every loop


@dataclass(frozen=True)
class Idea:
    """A rung, what it is compared with, and the problem; both in their default configurations, but for `values`.

    A rung may be compared with itself in its default configuration: then `values` hold for the one alone.
    """

    version: Version
    parent: Version
    problem: Problem
    place: Target
    values: Mapping[str, Value]

    @property
    def against(self) -> str:
        """What it is compared with, in words."""
        return self.parent.address + (" by default" if self.parent == self.version else "")

    def ours(self, problem: Problem) -> BuildRequest:
        """What is compiled of the rung for a problem. Raises as `Version.check` does."""
        return self._request(self.version, problem, self.values)

    def parents(self, problem: Problem) -> BuildRequest:
        """The same of what it is compared with, with those values that it has too."""
        names = {*self.parent.choices, PTXAS_LEVEL} if self.parent != self.version else ()
        return self._request(self.parent, problem, {name: v for name, v in self.values.items() if name in names})

    def small(self) -> Problem:
        """The problem as small as the emulator has a quick answer to: one head of K, the heads of Q that share it,
        one tile, and a few blocks of what a CTA goes through."""
        config = self.version.config_for(self.problem, self.place.gpu, **self.values)
        tile = {"seqlen_q": "block_m", "seqlen_k": "block_n"}
        rows = {length: int(config.as_dict().get(block, 64)) for length, block in tile.items()}
        rows[self.problem.asked.gone_through] *= EMULATED_BLOCKS
        seqlen_q = min(rows["seqlen_q"], self.problem.seqlen_q)
        group = self.problem.num_heads // self.problem.num_heads_k
        one_head = replace(self.problem, batch=1, num_heads=group, num_heads_k=1, layout="bshd")
        return replace(one_head, seqlen_q=seqlen_q, seqlen_k=max(rows["seqlen_k"], seqlen_q))

    def _request(self, version: Version, problem: Problem, values: Mapping[str, Value]) -> BuildRequest:
        config = version.config_for(problem, self.place.gpu, **values)
        version.check(problem, config)
        return BuildRequest(version, config, self.place.arch)


@dataclass(frozen=True)
class Built:
    """The kernels of both."""

    parent: Artifact
    ours: Artifact


@dataclass(frozen=True)
class Emulated:
    """A right output without a race, and what it took."""

    problem: Problem
    check: Check
    report: Report


@dataclass(frozen=True)
class Timing:
    """Times of both in the same rounds: the ratio is the parent's time / ours."""

    ratio: Estimate
    control: Estimate  # the parent against itself
    verdict: Verdict
    rounds: int
    mode: str
    parent_us: float
    time_us: float
    place: Row  # where it was measured
    notes: tuple[str, ...] = ()


IdeaTimer = Callable[[Idea, Built], Timing]
EmulatorProgress = Callable[..., None]  # see emulator.run


@dataclass(frozen=True)
class Trial:
    """All of it; without a GPU there is no timing."""

    idea: Idea
    built: Built
    parent: Code
    ours: Code
    emulated: Emulated
    timing: Timing | None

    @property
    def is_same_code(self) -> bool:
        """Whether the compiler made the same of both."""
        return self.built.parent.code == self.built.ours.code


TrialPart = Emulated | Built | Trial


def opponent(version: Version, against: str | None) -> Version:
    """The rung of that name, or the one below. ConfigError where there is none."""
    if parent := find(against) if against else version.below():
        return parent
    raise ConfigError(f"{version.name} has no rung below: say what to compare it with, --against RUNG")


def compare(version: Version, parent: Version, problem: Problem, place: Target, values: Mapping[str, Value]) -> Idea:
    """An idea; ConfigError or UnsupportedProblemError where the two have nothing in common."""
    one_operation([version.operation, parent.operation])
    idea = Idea(version, parent, problem, place, values)
    if idea.ours(problem) == idea.parents(problem):
        raise ConfigError(f"{version.name} would be compared with itself: name another rung, or another --config")
    return idea


def make(idea: Idea, on_ptx: Callable[[PtxModule], None]) -> Built:
    """Compiles the rung, and where it has not been, its parent.

    `on_ptx` is called with what the emulator is to run as soon as nvcc is through with it, while ptxas goes on.
    """
    parent, ours = idea.parents(idea.problem), idea.ours(idea.problem)
    small = idea.ours(idea.small())

    def translated(request: BuildRequest, module: PtxModule) -> None:
        if request == small:
            on_ptx(module)

    distinct = list(dict.fromkeys([small, ours, parent]))
    found = dict(zip(distinct, build(distinct, on_ptx=translated), strict=True))
    built = Built(found[parent], found[ours])
    for artifact in (built.parent, built.ours):
        idea.place.check(artifact)
    return built


def emulate(idea: Idea, module: PtxModule, progress: EmulatorProgress | None = None) -> Emulated:
    """Runs the rung on the emulator under the race detector, and verifies it."""
    problem = idea.small()
    tensors = make_inputs(problem)
    tensors.poison()
    report = on_emulator(module, problem, tensors, progress=progress)
    check = verify(expect(problem, tensors), tensors.outputs, tensors.buffers)
    check.require(f"{idea.version.name} at {problem.name}")
    return Emulated(problem, check, report)


def codes(built: Built) -> tuple[Code, Code]:
    """The machine code of both, the parent's first."""
    return read(built.parent), read(built.ours)


def hold(
    idea: Idea,
    timer: IdeaTimer | None,
    tell: Callable[[TrialPart], None] = lambda part: None,
    progress: EmulatorProgress | None = None,
) -> Trial:
    """The whole trial. `tell` is called with each part as soon as it is known, `progress` as the emulator does.

    The emulator has its answer while ptxas is at work. Next come the kernels, the trial without times, and with them.
    Kernels of one machine code are not timed: they are as fast as each other.
    """
    emulation: Future[Emulated] = Future()

    def run(module: PtxModule) -> None:
        try:
            emulated = emulate(idea, module, progress)
        except FlashLadderError as error:  # raised when ptxas is through
            emulation.set_exception(error)
        else:
            emulation.set_result(emulated)
            tell(emulated)

    built = make(idea, run)
    tell(built)
    emulated = emulation.result()
    trial = Trial(idea, built, *codes(built), emulated, None)
    tell(trial)
    if timer is None or trial.is_same_code:
        return trial
    trial = replace(trial, timing=timer(idea, built))
    tell(trial)
    return trial
