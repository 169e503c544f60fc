"""C or C++ source -> shared library for the CPU of this machine, by ninja; the cache is addressed by content."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashladder.common import host
from flashladder.common.compiler.ninja import (
    in_cache,
    plain,
    put,
    run_ninja,
    said,
    space_in_cache,
    temporary_folder,
    write_options,
)
from flashladder.common.compiler.toolchain import find_host_compiler, version_text
from flashladder.common.errors import BuildError, ConfigError, ToolchainError

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
LIBRARIES = ("-lm",)
EXTENSION_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall")
FILE = "library.so"
LOG, OPTIONS = "build.log", "options"


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
    place = _place(source, command, version_text(compiler), host.identity())
    return _compiled(source, command, LIBRARIES, place)


def build_extension(source: Path) -> Path:
    """The extension of Python that a C++ source makes, from the cache or compiled now; headers of torch are found.

    One that includes <torch/...> is linked with it. BuildError or ToolchainError where it cannot be built.
    """
    command, place = extension_command(source)
    return _compiled(source, command, _torch_libraries() if "<torch/" in source.read_text() else (), place)


def find_extension(source: Path) -> Path | None:
    """The same if it is in the cache, and may be run."""
    try:
        _, place = extension_command(source)
    except (ConfigError, ToolchainError):
        return None
    return place / FILE if (place / FILE).exists() else None


def extension_command(source: Path) -> tuple[list[str], Path]:
    """The command that makes it, and where the result is kept. ToolchainError where something for it is missing."""
    import torch

    compiler, python = find_host_compiler(), Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise ToolchainError(f"no Python.h in {python}: Python's headers are missing, for example python3-dev")
    headers = Path(torch.__file__).parent / "include", python
    command = [str(compiler), *EXTENSION_FLAGS, *(f"-I{folder}" for folder in headers)]
    own = [header.read_bytes() for header in sorted(source.parent.glob("*.h"))]
    decisive = version_text(compiler), torch.__version__, sys.implementation.cache_tag, own
    return command, _place(source, command, *decisive)


def _torch_libraries() -> tuple[str, ...]:
    """They are loaded with torch, so that the result need not know where they are."""
    import torch

    return f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"


def _place(source: Path, command: list[str], *decisive: object) -> Path:
    key = hashlib.sha256(repr((source.read_bytes(), command, *decisive)).encode()).hexdigest()[:24]
    return in_cache("libraries", f"{source.stem}-{key}")


def _compiled(source: Path, command: Sequence[str], libraries: Sequence[str], place: Path) -> Path:
    if not (place / FILE).exists():
        _compile(source, command, libraries, place)
    return place / FILE


def _compile(source: Path, command: Sequence[str], libraries: Sequence[str], place: Path) -> None:
    with space_in_cache(), temporary_folder() as temporary:
        folder = temporary / "library"
        folder.mkdir()
        write_options(folder / OPTIONS, [*command[1:], "-o", FILE, source.resolve(), *libraries])
        compiler = shlex.quote(plain(Path(command[0]), temporary))
        rule = f"cd {folder.name} && {compiler} @{OPTIONS} > {LOG} 2>&1"
        (temporary / "build.ninja").write_text(f"rule compile\n  command = {rule}\n\nbuild {FILE}: compile\n")
        output = run_ninja(temporary)
        if not (folder / FILE).exists():
            raise BuildError(f"{source} cannot be compiled:\n{said(folder / LOG, output)}")
        try:
            put(folder, place)
        except OSError as error:
            if not (place / FILE).exists():  # or another process has put the same library there
                raise BuildError(f"the library cannot be moved to {place}: {error.strerror}") from None
