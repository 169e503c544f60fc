"""Cells: the problems that a ladder's rungs are published with beside official kernels, as its ladder.yaml has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flashladder.common.catalog import ladder_of
from flashladder.common.catalog.schema import Mode
from flashladder.common.errors import ConfigError, unknown
from flashladder.common.measure import packing
from flashladder.common.problem.problem import Problem, operation_named

TOKENS = 16384  # of all sequences of a cell
ALL = "all"  # groups
_ROWS = re.compile(r"(\d+) x (\d+) of (\d+)")


@dataclass(frozen=True)
class Cell:
    """A problem, and where its figures stand: in a group's table, in the row of a case, in the column of a size."""

    group: str
    case: str
    mix: str | None  # of lengths, of packed sequences
    problem: Problem
    mode: Mode = "hot"  # in which it is timed

    @property
    def title(self) -> str:
        """Its place in words."""
        mask = "causal" if self.problem.causal else "full"
        return f"{self.group}: {self.case}, {mask}, {self.mix or max(self.problem.seqlen_q, self.problem.seqlen_k)}"


def cells(operation: str, groups: Iterable[str]) -> list[Cell]:
    """Those of some groups, or of ALL; ConfigError for a group that the operation's ladder has not."""
    known = ladder_of(operation).cells_of(operation)
    if not known:
        raise ConfigError(f"the operation {operation} has no cells in its ladder: give shapes instead of --cells")
    found: list[Cell] = []
    for group in known if list(groups) == [ALL] else dict.fromkeys(groups):
        if group not in known:
            raise unknown("group of cells", group, [*known, ALL])
        found += _of_group(operation, group)
    return found


def _of_group(operation: str, group: str) -> Iterator[Cell]:
    declared, kind = ladder_of(operation).cells[group], operation_named(operation)
    mode = declared.mode
    own = {option.name for option in kind.options}
    for case, values in declared.cases.items():
        given: dict[str, Any] = {name: value for name, value in values.items() if name not in own}
        options = tuple((name, value) for name, value in values.items() if name in own)
        for causal in declared.causal:
            same = {**kind.usual, **given, "operation": operation, "options": options, "causal": causal}
            for mix in declared.mixes:
                packed = {"batch": 1, "seqlens_q": packing.lengths(mix, TOKENS)}
                yield Cell(group, case, mix, Problem(**same | packed), mode)
            for words, listed in declared.rows.items():
                yield Cell(group, case, words, Problem(**same | _sequences(listed)), mode)
            for batch in () if declared.mixes or declared.rows else declared.batch or (None,):
                of_batch = {"batch": batch} if batch else {}
                words = f"{case}, {batch} sequence{'s' * (batch > 1)}" if batch else case
                for seqlen in declared.seqlens:
                    yield Cell(group, words, None, Problem(**same | kind.of_length(seqlen, TOKENS) | of_batch), mode)


def _sequences(listed: Sequence[str]) -> dict[str, Any]:
    """Their rows and keys. ConfigError for a text of another form."""
    rows: list[int] = []
    keys: list[int] = []
    for text in listed:
        if not (found := _ROWS.fullmatch(text)):
            raise ConfigError(f"rows {text}: sequences are listed as COUNT x ROWS of KEYS, such as 8 x 4 of 4096")
        count, of_each, seen = map(int, found.groups())
        rows += [of_each] * count
        keys += [seen] * count
    return {"batch": len(rows), "seqlens_q": tuple(rows), "seqlens_k": tuple(keys), "seqlen_k": max(keys)}
