"""Version + configuration + arch -> artifact: nvcc to PTX, ptxas to SASS, under ninja, many at once, behind a cache.

The cache is addressed by content: an artifact's folder is named after a hash of the kernel, every header that it
includes, the configuration, the arch, the flags and the compiler. A finished folder is renamed into place, so that any
number of processes may build at once, and be killed, without harm; two that build the same thing both do the work.
"""

import hashlib
import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar, overload

from flashladder.common.catalog import Version
from flashladder.common.compiler import artifact as artifacts
from flashladder.common.compiler.artifact import Artifact, PtxModule
from flashladder.common.compiler.install import give_way, install_artifact, install_folder
from flashladder.common.compiler.ninja import (
    in_cache,
    plain,
    run_ninja,
    said,
    space_in_cache,
    temporary_folder,
    write_options,
)
from flashladder.common.compiler.sources import Sources, header_folders
from flashladder.common.compiler.toolchain import Toolchain, toolchain
from flashladder.common.errors import BuildError
from flashladder.common.paths import AS_NAMES
from flashladder.common.problem.config import KernelConfig

LINES = "-lineinfo"
NVCC_FLAGS = ("-std=c++17", "-O3", LINES)
PTXAS_FLAGS = ("-v", LINES)
DEPENDENCIES, OPTIONS = "kernel.d", "options"
RULES = f"""
rule nvcc
  command = cd $folder && ($line) > {artifacts.LOG} 2>&1 || ! rm -f {artifacts.PTX}
  description = $out
rule ptxas
  command = cd $folder && ($line) >> {artifacts.LOG} 2>&1
  description = $out
"""  # nvcc leaves PTX that it finds wrong
BATCH = 8  # configurations for each core that are compiled before they are put into place: all that a kill can lose
_SERIALISED = re.compile(r"\(C75\d\d\) .*")  # ptxas waits for each wgmma, or ignores setmaxnreg

Made = TypeVar("Made")
BuildProgress = Callable[[int, int, str], None]  # configurations done, of how many, and the latest


