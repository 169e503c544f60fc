"""An exercise: versions/NN_name/exercise.yaml, and what follows from the ladder.

The start is the kernel of the rung below, in the rung's own configuration. The solution is the rung's kernel.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import StrictStr

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.catalog.schema import Declared, one_of, read
from flashladder.common.compiler.sass.diff import source_diff
from flashladder.common.console import warn
from flashladder.common.errors import ConfigError
from flashladder.common.paths import VERSIONS
from flashladder.common.problem.config import listing
from flashladder.common.workshop.exercises.measures import MEASURES, Measure

FILE = "exercise.yaml"


class ExerciseDeclaration(Declared):
    """What an exercise.yaml says."""

    task: StrictStr  # Markdown
    goal: Annotated[StrictStr, one_of(*MEASURES)]
    hints: tuple[StrictStr, ...]


@dataclass(frozen=True)
class Exercise:
    """A rung with its idea taken out."""

    version: Version
    below: Version  # whose kernel is the start
    task: str
    goal: str  # of MEASURES
    own_hints: tuple[str, ...]

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
            warn(f"the ladder {ladder or 'of this repository'} cannot be read: {error}")
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
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    hints = tuple(hint.strip() for hint in declared.hints)
    return Exercise(version, lower[-1], declared.task.strip(), declared.goal, hints)
