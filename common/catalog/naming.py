"""How rungs are called: by number, by name or its words, with the ladder's name before it where it is not the first."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from flashladder.common.own import FIRST

LISTED = 6  # rungs of a ladder that an error lists by name


def among(rungs: Iterable[Path], rung: str) -> Path | None:
    """The folder that is called so."""
    for directory in rungs:
        number, words = directory.name[:2], directory.name[3:]
        if rung in (number, number.lstrip("0") or "0", directory.name, words):
            return directory
    return None


def qualified(ladder: str, name: str) -> str:
    return name if ladder == FIRST else f"{ladder}/{name}"


def parts(name: str) -> tuple[str, str]:
    """The ladder and the rung of a name; the first ladder need not be named."""
    ladder, _, rung = name.rpartition("/")
    return ladder or FIRST, rung


def address_of(name: str) -> str:
    """What the rung of this name is called by: NN of NN_name, LADDER/NN of LADDER/NN_name."""
    ladder, rung = parts(name)
    return qualified(ladder, rung[:2])


def in_short(rungs: Sequence[str]) -> list[str]:
    """The names of a ladder's rungs for an error: of many, the first one to the last one."""
    return [f"{rungs[0]} to {rungs[-1]}"] if len(rungs) > LISTED else list(rungs)