@dataclass(frozen=True)
class BuildRequest:
    """What to compile, and the arch to compile it for (sm_80, sm_90a, ...)."""

    version: Version
    config: KernelConfig
    arch: str
    lines: bool = True  # of the source, in PTX and cubin: what comes of it then depends on where the source lies

    @property
    def flags(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of nvcc and ptxas."""
        without = () if self.lines else (LINES,)
        nvcc, ptxas = (tuple(flag for flag in flags if flag not in without) for flags in (NVCC_FLAGS, PTXAS_FLAGS))
        return nvcc, ptxas

    def __str__(self) -> str:
        changes = self.version.changes(self.config)
        return f"{self.version.name} {f'with {changes} ' if changes else ''}for {self.arch}"


OnPtx = Callable[[BuildRequest, PtxModule], None]
# From a folder to its place, in so many seconds; what was made.
Keep = Callable[[BuildRequest, Path, Path, float], Made]


def build_one(version: Version, config: KernelConfig, arch: str) -> Artifact:
    """The artifact of one configuration, from the cache or compiled now; BuildError when it cannot be."""
    return build([BuildRequest(version, config, arch)])[0]


def cached(version: Version, config: KernelConfig, arch: str) -> Artifact | None:
    """The artifact of one configuration where it is compiled already. ToolchainError without the compiler."""
    return artifacts.load(_place(BuildRequest(version, config, arch), Sources(), toolchain()), cached=True)


def translate(version: Version, config: KernelConfig, arch: str) -> PtxModule:
    """What the emulator runs of one configuration, from the cache or made now, without what ptxas would make of it.

    BuildError where nvcc refuses it. Registers and local memory, which ptxas would tell, are not known.
    """
    version.check_arch(arch)
    if found := translated(version, config, arch):
        return found
    request, sources, compiler = BuildRequest(version, config, arch), Sources(), toolchain()
    wanted = {_place_of_ptx(request, sources, compiler): request}
    (made,) = _compile(wanted, sources, compiler, _Listener(None, None, 1), _as_ptx, last=artifacts.PTX).values()
    if isinstance(made, BuildError):
        raise made
    return made


def translated(version: Version, config: KernelConfig, arch: str) -> PtxModule | None:
    """The same where it is in the cache. ToolchainError without the compiler."""
    if built := cached(version, config, arch):
        return built
    place = _place_of_ptx(BuildRequest(version, config, arch), Sources(), toolchain())
    return artifacts.module(place, version, config, arch) if artifacts.has_whole_ptx(place) else None


@overload
def build(
    requests: Sequence[BuildRequest],
    progress: BuildProgress | None = None,
    *,
    on_ptx: OnPtx | None = None,
    on_error: Literal["raise"] = "raise",
) -> list[Artifact]: ...


@overload
def build(
    requests: Sequence[BuildRequest],
    progress: BuildProgress | None = None,
    *,
    on_ptx: OnPtx | None = None,
    on_error: Literal["return"],
) -> list[Artifact | BuildError]: ...


def build(
    requests: Sequence[BuildRequest],
    progress: BuildProgress | None = None,
    *,
    on_ptx: OnPtx | None = None,
    on_error: Literal["raise", "return"] = "raise",
) -> list[Artifact] | list[Artifact | BuildError]:
    """The artifacts of the requests, in order; what the cache lacks is compiled, on every core, by ptxas alone where
    the cache has what `translate` makes.

    A request that fails does not stop the others. Its BuildError is raised at the end, or returned in its place.
    `on_ptx` is called as soon as a request's PTX is there, from the cache or by nvcc; meanwhile ptxas goes on. The
    PTX's folder may be gone after the call.
    Also raises ConfigError for an arch that a rung does not run on, and ToolchainError.
    """
    for request in requests:
        request.version.check_arch(request.arch)
    compiler, sources = toolchain(), Sources()
    places = [_place(request, sources, compiler) for request in requests]
    wanted = dict(zip(places, requests, strict=True))
    results: dict[Path, Artifact | BuildError] = {}
    for place, request in wanted.items():
        if cached := artifacts.load(place, cached=True):
            results[place] = cached
            if on_ptx:
                on_ptx(request, cached)
    missing = {place: request for place, request in wanted.items() if place not in results}
    results |= _compile(missing, sources, compiler, _Listener(progress, on_ptx, len(missing)), _as_artifact)
    outcome = [without_flaws(wanted[place], results[place]) for place in places]
    failures = [result for result in outcome if isinstance(result, BuildError)]
    if failures and on_error == "raise":
        others = f"\n({len(failures) - 1} more of {len(requests)} configurations failed)" if len(failures) > 1 else ""
        raise BuildError(f"{failures[0]}{others}")
    return outcome


def machine_code(requests: Sequence[BuildRequest], progress: BuildProgress | None = None) -> list[Path | BuildError]:
    """A folder with the cubin and the compiler's log of each request; what its kernels declare is not read.

    Kernels of another commit may declare it in a way that is not today's. What the cache lacks is compiled.
    """
    compiler, sources = toolchain(), Sources()
    places = [_place_of_code(request, sources, compiler) for request in requests]
    missing = {place: request for place, request in zip(places, requests, strict=True) if not place.exists()}
    made = _compile(missing, sources, compiler, _Listener(progress, None, len(missing)), _as_folder)
    return [made.get(place, place) for place in places]


def to_compile(requests: Sequence[BuildRequest]) -> int:
    """How many kernels `machine_code` would compile."""
    compiler, sources = toolchain(), Sources()
    return sum(not place.exists() for place in {_place_of_code(request, sources, compiler) for request in requests})


@dataclass
class _Listener:
    """Tells how far the configurations are, of all batches together."""

    progress: BuildProgress | None
    on_ptx: OnPtx | None
    total: int
    done: int = 0

    def ended(self, request: BuildRequest, output: Path) -> None:
        """A step of a configuration ended: of nvcc, if its PTX is there, one more is to follow."""
        if output.name == artifacts.PTX and output.exists():
            self._translated(request, output.parent)
            return
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total, str(request))

    def _translated(self, request: BuildRequest, folder: Path) -> None:
        if self.on_ptx is None:
            return
        try:
            module = artifacts.module(folder, request.version, request.config, request.arch)
        except BuildError:  # raised at the end
            return
        self.on_ptx(request, module)


def _place(request: BuildRequest, sources: Sources, compiler: Toolchain) -> Path:
    """The folder of an artifact in the cache, named after everything that decides its content."""
    return in_cache("artifacts", folder_name(request, sources, compiler.identity))


def _place_of_code(request: BuildRequest, sources: Sources, compiler: Toolchain) -> Path:
    """The same of what `machine_code` makes."""
    return in_cache("code", folder_name(request, sources, compiler.identity))


def _place_of_ptx(request: BuildRequest, sources: Sources, compiler: Toolchain) -> Path:
    """The same of what `translate` makes."""
    return in_cache("ptx", folder_name(request, sources, compiler.identity))


def folder_name(request: BuildRequest, sources: Sources, compiler: str = "") -> str:
    """The name of an artifact's folder; without a compiler, that of its machine code by whichever compiler."""
    code = sources.digest(request.version.kernel, paths=request.lines), request.config.header()
    decisive = (*code, request.version.operation, request.arch, *request.flags, compiler)
    key = hashlib.sha256(repr(decisive).encode()).hexdigest()[:24]
    return f"{request.version.file_name}-{request.arch}-{key}"


def without_flaws(request: BuildRequest, result: Artifact | BuildError) -> Artifact | BuildError:
    """The result, or a BuildError when ptxas made less of it than its rung promises."""
    if isinstance(result, BuildError):
        return result
    log = result.log.read_text(errors=AS_NAMES)
    if request.version.instruction_set != "ampere" and (said := _SERIALISED.search(log)):
        return BuildError(f"{request} has matrix products that do not run beside other instructions. ptxas: {said[0]}")
    return _without_local_memory(request, result)


def _without_local_memory(request: BuildRequest, result: Artifact) -> Artifact | BuildError:
    """The result, or a BuildError when it uses local memory and its rung declares none."""
    if not result.local_bytes or request.version.local_memory:
        return result
    worst = max(result.kernels, key=lambda kernel: kernel.local_bytes)
    which = f"{worst.entry} of " if len(result.kernels) > 1 else ""
    return BuildError(
        f"{which}{request} uses local memory: {worst.stack_bytes} bytes of stack, {worst.spill_store_bytes} bytes of "
        f"spill stores, {worst.spill_load_bytes} bytes of spill loads (at {worst.registers} registers). Choose a "
        f"smaller tile or more warps, or declare `local_memory: true` in {request.version.directory / 'version.yaml'}"
    )


def _compile(
    missing: dict[Path, BuildRequest],
    sources: Sources,
    compiler: Toolchain,
    listener: _Listener,
    keep: Keep[Made],
    last: str = artifacts.CUBIN,
) -> dict[Path, Made | BuildError]:
    """Compiles what the cache lacks as far as a file, batch after batch, on every core."""
    size = BATCH * len(os.sched_getaffinity(0))
    results: dict[Path, Made | BuildError] = {}
    for start in range(0, len(missing), size):
        batch = dict(list(missing.items())[start : start + size])
        results |= _compile_batch(batch, sources, compiler, listener, keep, last)
    return results


def _compile_batch(
    batch: dict[Path, BuildRequest],
    sources: Sources,
    compiler: Toolchain,
    listener: _Listener,
    keep: Keep[Made],
    last: str,
) -> dict[Path, Made | BuildError]:
    """Compiles in a temporary folder, one subfolder each, and moves what succeeds into place."""
    with space_in_cache(), temporary_folder() as temporary:
        by_name = {str(number): request for number, request in enumerate(batch.values())}
        for name, request in by_name.items():
            folder = temporary / name
            folder.mkdir()
            (folder / artifacts.HEADER).write_text(request.config.header())
            write_options(folder / OPTIONS, _preprocessed(request))
            if last == artifacts.CUBIN and artifacts.has_whole_ptx(kept := _place_of_ptx(request, sources, compiler)):
                for file in (DEPENDENCIES, artifacts.LOG, artifacts.PTX):
                    shutil.copyfile(kept / file, folder / file)
                listener.ended(request, folder / artifacts.PTX)
        (temporary / "build.ninja").write_text(_ninja_file(by_name, temporary, compiler, last))
        output = run_ninja(temporary, lambda edge: listener.ended(by_name[Path(edge).parent.name], temporary / edge))
        seconds = _compile_seconds(temporary / ".ninja_log", last)
        now = Sources()
        results: dict[Path, Made | BuildError] = {}
        for name, (place, request) in zip(by_name, batch.items(), strict=True):
            folder, kernel = temporary / name, request.version.kernel
            try:
                if name not in seconds:
                    unread = f"{kernel}: ptxas reads no path with a quotation mark\n" if '"' in str(kernel) else ""
                    raise BuildError(unread + said(folder / artifacts.LOG, output))
                sources.check_complete(kernel, folder / DEPENDENCIES)
                if now.digest(kernel) != sources.digest(kernel):
                    raise BuildError("its source was edited while it was compiled; build it again")
                results[place] = keep(request, folder, place, seconds[name])
            except BuildError as error:
                results[place] = BuildError(f"{request} cannot be built:\n{error}")
    return results


def _plain(compiler: Toolchain, folder: Path) -> Toolchain:
    """The same tools, as a build in this folder calls them."""
    tools = compiler.nvcc, compiler.ptxas, compiler.host_compiler
    nvcc, ptxas, host_compiler = (Path(plain(tool, folder)) for tool in tools)
    return replace(compiler, nvcc=nvcc, ptxas=ptxas, host_compiler=host_compiler)


def _ninja_file(batch: dict[str, BuildRequest], temporary: Path, compiler: Toolchain, last: str) -> str:
    """Two edges for each configuration, by its folder: nvcc makes PTX of the kernel, where it lies not there already,
    and ptxas a cubin if wanted."""
    lines, compiler = [RULES], _plain(compiler, temporary)
    for name, request in batch.items():
        ptx, cubin = f"{name}/{artifacts.PTX}", f"{name}/{artifacts.CUBIN}"
        edges = {f"{cubin}: ptxas {ptx}": ptxas_command(request, compiler)}
        if not (temporary / ptx).exists():
            edges[f"{ptx}: nvcc"] = _nvcc(request, compiler)
        for edge, words in edges.items():
            lines += [f"build {edge}", f"  folder = {name}", f"  line = {shlex.join(words)}"]
        lines.append(f"default {name}/{last}")
    return "\n".join([*lines, ""])


def _nvcc(request: BuildRequest, compiler: Toolchain) -> list[str]:
    flags, virtual_arch = request.flags[0], request.arch.replace("sm_", "compute_")
    tool = [compiler.nvcc, *flags, f"-arch={virtual_arch}", "-ccbin", compiler.host_compiler]
    source = ["-Xcompiler", f"@{OPTIONS}", "-x", "cu", "/dev/null"]  # the options include the kernel
    return [str(word) for word in (*tool, *source, "-ptx", "-o", artifacts.PTX)]


def _preprocessed(request: BuildRequest) -> list[str | Path]:
    """What nvcc's preprocessor is told of a kernel: where its headers are, and to read it behind CUDA's own header."""
    headers: list[str | Path] = [*header_folders(request.version.kernel), "."]
    folders = [word for folder in headers for word in ("-I", folder)]
    dependencies = ["-MD", "-MF", DEPENDENCIES]  # nvcc's own -MD would read all headers a second time
    return [*folders, *dependencies, "-include", "cuda_runtime.h", "-include", request.version.kernel]


def ptxas_command(request: BuildRequest, compiler: Toolchain) -> list[str]:
    """What makes the cubin of an artifact's PTX, in its folder."""
    level = [f"-O{request.config.ptxas_level}"] if "ptxas_level" in request.config.fields else []
    tool = [compiler.ptxas, *request.flags[1], f"-arch={request.arch}", *level]
    return [str(word) for word in (*tool, "-o", artifacts.CUBIN, artifacts.PTX)]


def _compile_seconds(ninja_log: Path, last: str) -> dict[str, float]:
    """Seconds of all steps by subfolder, of those that came to the last one: ninja logs no step that failed."""
    rows: Iterable[list[str]] = []
    with suppress(FileNotFoundError):
        rows = [line.split("\t") for line in ninja_log.read_text().splitlines() if not line.startswith("#")]
    spent: dict[str, dict[str, float]] = defaultdict(dict)
    for start, end, _, output, _ in rows:
        spent[Path(output).parent.name][Path(output).name] = (int(end) - int(start)) / 1000
    return {name: sum(steps.values()) for name, steps in spent.items() if last in steps}


def _as_artifact(request: BuildRequest, folder: Path, place: Path, seconds: float) -> Artifact:
    artifacts.seal(artifacts.module(folder, request.version, request.config, request.arch), seconds)
    return install_artifact(folder, place)


def _as_ptx(request: BuildRequest, folder: Path, place: Path, seconds: float) -> PtxModule:
    module = artifacts.module(folder, request.version, request.config, request.arch)
    artifacts.seal_ptx(folder)
    if place.exists() and not artifacts.has_whole_ptx(place):
        give_way(place, folder)
    return replace(module, directory=install_folder(folder, place))


def _as_folder(_request: BuildRequest, folder: Path, place: Path, _seconds: float) -> Path:
    return install_folder(folder, place)
