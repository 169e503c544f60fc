"""An exercise: versions/LADDER/NN_name/exercise.yaml, and what follows from the ladder.

The start is the kernel of the rung below, in the rung's own configuration; or the rung's own kernel with a fault, which
is to be found. The solution is the rung's kernel. Both run the operation's small problem, or the one that the exercise
declares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictStr

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.catalog.schema import Declared, one_of, read
from flashladder.common.compiler.sass.diff import text_diff
from flashladder.common.console import warn
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.paths import VERSIONS, cache_dir
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
    fault: dict[StrictStr, StrictStr] = Field(
        default_factory=dict
    )  # lines of kernel.cu, and what they are at the start


@dataclass(frozen=True)
class Exercise:
    """A rung with its idea taken out, or with a fault."""

    version: Version
    base: Version  # whose kernel the start is made of
    task: str
    goal: str  # of MEASURES
    own_hints: tuple[str, ...]
    problem: Problem  # that it is graded with
    families: tuple[str, ...]  # of inputs, beside the problem's own
    fault: Mapping[str, str]  # of the start: lines, and what stands there instead

    @property
    def start(self) -> str:
        """The text of the kernel that one begins with."""
        text = self.base.kernel.read_text()
        for line, wrong in self.fault.items():
            text = text.replace(line, wrong)
        return text

    @property
    def start_kernel(self) -> Path:
        """A file with that."""
        if not self.fault:
            return self.base.kernel
        text = hashlib.sha256(self.start.encode()).hexdigest()
        return self.lay_out(cache_dir() / "exercises" / text[:16])

    def lay_out(self, folder: Path) -> Path:
        """Writes the start into a folder, with what lies beside its kernel; gives the kernel."""
        folder.mkdir(parents=True, exist_ok=True)
        for header in self.base.kernel.parent.glob("*.cuh"):
            (folder / header.name).write_text(header.read_text())
        kernel = folder / self.base.kernel.name
        kernel.write_text(self.start)
        return kernel

    @property
    def folder(self) -> Path:
        """Where one works on it, unless one says where: without the rung's name, which may be the answer."""
        return Path("exercises", self.version.address.replace("/", "-"))

    @property
    def measure(self) -> Measure:
        """What the goal is set in."""
        return MEASURES[self.goal]

    @property
    def aim(self) -> str:
        """What is asked for, in a few words that give nothing away."""
        return "find a fault" if self.fault else f"less of: {self.measure.title}"

    @property
    def hints(self) -> tuple[str, ...]:
        """From the vaguest to the clearest; the last one is the rung's own change."""
        diff = text_diff(self.start, self.version, f"{self.base.kernel.parent.name}/{self.base.kernel.name}")
        return (*self.own_hints, f"This is what the rung changes:\n\n{diff}")


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
    begin = f"no exercise {name}; there"
    with suppress(ConfigError):
        version = catalog.find(name, root)
        if (version.directory / FILE).exists():
            return _load(version)
        if version.no_exercise:
            begin = f"no exercise {name}: {version.no_exercise} There"
    known = listing(exercise.version.address for exercise in exercises(root))
    raise ConfigError(f"{begin} are those of {known}")


def _load(version: Version) -> Exercise:
    """Reads an exercise.yaml; ConfigError names the file and what is wrong with it."""
    path = version.directory / FILE
    try:
        declared = read(path, ExerciseDeclaration)
        ladder = version.its_ladder()
        lower = [other for other in ladder[: ladder.index(version)] if other.kernel != version.kernel]
        if missing := [line for line in declared.fault if version.kernel.read_text().count(line) != 1]:
            raise ConfigError(f"fault: {listing(missing)} should stand in {version.kernel.name} once")
        if not (lower or declared.fault):
            raise ConfigError("an exercise starts from the rung below, and there is none with another kernel")
        problem = _problem(version, declared.problem)
        for family in declared.families:
            replace(problem, family=family)  # is refused where the operation has none such
    except (ConfigError, UnsupportedProblemError) as error:
        raise ConfigError(f"{path}: {error}") from None
    hints = tuple(hint.strip() for hint in declared.hints)
    base, task = version if declared.fault else lower[-1], declared.task.strip()
    return Exercise(version, base, task, declared.goal, hints, problem, declared.families, declared.fault)


def _problem(version: Version, declared: Mapping[str, Any]) -> Problem:
    """A small one that the rung takes, with what is declared of it."""
    sizes = {"head_dim": version.config().head_dim, **operation_named(version.operation).small}
    unknown = set(declared) - {field.name for field in fields(Problem)}
    if unknown:
        raise ConfigError(f"problem: {listing(sorted(unknown))} is no field of a problem")
    return Problem(**{**sizes, **declared}, operation=version.operation)
