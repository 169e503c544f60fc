"""Which rung runs a kind of problem on a card, and how it is configured. Every call, table and package asks here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashladder.common.catalog import winners
from flashladder.common.catalog.catalogue import Version, find
from flashladder.common.catalog.ladder import Launch, kind_of, ladder_of
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.config import GpuDescription, KernelConfig, parse_values
from flashladder.common.problem.head_dims import HEAD_DIM_STEP, HEAD_DIMS
from flashladder.common.problem.kind import Kind

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem

FASTEST = "fastest"  # of the rungs that the ladder of an operation launches, for the problem on the card


@dataclass(frozen=True)
class Card:
    """A GPU, or the emulator in its place."""

    arch: str  # that kernels are compiled for
    gpu: GpuDescription
    emulated: bool = False


def choice(
    asked: Problem | Kind, card: Card, version: str = FASTEST, adopted: Path | None = None
) -> tuple[Version, KernelConfig]:
    """The rung that `version` means, and its configuration; what a program adopted is in the folder `adopted`.

    A version is FASTEST, or a rung's name, perhaps with a configuration behind it: 46@block_n=64.
    UnsupportedProblemError where no rung, or not that one, takes the problem.
    """
    name, _, text = version.partition("@")
    values = parse_values(text)
    launch = _first(asked, card, adopted) if name == FASTEST else Launch(rung=name)
    rung = find(launch.rung)
    if card.emulated and launch.emulated:
        usual = rung.config_for(asked, card.gpu).as_dict()
        values = {field: min(most, usual[field]) for field, most in launch.emulated.items()} | values
    source = winners.source(card.gpu, rung.home, adopted)
    tuned = None if values else winners.config(rung, source, asked, adopted)
    config = tuned or rung.config_for(asked, card.gpu, **(launch.config | values))
    rung.check(asked, config)
    return rung, config


def launched(operation: str, arch: str, emulated: bool = False) -> list[Version]:
    """The rungs that calls of an operation may launch on a card, those first that are asked first."""
    launches = ladder_of(operation).launches
    names = (each.rung for each in launches if not (emulated and each.emulated is False))
    return [rung for rung in map(find, dict.fromkeys(names)) if rung.runs_on(arch)]


class Widths(NamedTuple):
    """What tensors may have without copies where calls launch rungs of an operation."""

    head_dims: tuple[int, ...]
    narrower_v: bool  # whether V may have fewer columns than Q and K


def widths(operation: str, arch: str, emulated: bool = False, mods: bool = False) -> Widths:
    """Of the rungs that calls of an operation may launch on a card; with `mods` of the last one that takes expressions,
    which has all that others before it lack."""
    rungs = [rung.supports for rung in launched(operation, arch, emulated) if rung.supports.mods >= mods]
    rungs = rungs[-1:] if mods else rungs
    every = range(HEAD_DIM_STEP, HEAD_DIMS[-1] + 1, HEAD_DIM_STEP)
    taken = tuple(columns for columns in every if any(rung.takes_head_dim(columns) for rung in rungs))
    apart = (any(rung.takes_head_dim(x) and not rung.refusal_of_v(x, HEAD_DIM_STEP) for rung in rungs) for x in taken)
    return Widths(taken, all(apart))


def _first(asked: Problem | Kind, card: Card, adopted: Path | None) -> Launch:
    """The launch of a ladder that goes first. UnsupportedProblemError says why the last one does not take it."""
    kind = kind_of(asked)
    launches = [each for each in ladder_of(kind.operation).launches if not (card.emulated and each.emulated is False)]
    launches = [each for each in launches if each.only and each.holds(kind)] or launches
    able = [each for each in launches if each.holds(kind) and find(each.rung).takes(asked)]
    if here := [each for each in able if find(each.rung).runs_on(card.arch)]:
        return here[0] if card.emulated else _rival(here, card, asked, adopted)
    if able:
        _refuse_arch(find(able[0].rung), card)
    if launches:
        find(launches[-1].rung).config_for(asked)
    raise UnsupportedProblemError(f"calls launch no rung for the operation {kind.operation} with {kind.any_size}")


def _refuse_arch(rung: Version, card: Card) -> None:
    try:
        rung.check_arch(card.arch)
    except ConfigError as error:
        raise UnsupportedProblemError(str(error)) from None


def _rival(able: Sequence[Launch], card: Card, asked: Problem | Kind, adopted: Path | None) -> Launch:
    """The first one; or of those that are rivals, the one whose winner is faster."""
    rivals = [launch for launch in able if launch.rival]
    if able[0] not in rivals:
        return able[0]
    source = winners.source(card.gpu, adopted=adopted)
    best = winners.fastest([find(launch.rung) for launch in rivals], source, asked, adopted)
    return next((launch for launch in rivals if best and find(launch.rung) == best), able[0])
