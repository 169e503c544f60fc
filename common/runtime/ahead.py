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

from flashladder.common.catalog import Card, choice
from flashladder.common.compiler.compile import BuildRequest
from flashladder.common.compiler.prebuilt import compile_into
from flashladder.common.errors import ConfigError, FlashLadderError
from flashladder.common.own import FIRST
from flashladder.common.problem.config import gpu_names, listing, load_gpu
from flashladder.common.problem.kind import LENGTHS, Kind

_KINDS = (("bf16", "fp16"), (64, 128), (False, True), (False, True), LENGTHS)  # dtype, head_dim, causal, lse, length
FIRST_WITH_OWN_FEATURES = 9  # from this architecture on the kernels are for sm_90a, sm_100a, ...


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
    for gpu, (dtype, head_dim, causal, lse, length) in itertools.product(gpus, itertools.product(*_KINDS)):
        kind = Kind(FIRST, dtype, head_dim, head_dim, causal=causal, lse=lse, length=length)
        yield BuildRequest(*choice(kind, Card(arch, gpu)), arch, lines=False)


if __name__ == "__main__":  # setup.py runs it
    try:
        compile_into(Path(sys.argv[1]), requests(sys.argv[2]))
    except FlashLadderError as error:
        sys.exit(f"FLASHLADDER_ARCHS={sys.argv[2]}: {error}")
