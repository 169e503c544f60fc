"""Which kernels attention() launches, for machines that have no compiler: they are built into the package.

    FLASHLADDER_ARCHS="8.0;9.0a" pip install .

Of each arch, for every GPU of configs/gpus that has it, as tuned for it: bf16 and fp16, head_dim 64 and 128, with and
without a causal mask, with and without the log-sum-exp, for short keys and long ones. Needs no torch.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.compiler.compile import BuildRequest
from flashladder.common.compiler.prebuilt import compile_into
from flashladder.common.errors import ConfigError, FlashLadderError
from flashladder.common.problem.config import (
    GpuDescription,
    KernelConfig,
    gpu_names,
    listing,
    load_gpu,
    parse_values,
)
from flashladder.common.runtime import tuned

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem

# Hopper's fastest rungs: winners decide between them, and without any the first one is taken. In none of them a row's
# bits depend on other rows. A winner of another rung does not go before them: it was never measured against theirs.
RIVALS = ("column_of_ones",)
# They take any mask and any lengths; the fastest first.
GENERAL = (*RIVALS, "place_of_q", "own_rows", "wide_heads", "woven_general")
EMULATED_TILE = 64  # rows and keys
DEFAULT = "fastest"  # of these, on the GPU and for the problem at hand
DTYPES, HEAD_DIMS = ("bf16", "fp16"), (64, 128)
FIRST_WITH_OWN_FEATURES = 9  # from this architecture on the kernels are for sm_90a, sm_100a, ...


def fastest(problem: Problem, arch: str, gpu: str, emulated: bool = False, adopted: Path | None = None) -> Version:
    """Of the general rungs: the first one that is able, or the rival whose winner on the GPU is (tuned.fastest).

    The emulator's time is that of their instructions, so that it takes the oldest one first. The oldest one too where
    none takes the problem; it then says why.
    """
    rungs = [catalog.find(name) for name in GENERAL]
    able = [rung for rung in rungs if rung.runs_on(arch) and rung.takes(problem)] or rungs[-1:]
    if emulated:
        return able[-1]
    rivals = [rung for rung in rungs[: len(RIVALS)] if rung in able]
    return tuned.fastest(rivals, gpu, problem, adopted) or able[0]


def chosen(
    version: str, problem: Problem, arch: str, gpu: str, emulated: bool = False, adopted: Path | None = None
) -> Version:
    """The rung that `attention(version=...)` launches for a problem, with what is adopted in a folder."""
    return fastest(problem, arch, gpu, emulated, adopted) if version == DEFAULT else catalog.find(version)


def configured(
    version: str,
    problem: Problem,
    arch: str,
    gpu: GpuDescription,
    emulated: bool = False,
    adopted: Path | None = None,
) -> tuple[Version, KernelConfig]:
    """The same, as tuned for the GPU, or as stands behind the version: 46@block_n=64."""
    name, _, fields = version.partition("@")
    rung, values = chosen(name, problem, arch, gpu.name, emulated, adopted), parse_values(fields)
    if emulated and version == DEFAULT:
        return rung, for_emulator(rung, problem, gpu)
    as_tuned = None if values else tuned.config(rung, gpu.name, problem, adopted)
    return rung, as_tuned or rung.config_for(problem, gpu, **values)


def for_emulator(rung: Version, problem: Problem, gpu: GpuDescription | None = None) -> KernelConfig:
    """A rung's configuration; the emulator's own rung has small tiles: half the time to compile, and as fast to run."""
    usual = rung.config_for(problem, gpu)
    if rung != catalog.find(GENERAL[-1]):
        return usual
    return rung.config_for(problem, gpu, block_m=EMULATED_TILE, block_n=min(EMULATED_TILE, usual.block_n))


def request(
    version: str, problem: Problem, arch: str, gpu: GpuDescription, adopted: Path | None = None
) -> BuildRequest:
    """What `attention(version=...)` launches for a problem, to be built; with what is adopted in a folder."""
    rung, config = configured(version, problem, arch, gpu, adopted=adopted)
    return BuildRequest(rung, config, arch, lines=False)


def requests(archs: str) -> list[BuildRequest]:
    """What to build for "8.0;9.0a"; ConfigError for what is no architecture."""
    words = [word for word in re.split(r"[;,\s]+", archs) if word]
    found = (request for arch in map(_arch, words) for request in _of_arch(arch))
    return list(dict.fromkeys(found))


def _arch(word: str) -> str:
    """sm_90a of "9.0a"."""
    if not (match := re.fullmatch(r"(\d+)\.(\d)(a?)", word)):
        raise ConfigError(f"{word!r} is no architecture; FLASHLADDER_ARCHS is a list such as 8.0;8.6;9.0a")
    major, minor, own = match.groups()
    right = f"{major}.{minor}{'a' if int(major) >= FIRST_WITH_OWN_FEATURES else ''}"
    if word != right:
        raise ConfigError(f"a GPU of architecture {major}.{minor} runs kernels for {right}, not {word}")
    return f"sm_{major}{minor}{own}"


def _of_arch(arch: str) -> Iterator[BuildRequest]:
    gpus = [gpu for gpu in map(load_gpu, gpu_names()) if gpu.arch == arch]
    if not gpus:
        known = listing(dict.fromkeys(load_gpu(name).arch for name in gpu_names()))
        raise ConfigError(
            f"configs/gpus describes no GPU with {arch}; of those described the architectures are {known}"
        )
    no_yes = (False, True)
    lengths = tuned.LENGTHS.values()
    kinds = itertools.product(DTYPES, HEAD_DIMS, no_yes, no_yes, lengths)
    for gpu, kind in itertools.product(gpus, kinds):
        yield request(DEFAULT, _problem(*kind), arch, gpu)


def _problem(dtype: str, head_dim: int, causal: bool, lse: bool, seqlen_k: int) -> Problem:
    """What of a problem decides a configuration: a Problem itself needs torch, which builds of a package lack."""
    sizes = {"num_heads": 1, "num_heads_k": 1, "seqlen_q": 1, "seqlen_k": seqlen_k}
    operation = catalog.find(GENERAL[0]).operation
    asked = {"operation": operation, "layout": "bshd", "outputs": ("o", "lse") if lse else ("o",)}
    features = {"packed": False, "window": False, "softcap": 0.0, "alibi": False, "sinks": False, "dropout_p": 0.0}
    without = {**features, "options": (), "set_options": {}}
    kind = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim, "causal": causal, "lse": lse}
    return cast("Problem", SimpleNamespace(**sizes, **asked, **without, **kind))


if __name__ == "__main__":  # setup.py runs it
    try:
        compile_into(Path(sys.argv[1]), requests(sys.argv[2]))
    except FlashLadderError as error:
        sys.exit(f"FLASHLADDER_ARCHS={sys.argv[2]}: {error}")
