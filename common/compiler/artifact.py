"""What the compiler made of a version and a configuration, kept as a folder of the cache: PTX by nvcc, SASS by ptxas.

The folder holds config.cuh, the preprocessor's options, kernel.ptx, kernel.cubin, build.log and, written last,
artifact.json with the facts about them and their digests, by which a damaged folder is known.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flashladder.common import trust
from flashladder.common.catalog import Version
from flashladder.common.compiler import declaration
from flashladder.common.compiler.cubin import code_digest
from flashladder.common.compiler.declaration import LaunchInfo, ParamsField, TensorMapInfo, Workspace
from flashladder.common.errors import BuildError
from flashladder.common.paths import AS_NAMES
from flashladder.common.problem.config import KernelConfig, listing

HEADER, PTX, CUBIN, LOG, FACTS = "config.cuh", "kernel.ptx", "kernel.cubin", "build.log", "artifact.json"
FILES = (PTX, CUBIN, LOG)  # what came of the compiler
PTX_DIGEST = "kernel.ptx.sha256"  # beside PTX that is alone


@dataclass(frozen=True)
class DeclaredKernel:
    """One kernel of a rung, and how it is launched."""

    entry: str
    launch: LaunchInfo


@dataclass(frozen=True)
class RungKernel(DeclaredKernel):
    """The same, and what ptxas says of it."""

    registers: int  # of one thread
    spill_store_bytes: int  # of one thread, as ptxas counts them
    spill_load_bytes: int
    stack_bytes: int

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory, above 0 when registers spill or an array does not fit them."""
        return max(self.stack_bytes, self.spill_store_bytes, self.spill_load_bytes)


@dataclass(frozen=True)
class PtxModule:
    """What nvcc makes of a rung: PTX, and what the rung declares in it. That is all that the emulator needs."""

    version: str  # the rung's name, "02_swizzling"
    config: KernelConfig
    arch: str
    directory: Path
    kernels: tuple[DeclaredKernel, ...]  # in the order in which they run
    operation: str
    workspaces: tuple[Workspace, ...] = ()  # memory that the kernels share

    @property
    def entry(self) -> str:
        """The main kernel."""
        return entry_of(self.operation)

    @property
    def launch(self) -> LaunchInfo:
        """That of the main kernel."""
        return next(kernel.launch for kernel in self.kernels if kernel.entry == self.entry)

    @property
    def ptx(self) -> Path:
        return self.directory / PTX


@dataclass(frozen=True)
class Artifact(PtxModule):
    """The same after ptxas, which makes a cubin of the PTX. Registers and spills are those of the main kernel."""

    kernels: tuple[RungKernel, ...]
    compile_seconds: float = field(kw_only=True)
    cached: bool = field(kw_only=True, compare=False)  # it is the same artifact

    @cached_property
    def main(self) -> RungKernel:
        """The kernel that is named after the operation."""
        return next(kernel for kernel in self.kernels if kernel.entry == self.entry)

    @property
    def registers(self) -> int:
        return self.main.registers

    @property
    def spill_store_bytes(self) -> int:
        return self.main.spill_store_bytes

    @property
    def spill_load_bytes(self) -> int:
        return self.main.spill_load_bytes

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory of the kernel that has most."""
        return max(kernel.local_bytes for kernel in self.kernels)

    @property
    def cubin(self) -> Path:
        return self.directory / CUBIN

    @property
    def key(self) -> str:
        """Equal where kernel, headers, configuration, arch, flags and compiler are: the end of the folder's name."""
        return self.directory.name.rpartition("-")[2]

    @cached_property
    def code(self) -> str:
        """Equal where the machine code is, wherever and from whatever it was compiled."""
        return code_digest(self.cubin)

    @property
    def log(self) -> Path:
        """What nvcc and ptxas printed."""
        return self.directory / LOG


def entry_of(operation: str) -> str:
    """The name of the main kernel in the rungs of an operation."""
    return f"attention_{operation}"


