"""What a ladder says of itself, in the ladder.yaml beside its rungs: which of them calls launch, and when.

    called: '`attention`'  what you call to have its rungs run, in Markdown, for tables
    operations: [decode]   what its rungs compute
    long_from: 8192        keys, from which on a problem's length is of the class `long`
    sizes:                 more sizes of a problem, by those it has
      tiles: num_heads_k * seqlen_q
    classes:               what its sizes come to; a kind has no more of them
      one_wave: batch == 1 and tiles <= 16
    launches:              in this order: the first that runs on the card, takes the kind, and whose `when` holds
      - {rung: decode/13, when: one_wave and length == 'short', rival: true}
      - {rung: decode/06, config: {block_n: 64}}
    search:                what its rungs are tuned for where nobody says: all of these together, and how they are timed
      {batch: [1, 8], seqlens: [1024, 8192], mode: cold_graph}
    cells:                 problems that are published beside official kernels, in groups (`flashladder bench --cells`)
      plain: {cases: {d64: {head_dim: 64}}, causal: [true], seqlens: [1024, 4096]}
      verify: {cases: {32/8 heads: {packed_q: true}}, rows: {8 of 4 rows: [8 x 4 of 4096]}, mode: cold_graph}

`when` reads the fields of a kind (common/problem/kind.py), its options and its classes. Of those that are rivals, the
tuner's winners decide which goes first. Where one with `only: true` holds, no other is asked: it says what it lacks.
`emulated: false` keeps a rung from the emulator, whose time is that of its instructions; `emulated: {block_m: 64}`
gives it tiles of at most so many rows there.

A ladder of one's own may have such a file; without it, nothing launches its rungs but their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from flashladder.common import own
from flashladder.common.catalog import loading, schema
from flashladder.common.catalog.schema import Declared, Fields, Mode
from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import Value, is_field, listing
from flashladder.common.problem.kind import LONG, SHORT, Kind
from flashladder.common.problem.rules import Expression

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Operation, Problem

FILE = "ladder.yaml"
KINDS_KEPT = 256  # of problems that came last
_SIZES = ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k")  # that classes read, beside options
_FIELDS = tuple(field.name for field in dataclasses.fields(Kind))


class Launch(Declared):
    """A rung that calls launch."""

    rung: StrictStr
    when: StrictStr = "True"
    config: Fields = Field(default_factory=dict)  # fields that are not at the rung's defaults
    rival: StrictBool = False
    only: StrictBool = False
    emulated: Literal[False] | dict[StrictStr, StrictInt] = Field(default_factory=dict)

    def holds(self, kind: Kind) -> bool:
        """Whether `when` does. ConfigError where it reads what kinds of the operation have not."""
        values = {name: getattr(kind, name) for name in _FIELDS} | dict(kind.options) | dict(kind.classes)
        return bool(_expression(self.when, "condition `when`").value(values))


class Search(Declared):
    """The problems that rungs are tuned for; without `batch`, as many sequences as tokens suffice for."""

    batch: tuple[StrictInt, ...] = ()
    seqlens: tuple[StrictInt, ...] = (4096,)
    mode: Mode = "hot"


class Cells(Declared):
    """A group of problems of one of the ladder's operations, the first if it names none: each case with each mask, at
    each length, and for each number of sequences where these are given. Instead of lengths: packed, in each mix; or
    with sequences as they are listed, so many each of so many rows and keys."""

    operation: StrictStr = ""
    cases: dict[StrictStr, Fields]  # fields of a problem and options, by words for tables
    causal: tuple[StrictBool, ...] = (False, True)
    seqlens: tuple[StrictInt, ...] = (1024, 4096, 16384)
    batch: tuple[StrictInt, ...] = ()
    mixes: tuple[StrictStr, ...] = ()  # of common/measure/packing.py
    rows: dict[StrictStr, tuple[StrictStr, ...]] = Field(default_factory=dict)  # COUNT x ROWS of KEYS, by words
    mode: Mode = "hot"


class Ladder(Declared):
    """What a ladder.yaml says."""

    called: StrictStr = ""
    operations: tuple[StrictStr, ...] = ()
    long_from: StrictInt = Field(default=2048, ge=2)
    sizes: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    classes: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    launches: tuple[Launch, ...] = ()
    search: Search = Search()
    cells: dict[StrictStr, Cells] = Field(default_factory=dict)

    def cells_of(self, operation: str) -> dict[str, Cells]:
        """The groups of one of its operations."""
        first = self.operations[0] if self.operations else ""
        return {name: each for name, each in self.cells.items() if (each.operation or first) == operation}

    @property
    def lengths(self) -> dict[str, int]:
        """The classes of lengths, each with a number of keys for an example, of whole blocks in any rung."""
        return {SHORT: self.long_from // 2, LONG: self.long_from}

    def length_of(self, seqlen_k: int) -> str:
        """The class of a number of keys."""
        return LONG if seqlen_k >= self.long_from else SHORT

    def classes_of(self, sizes: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
        """What the sizes and options of a problem come to, which are named as classes read them."""
        values: dict[str, Any] = dict(sizes)
        for name, text in self.sizes.items():
            values[name] = _expression(text, name).value(values)
        return tuple((name, _expression(text, name).value(values)) for name, text in self.classes.items())


@cache
def ladder_of(operation: str) -> Ladder:
    """The ladder whose rungs compute an operation for calls; one without launches where none does."""
    return next((ladder for _, ladder in _computing(operation)), Ladder())


def ladder_named(name: str) -> Ladder:
    """The ladder of this name; one that says nothing where it has no file."""
    path = own.declared(FILE).get(name)
    return _read(path) if path else Ladder()


def ladder_name(operation: str) -> str:
    """What that ladder is called; the operation itself where there is none."""
    return next((name for name, _ in _computing(operation)), operation)


def _computing(operation: str) -> Iterator[tuple[str, Ladder]]:
    """The ladders whose rungs compute an operation, with their names."""
    for name, path in own.declared(FILE).items():
        if operation in (found := _read(path)).operations:
            yield name, found


def kind_of(asked: Problem | Kind) -> Kind:
    """All of a problem that decides which kernel computes it; a kind is its own."""
    return asked if isinstance(asked, Kind) else _kind_of(asked)


@lru_cache(KINDS_KEPT)
def _kind_of(problem: Problem) -> Kind:
    ladder, asked = ladder_of(problem.operation), dict(problem.options)
    kept = _kept(problem.asked)
    same = (
        "operation",
        "dtype",
        "head_dim",
        "head_dim_v",
        "causal",
        "lse",
        "packed",
        "window",
        "alibi",
        "sinks",
        "mods",
    )
    return Kind(
        **{name: getattr(problem, name) for name in (*same, "layout")},
        softcap=problem.softcap > 0,
        dropout=problem.dropout_p > 0,
        gqa=problem.num_heads != problem.num_heads_k,
        options=tuple((name, asked[name]) for name in kept),
        unusual=tuple(name for name in problem.set_options if name in kept),
        length=ladder.length_of(problem.seqlen_k),
        classes=ladder.classes_of({name: getattr(problem, name) for name in _SIZES} | asked),
    )


@cache
def _kept(operation: Operation) -> tuple[str, ...]:
    """The options that a kind has: flags, and what is a configuration field too. The others are sizes."""
    return tuple(option.name for option in operation.options if option.type is bool or is_field(option.name))


_expression = cache(Expression)


def forget() -> None:
    """What was read of ladder.yaml is read again, as it may have changed."""
    for function in (ladder_of, _kind_of, _kept):
        function.cache_clear()


def _read(path: Path) -> Ladder:
    """ConfigError names the file and what is wrong with it."""
    with loading.named_in_errors(path):
        found = schema.read(path, Ladder)
        if taken := [name for name in found.classes if name in _FIELDS]:
            raise ConfigError(f"{listing(taken)}: every kind has that field, so it is no class of sizes")
        return found
