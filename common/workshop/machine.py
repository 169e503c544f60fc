"""What a machine has and lacks to work with kernels: a probe gives what it found, or raises what lacks."""

import ctypes
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashladder.common.catalog import find, winners
from flashladder.common.compiler import Artifact, build_one
from flashladder.common.compiler.toolchain import find_host_compiler, find_ninja, find_tool, release_of, toolchain
from flashladder.common.errors import DeviceError, FlashLadderError
from flashladder.common.host import find_git
from flashladder.common.packages import requirements
from flashladder.common.paths import cache_dir, results_dir

SMOKE_VERSION, SMOKE_ARCH = "02", "sm_80"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `found` is what is there, or why it is not and what mends it."""

    what: str
    found: str
    good: bool = True


def examine(probes: dict[str, Callable[[], str]]) -> Iterator[Finding]:
    """Runs probes by name. A probe gives what it found, or raises what lacks."""
    for what, probe in probes.items():
        try:
            yield Finding(what, probe())
        except (FlashLadderError, ImportError) as error:
            yield Finding(what, str(error), good=False)


def python() -> str:
    return f"{sys.version.split()[0]} ({sys.executable})"


def packages() -> str:
    """The packages that setup.py asks for."""
    versions, missing = [], []
    for name in (name for name, extra in requirements() if not extra):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise ImportError(f"{', '.join(missing)}: `{sys.executable} -m pip install {' '.join(missing)}`")
    return ", ".join(versions)


def compiler() -> str:
    found = toolchain()
    return f"nvcc {found.release} ({found.nvcc}), ptxas ({found.ptxas})"


def kernel_compiles() -> str:
    artifact = smoke_artifact()
    return f"{artifact.version} for {artifact.arch}: {artifact.registers} registers, {artifact.compile_seconds:.1f} s"


def emulator_runs() -> str:
    """Runs the kernel on the emulator and checks its output."""
    from flashladder.common.problem.problem import Problem
    from flashladder.common.studies import single

    artifact = smoke_artifact()
    problem = Problem(seqlen_q=artifact.launch.block_m, seqlen_k=2 * artifact.launch.block_n)
    outcome = single.emulate(artifact, problem)
    outcome.check.require(artifact.version)
    return f"{artifact.version}: its output is correct, {outcome.figures['emulated_seconds']:.1f} s"


def smoke_artifact() -> Artifact:
    version = find(SMOKE_VERSION)
    return build_one(version, version.config(), SMOKE_ARCH)


def writable(folder: Path, variable: str) -> str:
    """A folder that can be written, or made where it would be: it is not made here."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return str(folder)
    except OSError as error:
        raise FlashLadderError(f"{folder}: {error.strerror}. Set {variable} to a folder that can be written.") from None


def driver() -> str:
    """The NVIDIA driver, which must know CUDA of the compiler's major release."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise DeviceError("no NVIDIA driver; the emulator needs none. See https://www.nvidia.com/drivers") from None
    number = ctypes.c_int()
    libcuda.cuDriverGetVersion(ctypes.byref(number))
    major, minor = number.value // 1000, number.value % 1000 // 10
    compiled = toolchain().release
    if int(compiled.split(".")[0]) > major:
        raise DeviceError(
            f"it knows CUDA {major}.{minor}, but the compiler is CUDA {compiled}, whose kernels it cannot load. Update "
            f"the driver, or set FLASHLADDER_CUDA to a CUDA {major} toolkit."
        )
    return f"knows CUDA {major}.{minor}"


def gpus() -> str:
    import torch

    from flashladder.common.runtime import device
    from flashladder.common.runtime.gpu import require_gpu

    require_gpu()
    names = []
    for index in range(torch.cuda.device_count()):
        here = device.present(index)
        gpu = device.describe(here)
        names.append(f"{here.name} ({here.arch}, {gpu.name if device.is_known(gpu) else device.MEASURED})")
    return ", ".join(names)


def tuned() -> str:
    """The winners of the first GPU, or of the one whose winners count there."""
    from flashladder.common.runtime import device
    from flashladder.common.runtime.gpu import require_gpu

    require_gpu()
    here = device.describe(device.present(0))
    source = winners.source(here)
    if not (rungs := {winner.version for winner in winners.of_gpu(source)}):
        raise DeviceError(f"none for {here.name} or a card like it: `flashladder search 16 --gpu here` finds one")
    nearest = "" if source == here.name else f"{here.name} has none; the nearest card that has some is "
    return f"{nearest}{source}: {len(rungs)} rungs"


def torch_with_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        command = f"{sys.executable} -m pip install --force-reinstall torch"
        raise ImportError(f"torch {torch.__version__} is a build without CUDA, which a GPU needs: `{command}`")
    return f"torch {torch.__version__} with CUDA {torch.version.cuda}"


def disassembler(name: str) -> str:
    tool = find_tool(name)
    return f"CUDA {release_of(tool)} ({tool})"


def baseline(name: str) -> str:
    from flashladder.common.measure.baselines import find as find_baseline
    from flashladder.common.own import FIRST

    found = find_baseline(name, FIRST)
    if lack := found.missing():
        raise ImportError(lack)
    return found.version


def calls_in_cpp() -> str:
    """What is there for common/runtime/fast_path.py, which is compiled beside a program's first call."""
    from flashladder.common.compiler import library
    from flashladder.common.runtime import fast_path

    fast_path.require()
    return (
        "compiled"
        if all(map(library.find_extension, (fast_path.SOURCE, fast_path.NODE)))
        else "to be compiled by a first call"
    )


def triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("`pip install triton`") from None


NEEDED: dict[str, Callable[[], str]] = {
    "Python": python,
    "packages": packages,
    "CUDA compiler": compiler,
    "host compiler": lambda: str(find_host_compiler()),
    "ninja": lambda: str(find_ninja()),
    "a kernel compiles": kernel_compiles,
    "the emulator runs it": emulator_runs,
    "cache folder": lambda: writable(cache_dir(), "FLASHLADDER_CACHE"),
    "results folder": lambda: writable(results_dir(), "FLASHLADDER_RESULTS"),
}
FOR_A_GPU: dict[str, Callable[[], str]] = {
    "NVIDIA driver": driver,
    "torch with CUDA": torch_with_cuda,
    "GPU": gpus,
    "winners": tuned,
    "calls in C++": calls_in_cpp,
}
OPTIONAL: dict[str, Callable[[], str]] = {
    "git": find_git,
    "cuobjdump": lambda: disassembler("cuobjdump"),
    "nvdisasm": lambda: disassembler("nvdisasm"),
    "flash-attn": lambda: baseline("flash-attn"),
    "FlashAttention-3": lambda: baseline("fa3"),
    "FlashAttention-4": lambda: baseline("fa4"),
    "FlashInfer": lambda: baseline("flashinfer"),
    "xFormers": lambda: baseline("xformers"),
    "Triton": triton,
}
