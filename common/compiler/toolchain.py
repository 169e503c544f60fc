"""Finds the CUDA compiler and its companions: in an installed toolkit, or in the wheels that pip installs."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashladder.common.errors import ToolchainError
from flashladder.common.packages import brings
from flashladder.common.paths import AS_NAMES

MINIMUM_RELEASE = (12, 0)  # the first that knows sm_90a
SYSTEM_TOOLKIT = Path("/usr/local/cuda")

# The extra of setup.py that brings each tool.
_EXTRA = {"nvcc": "compiler", "ptxas": "compiler", "cuobjdump": "disassemblers", "nvdisasm": "disassemblers"}
TOOLS = tuple(_EXTRA)


@dataclass(frozen=True)
class Toolchain:
    """What compiles a kernel: nvcc (to PTX, with a host compiler for its preprocessor), then ptxas (to a cubin)."""

    nvcc: Path
    ptxas: Path
    host_compiler: Path
    release: str  # of nvcc and ptxas, such as "13.0"
    identity: str  # whatever can change the code that comes out: full versions and nvcc's environment variables


@cache
def toolchain() -> Toolchain:
    """The compiler of this machine; ToolchainError when a part is missing or too old."""
    nvcc, host_compiler = find_tool("nvcc"), find_host_compiler()
    ptxas = find_tool("ptxas", release=release_of(nvcc))
    versions = [version_text(tool) for tool in (nvcc, ptxas, host_compiler)]
    flags = [f"{name}={os.environ.get(name, '')}" for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]
    return Toolchain(nvcc, ptxas, host_compiler, release_of(nvcc), "\n".join([*versions, *flags]))


def find_tool(name: str, release: str | None = None) -> Path:
    """A tool of the CUDA toolkit, one of TOOLS; of exactly this release, such as "13.0", when one is given.

    The first that will do in $FLASHLADDER_CUDA, $CUDA_HOME, $PATH, /usr/local/cuda and the wheels of this Python: each
    tool is looked for separately, as a toolkit may lack some. Raises ToolchainError, saying what was wrong where.
    """
    found_wanting = []
    for place, path in _candidates(name):
        refusal = _refusal(path, release)
        if path and not refusal:
            return path
        found_wanting.append(f"{place}: {refusal}")
    raise ToolchainError(f"no usable {name} ({'; '.join(found_wanting)}). {remedy(name)}")


def _refusal(path: Path | None, release: str | None) -> str | None:
    """Why a tool will not do; None when it will."""
    if path is None or not os.access(path, os.X_OK):
        return f"{path} is not there" if path else "it has none"
    try:
        actual = release_of(path)
    except ToolchainError as error:
        return str(error)
    if tuple(map(int, actual.split("."))) < MINIMUM_RELEASE:
        return f"{path} is CUDA {actual}, older than {'.'.join(map(str, MINIMUM_RELEASE))}"
    if release and actual != release:
        return f"{path} is CUDA {actual}, but nvcc is {release}"
    return None


def _candidates(name: str) -> Iterator[tuple[str, Path | None]]:
    """Places to look in, with the path of the tool there."""
    for variable in ("FLASHLADDER_CUDA", "CUDA_HOME"):
        if folder := os.environ.get(variable):
            yield f"${variable}", Path(folder) / "bin" / name
            if variable == "FLASHLADDER_CUDA" and _EXTRA[name] == "compiler":
                return  # never another compiler than the one that was asked for
    on_path = shutil.which(name)
    yield "$PATH", Path(on_path) if on_path else None
    yield str(SYSTEM_TOOLKIT), SYSTEM_TOOLKIT / "bin" / name
    yield f"the packages of {sys.executable}", _in_wheels(name)


def _in_wheels(name: str) -> Path | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    found = find_nvidia_binary_utility(name)
    return Path(found) if found else None


def find_host_compiler() -> Path:
    """The C++ compiler that nvcc preprocesses with: $NVCC_CCBIN, or g++ on $PATH. Raises ToolchainError."""
    wanted = os.environ.get("NVCC_CCBIN", "g++")
    if found := shutil.which(wanted):
        return Path(found)
    raise ToolchainError(
        f"no C++ compiler for nvcc: {wanted} is not on PATH. Install one, for example `sudo apt-get install g++`, "
        "or name one in NVCC_CCBIN."
    )


def missing_extras() -> list[str]:
    """The extras of setup.py that bring the tools of the toolkit which this machine lacks."""
    extras = set()
    for name, extra in _EXTRA.items():
        try:
            find_tool(name)
        except ToolchainError:
            extras.add(extra)
    return sorted(extras)


def find_ninja() -> Path:
    """The ninja that pip installed for this Python, or the one on $PATH. Raises ToolchainError."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("ninja") or ():
            if file.name == "ninja":
                return Path(os.path.abspath(file.locate()))
    if found := shutil.which("ninja"):
        return Path(found)
    raise ToolchainError(f"no ninja by {sys.executable} or on PATH. `{sys.executable} -m pip install ninja` brings it.")


def remedy(name: str) -> str:
    """How to get a missing tool."""
    if _EXTRA[name] == "compiler" and (folder := os.environ.get("FLASHLADDER_CUDA")):
        return f"FLASHLADDER_CUDA={folder} is set: let it name the folder of a whole CUDA toolkit, or unset it."
    return f"{brings(_EXTRA[name])}."


@cache
def version_text(tool: Path) -> str:
    """What `tool --version` prints; ToolchainError when it cannot be run."""
    try:
        return subprocess.run([tool, "--version"], capture_output=True, errors=AS_NAMES, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{tool} is there but does not run: {error}") from None


def release_of(tool: Path) -> str:
    """The CUDA release, such as "13.0", of a tool of the toolkit."""
    match = re.search(r"release (\d+\.\d+)", version_text(tool))
    if match is None:
        raise ToolchainError(f"{tool} --version names no release: {version_text(tool).strip() or 'it printed nothing'}")
    return match[1]
