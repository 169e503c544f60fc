"""Multi-head latent attention under FlashMLA's names: decode of a paged cache whose rows are K and V of all heads."""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import caches, flops, gradients, validate
from flashladder.common.api.mla import HEAD_DIM, HEAD_DIM_V, mla_decode
from flashladder.common.errors import UnsupportedProblemError

_OPTIONS = {  # of FlashMLA's newer releases, and what they would be for
    "is_fp8_kvcache": "caches in 8 bits",
    "attn_sink": "attention sinks",
    **dict.fromkeys(("indices", "topk", "topk_length"), "sparse attention"),
    **dict.fromkeys(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"), "sparse attention"),
}
_COUNTS = ("num_heads_q", "num_q_tokens_per_head_k")  # of newer releases, whose num_heads_per_head_k is the second


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None, num_heads_per_head_k: int = 1, num_heads_k: int = 1, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FlashMLA's preparation of a step: a schedule, and where the parts of each sequence begin, (batch + 1) int32.

    Kernels here make their schedule from the lengths themselves, on the GPU. So the first tensor is empty, and the
    second one counts a part a sequence. `flash_mla_with_kvcache` takes both, and looks at neither. FlashMLA's newer
    releases need no argument, and give None as the second; so does this without lengths.
    """
    counts = {"num_heads_per_head_k": num_heads_per_head_k, "num_heads_k": num_heads_k}
    counts |= {name: options.pop(name) for name in _COUNTS if options.get(name) is not None}
    _refuse({name: value for name, value in options.items() if name not in _COUNTS})
    if cache_seqlens is None:
        return torch.empty((0, 8), dtype=torch.int32), None
    cache_seqlens = validate.tensor("cache_seqlens", cache_seqlens)
    if cache_seqlens.dim() != 1:
        raise UnsupportedProblemError(f"cache_seqlens has shape {tuple(cache_seqlens.shape)}; it should be (batch)")
    for name, count in counts.items():
        if validate.whole(name, count) < 1:
            raise UnsupportedProblemError(f"{name}={count}: must be at least 1")
    parts = torch.arange(cache_seqlens.shape[0] + 1, dtype=torch.int32, device=cache_seqlens.device)
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
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, (batch, seqlen_q, heads, 576), over pages (num_pages, page_size, heads_k, 576).

    V of a key is the first `head_dim_v` columns of its row, 512. block_table is (batch, max_pages), int32, and
    cache_seqlens (batch), int32: how many keys each sequence has. softmax_scale: 1/sqrt(576) unless given. A model
    that absorbs its projections gives that of its own head_dim instead. `causal` is aligned to the end.

    Returns O, (batch, seqlen_q, heads, 512), and the log-sum-exp, (batch, heads, seqlen_q), fp32. A row that sees no
    key has O = 0 and a log-sum-exp of +inf, as FlashMLA's. Pages may have any size. Forward only. A length beyond
    the room counts as the room, a page that is none as the last one. Under torch.autocast a q of fp32 is cast to its
    type. Nothing here waits for the GPU.

    Raises UnsupportedProblemError for tensors that do not go together, for other numbers of columns, and for `options`
    of FlashMLA's newer releases that ask for more: caches in 8 bits, sparse attention, sinks.
    """
    _refuse(options)
    q, k_cache, block_table = validate.tensors(q=q, k_cache=k_cache, block_table=block_table)
    (q,) = validate.autocast(q)
    cache_seqlens, causal = validate.tensor("cache_seqlens", cache_seqlens), validate.flag("causal", causal)
    gradients.refuse(q, k_cache)
    cache = caches.cache_of(q, k_cache, k_cache, block_table, None)
    lengths = caches.lengths_of(cache_seqlens, cache)
    caches.check_pages(cache, lengths)
    _check_columns(q, k_cache, validate.whole("head_dim_v", head_dim_v))
    flops.tell()
    return mla_decode(q, k_cache, block_table, lengths, validate.scale(softmax_scale), causal)


def _refuse(options: dict[str, Any]) -> None:
    """UnsupportedProblemError for FlashMLA's options that ask for what kernels have not; TypeError for unknown ones."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"{name} is no argument of FlashMLA's: {', '.join(_OPTIONS)}")
        if value is not None and value is not False:
            raise UnsupportedProblemError(f"{name} is given: kernels here have no {_OPTIONS[name]}")


def _check_columns(q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int) -> None:
    """Raises UnsupportedProblemError for other numbers of columns than kernels take."""
    columns = (q.shape[3], k_cache.shape[3], head_dim_v)
    if columns != (HEAD_DIM, HEAD_DIM, HEAD_DIM_V):
        raise UnsupportedProblemError(
            f"q has {columns[0]} columns, k_cache {columns[1]}, and head_dim_v={columns[2]}; kernels take {HEAD_DIM}, "
            f"{HEAD_DIM} and {HEAD_DIM_V}"
        )
