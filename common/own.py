"""Ladders of one's own: folders of rungs that this repository does not track, with all that belongs to them.

    NN_name/   a rung, as in versions/          results/   its logs
    cuda/      headers that its rungs share     tuned/     the tuner's winners, GPU.yaml

    operation.py   what its rungs compute, where that bears the ladder's name (common/problem/problem.py)
    baselines.py   other people's kernels for it (common/measure/baselines)
    fields.yaml    configuration fields of its rungs alone (common/problem/config.py)

versions/private is one, where it exists; others are named in FLASHLADDER_VERSIONS, or with the option --versions of
any tool. Such a ladder is called as its folder is.
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Protocol

from flashladder.common.errors import ConfigError
from flashladder.common.paths import REFERENCES, VERSIONS, results_dir

VARIABLE = "FLASHLADDER_VERSIONS"
FIRST = "forward"  # the ladder, and the operation, that is meant where none is named
OPERATION_FILE = "operation.py"
PRIVATE = VERSIONS / "private"
NAME = re.compile(r"[a-z]\w*", re.ASCII | re.IGNORECASE)


class HasHome(Protocol):
    """A kernel that says where its ladder lies, if that is one of one's own."""

    @property
    def home(self) -> Path | None: ...


def ladders(root: Path = VERSIONS) -> dict[str, Path]:
    """The folders of one's own ladders beside this repository's, by name. ConfigError where one cannot be used."""
    if root != VERSIONS:
        return {}
    named = [Path(word).expanduser().absolute() for word in os.environ.get(VARIABLE, "").split(os.pathsep) if word]
    found: dict[str, Path] = {PRIVATE.name: PRIVATE} if PRIVATE.is_dir() else {}
    for folder in dict.fromkeys(named):
        if folder == PRIVATE:
            continue
        _check(folder, found)
        found[folder.name] = folder
    return found


def declared(file: str) -> dict[str, Path]:
    """Where ladders have this file beside their rungs, by their names: this repository's, and one's own."""
    return _of_here(VERSIONS, file) | {
        name: folder / file for name, folder in ladders().items() if (folder / file).is_file()
    }


@cache
def _of_here(versions: Path, file: str) -> dict[str, Path]:
    """Those of the repository, which do not change while a program runs: every value of a configuration asks."""
    return {path.parent.name: path for path in sorted(versions.glob(f"*/{file}"))}


def add(folders: Iterable[str]) -> None:
    """Searches these too from now on, in this process and in those that it starts."""
    known = [word for word in os.environ.get(VARIABLE, "").split(os.pathsep) if word]
    named = [str(Path(folder).expanduser().absolute()) for folder in folders]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*named, *known]))


def results_of(kernels: Iterable[HasHome]) -> Path:
    """Where the results of a tool that runs these are kept: beside the first ladder of one's own among them.

    $FLASHLADDER_RESULTS goes before that.
    """
    return results_dir(next(filter(None, (kernel.home for kernel in kernels)), None))


def _check(folder: Path, others: dict[str, Path]) -> None:
    """Raises ConfigError unless a ladder can be here, and bear this name beside the others."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}, which {VARIABLE} or --versions names, is no folder: make it, or name another")
    if not NAME.fullmatch(folder.name):
        raise ConfigError(f"{folder}: a ladder is called as its folder, by letters, digits and _, a letter first")
    known = (others.get(folder.name), VERSIONS / folder.name, VERSIONS / REFERENCES / folder.name)
    if taken := next((path for path in known if path and path.exists()), None):
        raise ConfigError(f"{folder} would be the ladder {folder.name}, but {taken} is called so: rename the folder")
