"""Multi-head latent attention under FlashMLA's names: decode of a paged cache whose rows are K and V of all heads."""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import caches, flops, gradients, validate
from flashladder.common.api.mla import COLUMNS, HEAD_DIM, mla_decode
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import latent_rows
from flashladder.common.problem.config import listing

_OPTIONS = {  # of FlashMLA's newer releases, and what they would be for
    "attn_sink": "attention sinks",
    **dict.fromkeys(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"), "second cache"),
}
_COUNTS = ("num_heads_q", "num_q_tokens_per_head_k", "topk")  # of newer releases; num_heads_per_head_k is the second
_OF_KERNELS = (*_COUNTS, "is_fp8_kvcache")  # what a schedule would depend on


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
    _refuse({name: value for name, value in options.items() if name not in _OF_KERNELS})
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
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, (batch, seqlen_q, heads, 576), over pages (num_pages, page_size, heads_k, 576).

    V of a key is the first `head_dim_v` columns of its row, 512. Rows may also have 512 columns, all of them V, or 160,
    128 of them V. block_table is (batch, max_pages), int32, and cache_seqlens (batch), int32: how many keys each
    sequence has. softmax_scale: 1/sqrt(576) unless given. A model that absorbs its projections gives that of its own
    head_dim instead. `causal` is aligned to the end.

    With is_fp8_kvcache a row has 656 bytes, of uint8, int8 or float8_e4m3fn: 512 e4m3, four fp32 scales, each of 128 of
    these, and 64 columns of bf16, as is q. `concat_and_cache_mla` writes them. On a GPU it needs Hopper, as lists do.

    With indices, (batch, seqlen_q, topk), int32, each row of q sees the rows of one head of K that its list names, in
    any order, and no others: row r of page p is p * page_size + r; any number that is none, such as -1, is left out.
    Of each list the first topk_length, (batch), int32, count, or all. block_table and cache_seqlens may be None then.

    Returns O, (batch, seqlen_q, heads, head_dim_v), and the log-sum-exp, (batch, heads, seqlen_q), fp32. A row that
    sees no key has O = 0 and a log-sum-exp of +inf, as FlashMLA's. Pages may have any size. Forward only. A length
    beyond the room counts as the room, a page that is none as the last one. Under torch.autocast a q of fp32 is cast to
    its type. Nothing here waits for the GPU.

    Raises UnsupportedProblemError for tensors that do not go together, for other numbers of columns, and for `options`
    of FlashMLA's newer releases that ask for more: sinks, a second cache.
    """
    _refuse(options)
    q, k_cache = validate.tensors(q=q, k_cache=k_cache)
    (q,) = validate.autocast(q)
    causal, head_dim_v = validate.flag("causal", causal), validate.whole("head_dim_v", head_dim_v)
    scale = validate.scale(softmax_scale)
    gradients.refuse(q, k_cache)
    if validate.flag("is_fp8_kvcache", is_fp8_kvcache):
        k_cache = _rows_of_bytes(k_cache)
    if indices is not None:
        lists, lengths = _lists(q, k_cache, indices, topk_length, causal)
        _check_columns(q, k_cache, head_dim_v)
        flops.tell()
        o, lse = mla_decode(q.flatten(0, 1)[:, None], k_cache, lists, lengths, head_dim_v, scale, causal, True)
        of_rows = q.shape[:2]
        return o.view(*of_rows, *o.shape[2:]), lse.view(*of_rows, -1).transpose(1, 2).contiguous()
    if topk_length is not None:
        raise UnsupportedProblemError("topk_length is given without indices: it says how many of these count")
    table = validate.tensor("block_table", block_table)
    dtype = torch.uint8 if is_fp8_kvcache else None
    cache = caches.cache_of(q, k_cache, k_cache, table, None, dtype)
    lengths = caches.lengths_of(validate.tensor("cache_seqlens", cache_seqlens), cache)
    caches.check_pages(cache, lengths)
    _check_columns(q, k_cache, head_dim_v)
    flops.tell()
    return mla_decode(q, k_cache, table, lengths, head_dim_v, scale, causal, False)


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes latents of tokens, (tokens, 512), and their rotated part, (tokens, 64), to slots of pages, in place.

    k_cache is (num_pages, page_size, 1, 656), of uint8, int8 or float8_e4m3fn, as `flash_mla_with_kvcache` reads it:
    128 columns of a latent have a scale, that of the largest of them. slot_mapping is (tokens,), int64: slot i is row
    i % page_size of page i // page_size; a token whose slot is negative is not written. No two tokens have one slot.
    Torch's operators do it, and wait for no GPU.

    Raises UnsupportedProblemError for tensors that do not go together.
    """
    kv_c, k_pe, k_cache = validate.tensors(kv_c=kv_c, k_pe=k_pe, k_cache=k_cache)
    gradients.refuse(kv_c, k_pe)
    rows, tokens = _rows_of_bytes(k_cache), kv_c.shape[0]
    for name, x, columns in (("kv_c", kv_c, latent_rows.LATENT), ("k_pe", k_pe, latent_rows.ROTATED)):
        validate.shaped(name, x, (tokens, columns), kv_c.dtype, rows.device)
    validate.shaped("slot_mapping", slot_mapping, (tokens,), torch.int64, rows.device)
    if validate.can_look_at(slot_mapping) and (slot_mapping >= rows.shape[0] * rows.shape[1]).any():
        raise UnsupportedProblemError(
            f"slot_mapping goes to {int(slot_mapping.max())}; the cache has {rows.shape[0] * rows.shape[1]} rows"
        )
    if not tokens:
        return
    is_written = slot_mapping >= 0  # the others write what the first one of these does, or what is there
    token = torch.where(is_written, torch.arange(tokens, device=rows.device), is_written.int().argmax())
    slots = slot_mapping[token].clamp(min=0)
    place = (slots // rows.shape[1], slots % rows.shape[1], torch.zeros_like(slots))
    rows.index_put_(place, torch.where(is_written.any(), latent_rows.to_bytes(kv_c, k_pe)[token], rows[place]))


def _rows_of_bytes(k_cache: torch.Tensor) -> torch.Tensor:
    """The same in uint8. UnsupportedProblemError for what are no rows of 656 bytes."""
    if k_cache.dtype not in latent_rows.DTYPES or k_cache.dim() != 4 or k_cache.shape[3] != latent_rows.ROW_BYTES:
        raise UnsupportedProblemError(
            f"k_cache is {tuple(k_cache.shape)} {k_cache.dtype}; rows of 8-bit floats are (num_pages, page_size, "
            f"heads_k, {latent_rows.ROW_BYTES}) of {listing(latent_rows.DTYPES)}"
        )
    return k_cache.view(torch.uint8)


def _lists(
    q: torch.Tensor, k_cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of all rows of q, (batch * seqlen_q, topk), and how long they are. UnsupportedProblemError for others."""
    if q.dim() != 4:
        raise validate.misshapen("q", q, validate.BATCH)
    if causal:
        raise UnsupportedProblemError("causal=True with indices: a list says which keys a row sees")
    of_q = tuple(q.shape[:2])
    validate.like(
        "indices",
        indices,
        lambda shape: len(shape) == 3 and not validate.differ(shape[:2], of_q),
        torch.int32,
        q.device,
        f"with q it is ({of_q[0]}, {of_q[1]}, topk)",
    )
    if k_cache.dim() != 4 or k_cache.shape[2] != 1 or k_cache.device != q.device:
        raise UnsupportedProblemError(
            f"k_cache is {tuple(k_cache.shape)} on {k_cache.device}; with indices it is (num_pages, page_size, 1, "
            f"columns) on {q.device}"
        )
    if k_cache.dtype not in (q.dtype, torch.uint8):
        raise UnsupportedProblemError(f"k_cache is {k_cache.dtype} on {k_cache.device}; like q it should be {q.dtype}")
    topk = indices.shape[2]
    lengths = torch.full((of_q[0],), topk, dtype=torch.int32, device=q.device)
    if topk_length is not None:
        lengths = caches.numbers("topk_length", topk_length, of_q[0], q.device, topk, "lists have")
    return indices.flatten(0, 1), lengths[:, None].expand(of_q).flatten()  # of one row each, no copy


def _refuse(options: dict[str, Any]) -> None:
    """UnsupportedProblemError for FlashMLA's options that ask for what kernels have not; TypeError for unknown ones."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"{name} is no argument of FlashMLA's: {', '.join(_OPTIONS)}")
        if value is not None and value is not False:
            raise UnsupportedProblemError(f"{name} is given: kernels here have no {_OPTIONS[name]}")


def _check_columns(q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int) -> None:
    """Raises UnsupportedProblemError for other numbers of columns than kernels take."""
    of_q, of_k = q.shape[3], k_cache.shape[3]
    if k_cache.dtype == torch.uint8:
        known, meant = [COLUMNS[0]], HEAD_DIM
    else:
        known, meant = list(COLUMNS), of_k
    if of_q != meant or (of_q, head_dim_v) not in known:
        wanted = " or ".join(f"{k}, {latent_rows.ROW_BYTES if meant != of_k else k} and {v}" for k, v in known)
        raise UnsupportedProblemError(
            f"q has {of_q} columns, k_cache {of_k}, and head_dim_v={head_dim_v}; kernels take {wanted}"
        )
