"""Finished folders on their way into the cache: renamed into place, where other processes may put the same."""

import errno
from contextlib import suppress
from pathlib import Path

from flashladder.common.compiler import artifact as artifacts
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.ninja import put
from flashladder.common.errors import BuildError


def install_folder(folder: Path, place: Path) -> Path:
    """The place, once something is there: this folder, or the same of another process. BuildError where neither is."""
    try:
        put(folder, place)
    except OSError as error:
        if not place.exists():
            raise BuildError(f"what was compiled cannot be moved to {place}: {error.strerror}") from None
    return place


def give_way(damaged: Path, folder: Path) -> None:
    """Puts a damaged folder beside the finished one, which goes away with what is around it."""
    with suppress(FileNotFoundError):
        damaged.rename(folder.with_name(f"{damaged.name}-damaged"))


def install_artifact(folder: Path, place: Path) -> Artifact:
    """The artifact in its place; another process's finished one is as good, a damaged one gives way."""
    while True:
        try:
            put(folder, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise BuildError(f"the artifact cannot be moved to {place}: {error.strerror}") from None
            if artifacts.load(place, cached=False) is None:
                give_way(place, folder)
                continue
        if finished := artifacts.load(place, cached=False):
            return finished
        raise BuildError(f"the artifact {place} was damaged as soon as it was written; is the disk full?")
