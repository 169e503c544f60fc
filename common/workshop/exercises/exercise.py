"""An exercise: versions/LADDER/NN_name/exercise.yaml, and what follows from the ladder.

The start is the kernel of the rung below, in the rung's own configuration. The solution is the rung's kernel. Both run
the operation's small problem, or the one that the exercise declares.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictStr

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.catalog.schema import Declared, one_of, read
from flashladder.common.compiler.sass.diff import source_diff
from flashladder.common.console import warn
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.paths import VERSIONS
from flashladder.common.problem.config import listing
from flashladder.common.problem.problem import Problem, operation_named
from flashladder.common.workshop.exercises.measures import MEASURES, Measure

FILE = "exercise.yaml"
HARD = ("falling_steeply", "large_values")  # inputs: a maximum that grows with every block, and one key far above all


class ExerciseDeclaration(Declared):
    """What an exercise.yaml says."""

    task: StrictStr  # Markdown
    goal: Annotated[StrictStr, one_of(*MEASURES)]
    hints: tuple[StrictStr, ...]
    problem: dict[str, Any] = Field(default_factory=dict)  # where the operation's small one does not show enough
    families: tuple[StrictStr, ...] = HARD  # of inputs that it has to be right for, beside normal ones


@dataclass(frozen=True)
class Exercise:
    """A rung with its idea taken out."""

    version: Version
    below: Version  # whose kernel is the start
    task: str
    goal: str  # of MEASURES
    own_hints: tuple[str, ...]
    problem: Problem  # that it is graded with
    families: tuple[str, ...]  # of inputs, beside the problem's own

    @property
    def measure(self) -> Measure:
        """What the goal is set in."""
        return MEASURES[self.goal]

    @property
    def hints(self) -> tuple[str, ...]:
        """From the vaguest to the clearest; the last one is the rung's own change."""
        return (*self.own_hints, f"This is what the rung changes:\n\n{source_diff(self.below, self.version)}")


def exercises(root: Path = VERSIONS) -> list[Exercise]:
    """All exercises, from the lowest rung up; a ladder that cannot be read hides no other, and is named."""
    versions: list[Version] = []
    for ladder in catalog.ladders(root):
        try:
            versions += catalog.versions(root, ladder)
        except ConfigError as error:
            warn(f"the ladder {ladder} cannot be read: {error}")
    return [_load(version) for version in versions if (version.directory / FILE).exists()]


def find(name: str, root: Path = VERSIONS) -> Exercise:
    """The exercise of a rung, by any of its names; ConfigError lists those there are."""
    with suppress(ConfigError):
        version = catalog.find(name, root)
        if (version.directory / FILE).exists():
            return _load(version)
    known = listing(exercise.version.address for exercise in exercises(root))
    raise ConfigError(f"no exercise {name}; there are those of {known}")


def _load(version: Version) -> Exercise:
    """Reads an exercise.yaml; ConfigError names the file and what is wrong with it."""
    path = version.directory / FILE
    try:
        declared = read(path, ExerciseDeclaration)
        ladder = version.its_ladder()
        lower = [other for other in ladder[: ladder.index(version)] if other.kernel != version.kernel]
        if not lower:
            raise ConfigError("an exercise starts from the rung below, and there is none with another kernel")
        problem = _problem(version, declared.problem)
        for family in declared.families:
            replace(problem, family=family)  # is refused where the operation has none such
    except (ConfigError, UnsupportedProblemError) as error:
        raise ConfigError(f"{path}: {error}") from None
    hints = tuple(hint.strip() for hint in declared.hints)
    return Exercise(version, lower[-1], declared.task.strip(), declared.goal, hints, problem, declared.families)


def _problem(version: Version, declared: Mapping[str, Any]) -> Problem:
    """A small one that the rung takes, with what is declared of it."""
    sizes = {"head_dim": version.config().head_dim, **operation_named(version.operation).small}
    unknown = set(declared) - {field.name for field in fields(Problem)}
    if unknown:
        raise ConfigError(f"problem: {listing(sorted(unknown))} is no field of a problem")
    return Problem(**{**sizes, **declared}, operation=version.operation)