def module(directory: Path, version: Version, config: KernelConfig, arch: str) -> PtxModule:
    """What nvcc made in a folder, read; BuildError where the rung declares no main kernel."""
    declared = declaration.read((directory / PTX).read_text(errors=AS_NAMES))
    if (main := entry_of(version.operation)) not in declared.launches:
        raise BuildError(f"the rung declares no launch of {main}, only of {listing(declared.launches)}")
    kernels = tuple(DeclaredKernel(entry, launch) for entry, launch in declared.launches.items())
    return PtxModule(version.name, config, arch, directory, kernels, version.operation, declared.workspaces)


def seal(ptx: PtxModule, compile_seconds: float) -> None:
    """Reads what ptxas made in a module's folder and writes artifact.json, which makes the folder an artifact."""
    log = (ptx.directory / LOG).read_text(errors=AS_NAMES)
    facts = dataclasses.asdict(ptx) | {"config": ptx.config.name, "compile_seconds": compile_seconds}
    for kernel in facts["kernels"]:
        kernel |= resources(log, kernel["entry"])
    directory = facts.pop("directory")
    facts["digests"] = _digests(directory)
    (directory / FACTS).write_text(json.dumps(facts, indent=1))


def load(directory: Path, cached: bool, files: Collection[str] = FILES) -> Artifact | None:
    """The artifact in a folder, which has these files; None when there is none, or when it is damaged."""
    try:
        facts = json.loads((directory / FACTS).read_text())
        if facts.pop("digests") != _digests(directory, files):
            return None
        config = KernelConfig.parse(facts.pop("config"))
        kernels = tuple(RungKernel(launch=_launch(each.pop("launch")), **each) for each in facts.pop("kernels"))
        workspaces = tuple(Workspace(**fields) for fields in facts.pop("workspaces"))
        return Artifact(
            config=config, kernels=kernels, workspaces=workspaces, directory=directory, cached=cached, **facts
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _launch(facts: dict[str, Any]) -> LaunchInfo:
    tensor_maps = tuple(TensorMapInfo(**fields) for fields in facts.pop("tensor_maps"))
    fields = tuple(ParamsField(**each) for each in facts.pop("fields"))
    lists: dict[str, Any] = {name: tuple(facts.pop(name)) for name in ("grid", "cluster")}
    return LaunchInfo(**facts, **lists, tensor_maps=tensor_maps, fields=fields)


def copy_machine_code(artifact: Artifact, directory: Path) -> None:
    """What a GPU needs of an artifact, and the facts about it, to a new folder."""
    trust.make(directory)
    shutil.copyfile(artifact.cubin, directory / CUBIN)
    facts = json.loads((artifact.directory / FACTS).read_text())
    facts["digests"] = _digests(directory, [CUBIN])
    (directory / FACTS).write_text(json.dumps(facts, indent=1))
    trust.withhold(directory)


def seal_ptx(directory: Path) -> None:
    """Writes the digest of a folder's PTX, by which a damaged one is known."""
    (directory / PTX_DIGEST).write_text(_digests(directory, [PTX])[PTX])


def has_whole_ptx(directory: Path) -> bool:
    """Whether there is PTX in a folder as it was sealed."""
    try:
        return (directory / PTX_DIGEST).read_text() == _digests(directory, [PTX])[PTX]
    except OSError:
        return False


def _digests(directory: Path, files: Collection[str] = FILES) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in files}


def resources(log: str, entry: str) -> dict[str, int]:
    """Registers, stack and spills of a kernel from the log of `ptxas -v`."""
    found = re.search(
        rf"Function properties for {entry}\s+"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.S,
    )
    if found is None:
        raise BuildError(f"ptxas says nothing of a kernel {entry}; it printed:\n{log.strip()}")
    return {
        "registers": int(found[4]),
        "stack_bytes": int(found[1]),
        "spill_store_bytes": int(found[2]),
        "spill_load_bytes": int(found[3]),
    }
