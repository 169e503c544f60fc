"""Cells: the problems that a ladder's rungs are published with beside official kernels, as its ladder.yaml has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flashladder.common.catalog import ladder_of
from flashladder.common.errors import ConfigError, unknown
from flashladder.common.measure import packing
from flashladder.common.problem.problem import Problem, operation_named

TOKENS = 16384  # of all sequences of a cell
ALL = "all"  # groups


@dataclass(frozen=True)
class Cell:
    """A problem, and where its figures stand: in a group's table, in the row of a case, in the column of a size."""

    group: str
    case: str
    mix: str | None  # of lengths, of packed sequences
    problem: Problem

    @property
    def title(self) -> str:
        """Its place in words."""
        mask = "causal" if self.problem.causal else "full"
        return f"{self.group}: {self.case}, {mask}, {self.mix or self.problem.seqlen_q}"


def cells(operation: str, groups: Iterable[str]) -> list[Cell]:
    """Those of some groups, or of ALL; ConfigError for a group that the operation's ladder has not."""
    known = ladder_of(operation).cells
    if not known:
        raise ConfigError(f"the ladder of the operation {operation} has no cells: give shapes instead of --cells")
    found: list[Cell] = []
    for group in known if list(groups) == [ALL] else dict.fromkeys(groups):
        if group not in known:
            raise unknown("group of cells", group, [*known, ALL])
        found += _of_group(operation, group)
    return found


def _of_group(operation: str, group: str) -> Iterator[Cell]:
    declared, kind = ladder_of(operation).cells[group], operation_named(operation)
    own = {option.name for option in kind.options}
    for case, values in declared.cases.items():
        given: dict[str, Any] = {name: value for name, value in values.items() if name not in own}
        options = tuple((name, value) for name, value in values.items() if name in own)
        for causal in declared.causal:
            same = {**kind.usual, **given, "operation": operation, "options": options, "causal": causal}
            for mix in declared.mixes:
                packed = {"batch": 1, "seqlens_q": packing.lengths(mix, TOKENS)}
                yield Cell(group, case, mix, Problem(**same | packed))
            for seqlen in () if declared.mixes else declared.seqlens:
                yield Cell(group, case, None, Problem(**same | kind.of_length(seqlen, TOKENS)))
