"""C source -> shared library for the CPU of this machine, by ninja, behind a cache that is addressed by content."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from flashladder.common import host
from flashladder.common.build.ninja import run_ninja, said, space_in_cache, temporary_folder
from flashladder.common.build.toolchain import version_text
from flashladder.common.errors import BuildError, ToolchainError
from flashladder.common.paths import cache_dir

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
LIBRARIES = ("-lm",)
FILE = "library.so"
LOG = "build.log"


def find_c_compiler() -> Path:
    """$CC, or gcc on $PATH. Raises ToolchainError."""
    wanted = os.environ.get("CC", "gcc")
    if found := shutil.which(wanted):
        return Path(found)
    raise ToolchainError(
        f"no C compiler: {wanted} is not on PATH. Install one, for example `sudo apt-get install gcc`, or name one "
        "with -fopenmp in CC."
    )


def build_library(source: Path, defines: Mapping[str, str]) -> Path:
    """The library that one self-contained source makes with these macros, from the cache or compiled now."""
    compiler = find_c_compiler()
    command = [str(compiler), *FLAGS, *(f"-D{name}={value}" for name, value in defines.items())]
    decisive = (source.read_bytes(), command, version_text(compiler), host.identity())
    key = hashlib.sha256(repr(decisive).encode()).hexdigest()[:24]
    place = cache_dir() / "libraries" / f"{source.stem}-{key}"
    if not (place / FILE).exists():
        _compile(source, command, place)
    return place / FILE


def _compile(source: Path, command: list[str], place: Path) -> None:
    with space_in_cache(), temporary_folder() as temporary:
        folder = temporary / place.name
        folder.mkdir()
        line = shlex.join([*command, "-o", f"{place.name}/{FILE}", str(source.resolve()), *LIBRARIES])
        rule = f"{line} > {place.name}/{LOG} 2>&1".replace("$", "$$")
        ninja = f"rule compile\n  command = {rule}\n\nbuild {place.name}/{FILE}: compile\n"
        (temporary / "build.ninja").write_text(ninja)
        output = run_ninja(temporary)
        if not (folder / FILE).exists():
            raise BuildError(f"{source} cannot be compiled:\n{said(folder / LOG, output)}")
        try:
            folder.rename(place)
        except OSError as error:
            if not (place / FILE).exists():  # or another process has put the same library there
                raise BuildError(f"the library cannot be moved to {place}: {error.strerror}") from None
