"""Which kernels calls launch, for machines that have no compiler: they are built into the package.

    FLASHLADDER_ARCHS="8.0;9.0a" pip install .

Of each arch, for every GPU of configs/gpus that has it, as tuned for it: bf16 and fp16, head_dim 64 and 128, with and
without a causal mask, for short keys and long ones.

- `attention`, `packed_attention`, and flash-attn's functions of them, with and without the log-sum-exp
- `flash_attn_with_kvcache`, in one piece and in pages, with and without new keys, for any number of sequences and heads
- `flash_attn_varlen_func` over pages

Needs no torch.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from flashladder.common.catalog import Card, choice, ladder_of, winners
from flashladder.common.compiler.compile import BuildRequest
from flashladder.common.compiler.prebuilt import compile_into
from flashladder.common.errors import ConfigError, FlashLadderError
from flashladder.common.own import FIRST
from flashladder.common.problem.config import GpuDescription, Value, gpu_names, listing, load_gpu
from flashladder.common.problem.kind import LENGTHS, Kind

PAGE_SIZES = (16, 32, 64, 128, 256)
_ANY_PAGES = (16, 64)  # decode/16 and 17 have kernels of one size; others of any, for which the usual may have winners
_USUAL = (("bf16", "fp16"), (64, 128), (False, True), LENGTHS)  # dtype, head_dim, causal, length
_OFF = ("fp8_cache", "tensor_scales", "page_scales", "tree", "leftpad", "rotary", "rotary_interleaved")
# The options that a kind of decode has, at their defaults. They are declared where torch is needed.
_STEP: Mapping[str, Value] = {
    "paged": False,
    "page_size": 64,
    "new_keys": False,
    "packed_q": False,
    **dict.fromkeys(_OFF, False),
}
FIRST_WITH_OWN_FEATURES = 9  # from this architecture on the kernels are for sm_90a, sm_100a, ...


def requests(archs: str) -> list[BuildRequest]:
    """What to build for "8.0;9.0a"; ConfigError for what is no architecture."""
    words = [word for word in re.split(r"[;,\s]+", archs) if word]
    found = (request for arch in list(map(_arch, words)) for request in _of_arch(arch))
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
    for gpu, kind in itertools.product(_unlike(gpus), kinds()):
        yield BuildRequest(*choice(kind, Card(arch, gpu)), arch, lines=False)


def _unlike(gpus: Iterable[GpuDescription]) -> Iterable[GpuDescription]:
    """One of those for which all choices are alike: they have the same winners, and as much shared memory."""
    found = {}
    for gpu in gpus:
        source = winners.source(gpu)
        found[source if winners.of_gpu(source) else "", gpu.shared_per_sm] = gpu
    return found.values()


def kinds() -> list[Kind]:
    """Of the problems whose kernels a package has."""
    found = []
    for dtype, head_dim, causal, length in itertools.product(*_USUAL):
        of_any = partial(Kind, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, causal=causal, length=length)
        for lse in (False, True):
            found += [of_any(FIRST, lse=lse), of_any("packed", lse=lse, packed=True)]
        found += [of_any("decode", lse=True, **step) for step in _steps()]
    return found


@cache
def _steps() -> list[dict[str, Any]]:
    """What kinds of decode have beside the usual: options, and what sizes come to."""
    new_or_not = (False, True)
    asked: list[dict[str, Value]] = [{"new_keys": new} for new in new_or_not]
    asked += [{"paged": True, "page_size": size, "new_keys": new} for size in _ANY_PAGES for new in new_or_not]
    asked += [{"paged": True, "page_size": size, "packed_q": True} for size in PAGE_SIZES]
    return [_step(options, classes) for options in asked for classes in _classes(options)]


def _step(options: Mapping[str, Value], classes: tuple[tuple[str, Value], ...]) -> dict[str, Any]:
    values = {**_STEP, **options}
    unusual = tuple(name for name, value in values.items() if value != _STEP[name])
    return {"options": tuple(values.items()), "unusual": unusual, "classes": classes}


def _classes(options: Mapping[str, Value]) -> Iterable[tuple[tuple[str, Value], ...]]:
    """All that the sizes of a step may come to, by examples of each."""
    sizes = {"batch": (1, 8, 256), "num_heads": (8, 12, 32), "num_splits": (0, 1)}
    examples = (dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values()))
    ladder, same = ladder_of("decode"), {"seqlen_q": 1, "seqlen_k": 1}
    return dict.fromkeys(
        ladder.classes_of({**_STEP, **options, **same, **each, "num_heads_k": each["num_heads"]}) for each in examples
    )


if __name__ == "__main__":  # setup.py runs it
    try:
        compile_into(Path(sys.argv[1]), requests(sys.argv[2]))
    except FlashLadderError as error:
        sys.exit(f"FLASHLADDER_ARCHS={sys.argv[2]}: {error}")
