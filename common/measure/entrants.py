"""Who takes part in a comparison: kernels with their configurations, compiled for every problem that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from flashladder.common import catalog
from flashladder.common.catalog import Reference, Version, winners
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.console import progress
from flashladder.common.errors import BuildError, UnsupportedProblemError
from flashladder.common.problem.config import GpuDescription, KernelConfig, Value, parse_values

if TYPE_CHECKING:
    from flashladder.common.measure.references import Configured
    from flashladder.common.problem.problem import Problem
    from flashladder.common.runtime.target import Target

Lineup: TypeAlias = "dict[Problem, dict[str, Artifact]]"  # the kernels of each problem, by the entrants' labels


@dataclass(frozen=True)
class Entrant:
    """A rung in a configuration; fields that are not among the values follow the problem, or the rung's defaults."""

    label: str
    version: Version
    values: dict[str, Value]
    tuned_for: str | None = None  # the GPU whose winner goes before the values, for problems that it has one for

    @property
    def kernel(self) -> Version:
        return self.version

    @property
    def operation(self) -> str:
        return self.version.operation

    def winner(self, problem: Problem) -> KernelConfig | None:
        """What was tuned for the GPU, where that was asked for and goes with the problem."""
        return winners.config(self.version, self.tuned_for, problem) if self.tuned_for else None

    def config(self, problem: Problem, gpu: GpuDescription | None) -> KernelConfig:
        """What is compiled for a problem, by default for `gpu`. UnsupportedProblemError where the rung refuses it."""
        config = self.winner(problem) or self.version.config_for(problem, gpu, **self.values)
        self.version.check(problem, config)
        return config

    def request(self, problem: Problem, place: Target) -> BuildRequest:
        """What is compiled for a problem there. UnsupportedProblemError where the rung refuses it."""
        return BuildRequest(self.version, self.config(problem, place.gpu), place.arch)


@dataclass(frozen=True)
class Launched:
    """Of each problem the rung that calls launch, in the configuration that they take."""

    operation: str

    @property
    def label(self) -> str:
        return self.operation

    @property
    def kernel(self) -> Version:
        """One of the rungs."""
        return catalog.find(catalog.ladder_of(self.operation).launches[-1].rung)

    def request(self, problem: Problem, place: Target) -> BuildRequest:
        """What is compiled for a problem there. UnsupportedProblemError where calls launch no rung for it."""
        return BuildRequest(*catalog.choice(problem, place.card), place.arch)


@dataclass(frozen=True)
class ReferenceEntrant:
    """The same of a reference, which compiles itself."""

    label: str
    reference: Reference
    values: dict[str, Value]

    @property
    def kernel(self) -> Reference:
        return self.reference

    @property
    def operation(self) -> str:
        return self.reference.operation

    def configured(self, problem: Problem) -> Configured:
        """What takes part in a contest. UnsupportedProblemError where the reference does not take the problem."""
        from flashladder.common.measure.references import Configured  # torch takes seconds

        config = self.reference.config_for(problem, **self.values)
        self.reference.check(problem, config)
        return Configured(self.reference, config)


AnyEntrant: TypeAlias = Entrant | Launched | ReferenceEntrant


def parse(text: str, values: dict[str, Value], device: str = "gpu") -> AnyEntrant:
    """'16', '16@block_m=128' or 'triton'; what stands after the @ goes before `values`. Device: gpu or cpu.

    An operation, such as 'backward', is what calls of it launch.

    Raises DeviceError, ToolchainError or ConfigError for what cannot run on that device of this machine.
    """
    from flashladder.common.measure.references import device_for
    from flashladder.common.runtime import target

    if catalog.ladder_of(text).launches:
        target.resolve(device, None)
        return Launched(text)
    name, _, own = text.partition("@")
    kernel = catalog.find_implementation(name)
    suffix, values = f"@{own}" if own else "", values | parse_values(own)
    if isinstance(kernel, Version):
        target.resolve(device, None)
        return Entrant(kernel.address + suffix, kernel, values)
    device_for(kernel, device)
    return ReferenceEntrant(kernel.name + suffix, kernel, values)


def assemble_all(
    entrants: Sequence[AnyEntrant], problems: Sequence[Problem], device: str
) -> tuple[dict[Problem, dict[str, Artifact | Configured]], list[str]]:
    """Rungs and references: for each problem those that take it; and why others take no part."""
    from flashladder.common.runtime import target

    ladder = [entrant for entrant in entrants if not isinstance(entrant, ReferenceEntrant)]
    rungs, left_out = assemble(ladder, problems, target.resolve(device, None)) if ladder else ({}, [])
    lineup: dict[Problem, dict[str, Artifact | Configured]] = {}
    for problem in problems:
        kernels: dict[str, Artifact | Configured] = {**rungs.get(problem, {})}
        for entrant in entrants:
            if isinstance(entrant, ReferenceEntrant):
                try:
                    kernels[entrant.label] = entrant.configured(problem)
                except UnsupportedProblemError as error:
                    left_out.append(f"left out: {error}")
        if kernels:
            lineup[problem] = kernels
    return lineup, left_out


def assemble(
    entrants: Sequence[Entrant | Launched], problems: Sequence[Problem], place: Target
) -> tuple[Lineup, list[str]]:
    """For each problem the entrants that take it, all compiled at once; and why others take no part."""
    requests: dict[tuple[Problem, str], BuildRequest] = {}
    left_out = []
    for problem in problems:
        for entrant in entrants:
            try:
                requests[problem, entrant.label] = entrant.request(problem, place)
            except UnsupportedProblemError as error:
                left_out.append(f"left out: {error}")
    distinct = list(dict.fromkeys(requests.values()))
    with progress("compiled") as update:
        built = dict(zip(distinct, build(distinct, update, on_error="return"), strict=True))
    lineup: Lineup = {}
    for (problem, label), request in requests.items():
        try:
            if isinstance(artifact := built[request], BuildError):
                raise artifact
            place.check(artifact)
            lineup.setdefault(problem, {})[label] = artifact
        except (BuildError, UnsupportedProblemError) as error:
            left_out.append(f"left out: {error}")
    return lineup, left_out
