"""Which kernel is measured next: each file here is a strategy, which --strategy finds by the file's name.

`my_idea.py` has a class MyIdea with the two verbs of Strategy, made of a Ranked; the first line of the file's docstring
is what --help says. It may import the other files. A strategy only proposes. It keeps what it is told in memory; the
study's storage is the ledger's business.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flashladder.common.errors import ConfigError, unknown

if TYPE_CHECKING:
    from flashladder.common.problem.config import Value
    from flashladder.tuner.candidates import Candidate

USUAL, WHOLE = "guided", "in_order"  # where nobody says; and where every kernel is measured


@dataclass(frozen=True)
class Ranked:
    """What a strategy may know of the kernels before one is measured."""

    kernels: Sequence[Candidate]  # in the order of the cost model
    predicted_us: Mapping[str, float]  # by code
    fields: Mapping[str, Sequence[Value]]  # that are searched
    seeds: Sequence[Candidate] = ()  # the default and earlier winners
    seed: int = 0  # of what is drawn at random


class Strategy(Protocol):
    """What proposes kernels."""

    def propose(self, taken: Collection[str]) -> Candidate | None:
        """A kernel whose code is not taken; None when all are."""

    def tell(self, kernel: Candidate, ratio: float | None) -> None:
        """What came of a kernel: its ratio to the baseline; None where it is in quarantine."""


def first_free(kernels: Iterable[Candidate], taken: Collection[str]) -> Candidate | None:
    """The first kernel that nobody has taken."""
    return next((kernel for kernel in kernels if kernel.code not in taken), None)


def ideas() -> dict[str, str]:
    """The strategies by name, each with the first line of its docstring. None of them is imported."""
    files = sorted(Path(__file__).parent.glob("[!_]*.py"))
    docs = {path.stem: ast.get_docstring(ast.parse(path.read_text())) or "" for path in files}
    return {name: doc.partition("\n")[0] for name, doc in docs.items()}


def strategy(name: str, ranked: Ranked) -> Strategy:
    """The strategy of this name. ConfigError lists those there are, and names what a file lacks."""
    if name not in (known := ideas()):
        raise unknown("strategy", name, known)
    file = import_module(f"{__name__}.{name}")
    title = name.title().replace("_", "")
    if not (found := getattr(file, title, None)):
        raise ConfigError(f"{file.__file__} has no class {title}")
    made: Strategy = found(ranked)
    return made
