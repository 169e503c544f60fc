"""Multi-head latent attention under FlashMLA's names: decode of a paged cache whose rows are K and V of all heads."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from flashladder.common import catalog
from flashladder.common.api import caches, given, gradients, op
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.launch import PROBLEMS_KEPT

# The first that a GPU has the instructions for, and that takes a problem, computes it.
RUNGS = ("mla/05", "mla/02", "mla/00")
HEAD_DIM, HEAD_DIM_V = 576, 512


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None, num_heads_per_head_k: int = 1, num_heads_k: int = 1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FlashMLA's preparation of a step: a schedule, and where the parts of each sequence begin, (batch + 1) int32.

    Kernels here make their schedule from the lengths themselves, on the GPU. So the first tensor is empty, and the
    second one counts a part a sequence. `flash_mla_with_kvcache` takes both, and looks at neither. FlashMLA asks for no
    argument since 2026; without cache_seqlens the second is None, as there.
    """
    for name, count in (("num_heads_per_head_k", num_heads_per_head_k), ("num_heads_k", num_heads_k)):
        if given.whole(name, count) < 1:
            raise UnsupportedProblemError(f"{name}={count}: must be at least 1")
    if cache_seqlens is None:
        return torch.empty((0, 8), dtype=torch.int32), None
    given.tensors(cache_seqlens=cache_seqlens)
    parts = torch.arange(len(cache_seqlens) + 1, dtype=torch.int32, device=cache_seqlens.device)
    return parts.new_empty((0, 8)), parts


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, (batch, seqlen_q, heads, 576), over pages (num_pages, page_size, heads_k, 576).

    V of a key is the first `head_dim_v` columns of its row, 512. block_table is (batch, max_pages), int32, and
    cache_seqlens (batch), int32: how many keys each sequence has. softmax_scale: 1/sqrt(576) unless given. A model
    that absorbs its projections gives that of its own head_dim instead. `causal` is aligned to the end.

    Returns O, (batch, seqlen_q, heads, 512), and the log-sum-exp, (batch, heads, seqlen_q), fp32. A row that sees no
    key has O = 0 and a log-sum-exp of +inf, as FlashMLA's. Pages may have any size. Forward only. A length beyond
    the room counts as the room, a page that is none as the last one. Nothing here waits for the GPU.

    The arguments behind `causal` are those of FlashMLA's caches in 8 bits and of its sparse attention, which no kernel
    here has.

    Raises UnsupportedProblemError for these, for tensors that do not go together, and for other numbers of columns.
    """
    given.flags(causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    _refuse(
        is_fp8_kvcache=is_fp8_kvcache or None,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    given.tensors(q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    gradients.refuse(q, k_cache)
    cache = caches.cache_of(q, k_cache, k_cache, block_table, None)
    lengths = caches.lengths_of(cache_seqlens, q, cache)
    _check_columns(q, k_cache, given.whole("head_dim_v", head_dim_v))
    scale = None if softmax_scale is None else given.number("softmax_scale", softmax_scale)
    o, lse = mla_decode(q, k_cache, block_table, lengths, scale, causal)
    return o, lse.masked_fill_(lse == -math.inf, math.inf)


@torch.library.custom_op("flashladder::mla_decode", mutates_args=())
def mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp, which is -inf of a row that sees no key."""
    o, lse = _outputs(q)
    problem = _problem_of(q, k_cache, block_table, softmax_scale, causal)
    tensors = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": k_cache[..., :HEAD_DIM_V],
        "cache_seqlens": cache_seqlens,
        "block_table": block_table.contiguous(),
        "o": o,
        "lse": lse,
    }
    op.slow_path(op.prepared(problem, q, _rung(problem, op.arch_of(q.device))), problem, tensors)
    return o, lse


@mla_decode.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q)


def _problem_of(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, softmax_scale: float | None, causal: bool
) -> Problem:
    page_size = k_cache.shape[1]
    options = {"paged": True, "page_size": page_size, "num_pages": k_cache.shape[0]}
    sizes: dict[str, Any] = {"operation": "mla", "head_dim_v": HEAD_DIM_V, "seqlen_k": page_size * block_table.shape[1]}
    return op.problem_of(q, k_cache, causal, softmax_scale, True, options=tuple(options.items()), **sizes)


@functools.lru_cache(PROBLEMS_KEPT)
def _rung(problem: Problem, arch: str) -> str:
    """The last one of RUNGS takes all that is left; it refuses by name what it does not take."""
    able = (rung for rung in RUNGS if (found := catalog.find(rung)).runs_on(arch) and found.takes(problem))
    return next(able, RUNGS[-1])


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, num_heads, _ = q.shape
    o = q.new_empty((batch, seqlen_q, num_heads, HEAD_DIM_V))
    return o, q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)


def _refuse(**asked: object) -> None:
    """Raises UnsupportedProblemError that names what is given."""
    if names := listing(name for name, value in asked.items() if value is not None):
        raise UnsupportedProblemError(f"{names}: kernels attend to all keys of a cache in 16 bits; leave it out")


def _check_columns(q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int) -> None:
    """Raises UnsupportedProblemError for other numbers of columns than kernels take."""
    columns = (q.shape[3], k_cache.shape[3], head_dim_v)
    if columns != (HEAD_DIM, HEAD_DIM, HEAD_DIM_V):
        raise UnsupportedProblemError(
            f"q has {columns[0]} columns, k_cache {columns[1]}, and head_dim_v={columns[2]}; kernels take {HEAD_DIM}, "
            f"{HEAD_DIM} and {HEAD_DIM_V}"
        )
