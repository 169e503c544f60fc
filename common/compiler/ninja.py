"""ninja, run in a temporary folder of the cache, from where a finished result is renamed into place.

ninja and nvcc hand command lines to a shell, nvcc with names in them that it does not quote: that of its temporary
files, of its source and of itself. So no name of a person's folder or file is in these command lines: what is compiled
is named in a file of options, which compilers read themselves, and all else is relative.
"""

import errno
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashladder.common import trust
from flashladder.common.compiler.toolchain import find_ninja
from flashladder.common.errors import BuildError
from flashladder.common.paths import AS_NAMES, cache_dir

LOCK = "lock"  # of a temporary folder: held by whoever builds in it, as long as they live; compilers too
STALE_SECONDS = 24 * 3600  # age at which a temporary folder without a lock is swept away

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEAST_FREE = 2**24  # bytes: the compiler's temporary files are gone when it has failed
_FULL_IN_WORDS = re.compile("No space left on device|Disk quota exceeded")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the cache, on the file system of the artifacts; those that killed builds left are swept away."""
    root = cache_dir() / "building"
    try:
        for folder in (root, *(cache_dir() / kind for kind in ("artifacts", "code", "ptx", "libraries"))):
            trust.make(folder)
        for leftover in filter(_is_abandoned, root.iterdir()):
            shutil.rmtree(leftover, ignore_errors=True)
        made = tempfile.TemporaryDirectory(dir=root)
    except OSError as error:
        if error.errno in _FULL:
            raise BuildError(_no_space()) from None
        raise BuildError(
            f"the cache folder {cache_dir()} cannot be written: {error.strerror}. Set FLASHLADDER_CACHE to a folder "
            "that can."
        ) from None
    with made as name, Path(name, f"{LOCK}.new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        Path(lock.name).rename(Path(name, LOCK))  # a lock that is there is held
        yield Path(name)


def in_cache(kind: str, name: str) -> Path:
    """Where something that is run lies in the cache, or will lie; ConfigError where others could have put it there."""
    place = cache_dir() / kind / name
    trust.check(place, cache_dir())
    return place


def put(folder: Path, place: Path) -> None:
    """Moves a finished folder into its place, where nobody else can write it. OSError as of a rename."""
    trust.withhold(folder)
    folder.rename(place)


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody builds in a temporary folder any more."""
    try:
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:  # it has no lock yet, or somebody else sweeps it away
        with suppress(FileNotFoundError):
            return folder.stat().st_mtime < time.time() - STALE_SECONDS
        return False


def said(log: Path, ninja_output: str) -> str:
    """Why nothing came of it: the compiler's words, or ninja's where the compiler was not even reached.

    On a full disk there may be no room for words.
    """
    words = log.read_text(errors=AS_NAMES).strip() if log.exists() else ""
    silenced = not words and shutil.disk_usage(log.parent).free < _LEAST_FREE
    if silenced or _FULL_IN_WORDS.search(words + ninja_output):
        return _no_space()
    return words or ninja_output.strip() or "ninja was interrupted"


@contextmanager
def space_in_cache() -> Iterator[None]:
    """BuildError where something cannot be written because the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise BuildError(_no_space()) from None


def _no_space() -> str:
    return (
        f"no space is left in the cache folder {cache_dir()}. It may be deleted; FLASHLADDER_CACHE moves it to another "
        "disk."
    )


def write_options(file: Path, words: Iterable[str | Path]) -> None:
    """Writes arguments of gcc or clang into a file that they read as @file, whatever characters they have."""
    escaped = (re.sub(r"([^\w\n])", r"\\\1", str(word), flags=re.ASCII).replace("\n", "'\n'") for word in words)
    file.write_bytes(os.fsencode("\n".join(escaped)))


def plain(tool: Path, folder: Path) -> str:
    """What a tool is called in a subfolder of the build: by its path, or by a link where a shell would misread that."""
    if shlex.quote(str(tool)) == str(tool):
        return str(tool)
    link = folder / f"folder_of_{tool.name}"
    link.symlink_to(tool.parent.absolute())
    return f"../{link.name}/{tool.name}"


def run_ninja(folder: Path, ended: Callable[[str], None] | None = None) -> str:
    """Runs ninja to the end, whatever fails, and gives what it printed.

    `ended` is called with the description of each edge that ended, well or not; meanwhile the others run on.
    """
    command = [str(find_ninja()), "-k", "0", "-j", str(len(os.sched_getaffinity(0)))]
    # TMPDIR: the compiler's own temporary files go where a killed build is cleaned up after.
    environment = {**os.environ, "NINJA_STATUS": "%f/%t ", "TMPDIR": "."}
    lines = []
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors=AS_NAMES,
        close_fds=False,  # compilers hold the folder's lock, and may outlive who is killed
    ) as ninja:
        assert ninja.stdout is not None
        for line in ninja.stdout:
            lines.append(line)
            if ended and (match := re.match(r"\d+/\d+ (.*)", line)):
                ended(match[1])
    return "".join(lines)
