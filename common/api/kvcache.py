"""Decode under flash-attn's name: rows of Q against a cache of keys and values that lies in one piece or in pages.

A cache has room for more keys than it holds; how many it holds, the GPU knows. Nothing here waits for the GPU, and no
kernel reads outside of the cache, whatever lengths and tables say.
"""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import caches, gradients, mla, operator, sequences, validate
from flashladder.common.api import step as steps
from flashladder.common.api.rotary import rotary_of
from flashladder.common.api.step import Call, Step
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.rotary import Rotary
from flashladder.common.runtime import ready

MOST_SPLITS = 256


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = validate.ALL,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    s_aux: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    qv: None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, (batch, seqlen_q, heads, head_dim), over the first cache_seqlens keys of each sequence.

    With cu_seqlens_q, (batch + 1), int32, q is (total_q, heads, head_dim), each sequence's max_seqlen_q rows behind
    those before; so are O and, (heads, total_q), the log-sum-exp. Numbers of rows that differ are refused:
    `flash_attn_varlen_func` takes them. Where q has four dimensions they say how many rows there are, and a
    max_seqlen_q is not read, as in flash-attn: transformers gives one. O is written to `out` if that is given, memory
    like O of any strides.

    k_cache and v_cache are (batch, seqlen, heads_k, head_dim); or, with a block_table (batch, max_pages) of int32,
    pages (num_pages, page_size, heads_k, head_dim) of any size. Entries of the table behind a sequence's keys may be
    anything. cache_seqlens is (batch), int32, or one number for all; None: all that there is room for. With
    cache_batch_idx, (batch), int32, the cache may have more sequences than q, and they are q's in this order. Of each
    sequence the first cache_leftpad keys, (batch), int32, are not seen.

    New keys `k` and `v`, (batch, seqlen_new, heads_k, head_dim), are first written behind the cached ones, in place,
    and count as cached. With rotary_cos and rotary_sin, (positions, columns / 2), they and q are turned before. New
    keys have the positions from cache_seqlens on. So have rows of q with a causal mask or a window; else all rows have
    the first of these. The tables have a position for each key that there is room for, at least; q may have rows beyond
    it, where it has more rows than there are new keys. A row beyond the last of the positions turns as that one. Where
    there are new keys, each cache has memory that no other tensor of the call has. There may be none of them, no rows,
    no sequences and no room.

    The caches may be 8-bit floats, torch.float8_e4m3fn, where q is of 16 bits. A number in them means itself times its
    scale: k_descale and v_descale, fp32, positive. They are (batch, heads_k) or (1, heads_k), of heads; (1,), or a
    number, of the whole cache; or (num_pages, 1, heads_k, 1), of pages; None: 1. The products are those of 16 bits, as
    which these floats are exact. New keys are rounded to them; what is beyond 448 scales becomes that. On a GPU such
    caches need Hopper.

    `causal` is aligned to the end: the last row sees all keys. So are windows, which count keys to the left and right
    of a row's own (-1: all), and ALiBi. Keys are cut into `num_splits` parts, which are computed at the same time; 0:
    as the sizes of q and of the cache suggest. With a number, a row's bits depend on nothing else in the batch. Returns
    O, and with `return_softmax_lse` the log-sum-exp, (batch, heads, seqlen_q), fp32. A row that sees no key has O = 0
    and -inf. With sinks `s_aux`, (heads,), fp32, bf16 or fp16, exp(sink) of its head joins the sum of each row, and the
    log-sum-exp has it; that of a row that sees no key is the sink.

    With a `tree_mask`, (batch, seqlen_q), int32, rows are up to 32 tokens of a draft tree, each behind its parent, and
    the last keys are theirs. Bit i of a row's mask is set if it sees the key of row i; `flashladder.tree_mask` makes
    masks of parents. It takes a causal mask, and no rotary embeddings. Windows and ALiBi count keys as they lie.

    The caches have strides that are multiples of 16 bytes, and the last is 1; others are refused. q, k and v may have
    any strides: they are copied where need be.

    head_dim is 64, 96, 128 or 256. With another one, up to 256, each call copies the caches, with zeros behind their
    columns, and O and new keys are copied back. It is 512 where k_cache and v_cache are one tensor of one head, as of
    Gemma 4's global layers; such a call takes lengths, pages, a causal mask and a scale, and no 8-bit floats. Under
    torch.compile k_cache has to be v_cache, and not another view of it.

    A length beyond the room counts as the room, and a page that is none is read as the last one, and not written to:
    what comes of either means nothing, but nothing outside is read or written. Under torch.autocast q, new keys and
    tables are cast to its type where one of them is of fp32; caches are not. Forward only. After a first call a CUDA
    graph may capture it.

    Raises UnsupportedProblemError for tensors that do not go together, for caches that share memory with each other or
    with new keys where these are written, for rotary embeddings without k and v, and for a `qv`.
    """
    if qv is not None:
        raise UnsupportedProblemError("qv is given, which is of latents: flash_mla_with_kvcache takes them, with q")
    is_packed = cu_seqlens_q is not None or (max_seqlen_q is not None and validate.tensor("q", q).dim() == 3)
    if is_packed:
        q, out = sequences.of_equal_lengths(q, out, cu_seqlens_q, max_seqlen_q)
    given = causal, softmax_scale, window_size, softcap, rotary_interleaved, num_splits
    if (cpp := operator.in_cpp()) and cache_batch_idx is None and isinstance(cache_seqlens, torch.Tensor):
        tensors: tuple[Any, ...] = q, k_cache, v_cache, cache_seqlens, block_table, cache_leftpad, tree_mask
        tensors += alibi_slopes, s_aux, k_descale, v_descale, k, v, rotary_cos, rotary_sin
        if out is None:
            outputs = cpp.remembered(operator.onlookers, steps.planned, tensors, given, return_softmax_lse)
        else:
            outputs = steps.launch_into(out, cpp, tensors, given, return_softmax_lse)
        if outputs is not None:
            return sequences.flat(outputs) if is_packed else outputs
    q, k, v, rotary_cos, rotary_sin = validate.floats(q=q, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    k_cache, v_cache = validate.tensors(k_cache=k_cache, v_cache=v_cache)
    causal = validate.flag("causal", causal)
    return_softmax_lse = validate.flag("return_softmax_lse", return_softmax_lse)
    rotary_interleaved = validate.flag("rotary_interleaved", rotary_interleaved)
    splits = validate.whole("num_splits", num_splits)
    if validate.surely(splits < 0) or validate.surely(splits > MOST_SPLITS):
        raise UnsupportedProblemError(f"num_splits={splits}: must be 0, for as many as suit, or up to {MOST_SPLITS}")
    scale = validate.scale(softmax_scale)
    gradients.refuse(q, k_cache, v_cache)
    fp8 = FP8 if k_cache.dtype == FP8 else None
    cache = caches.cache_of(q, k_cache, v_cache, block_table, cache_batch_idx, fp8)
    cache = caches.scaled(cache, k_descale, v_descale)
    if out is not None and validate.has_memory(validate.tensor("out", out)):
        ready.check_out(out, q, v_cache.shape[3])
    lengths = caches.lengths_of(cache_seqlens, cache)
    if cache_leftpad is not None:
        cache_leftpad = caches.numbers_of("cache_leftpad", cache_leftpad, cache)
    if not validate.is_same(window_size, validate.ALL):
        window_size = validate.pair("window_size", window_size, -1)
    is_causal, window = validate.mask(causal, window_size, caches.room_of(cache))
    left, right = validate.window(window, is_causal)
    rotary: Rotary | None = None
    if rotary_cos is not None or rotary_sin is not None:
        rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, q, caches.room_of(cache))
    new: dict[str, Any] = {}
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise UnsupportedProblemError("k and v are given, but no cache_seqlens: how many keys are there already")
        k, v = caches.new_keys(k, v, q, cache, lengths)
        new = {} if validate.surely(k.numel() == 0) else steps.written(k, v, rotary)
    elif rotary:
        raise UnsupportedProblemError("rotary_cos is given, but no k and v: keys in the cache are turned already")
    if validate.can_look_at(lengths):
        behind = lengths if k is None else lengths + k.shape[1]
        caches.check_pages(cache, lengths, caches.first_seen(behind, q.shape[1], left, cache_leftpad))
    softcap = validate.softcap(softcap)
    if mla.is_one_tensor(cache):
        beside = {
            "k and v": k,
            "cache_leftpad": cache_leftpad,
            "window_size": None if left is right is None else window_size,
            "softcap": softcap or None,
            "alibi_slopes": alibi_slopes,
            "s_aux": s_aux,
            "tree_mask": tree_mask,
            "cu_seqlens_q": cu_seqlens_q,
            "num_splits": splits or None,
            "k_descale": cache.k_descale,
        }
        if given_too := [name for name, value in beside.items() if value is not None]:
            raise UnsupportedProblemError(
                f"a cache of 512 columns that is K and V takes no {listing(given_too)}: lengths, pages, "
                "causal=True and a softmax_scale are all it takes"
            )
        outputs = mla.decode_of_one_tensor(q, cache, lengths, scale, is_causal)
        outputs = (outputs[0] if out is None else out.copy_(outputs[0]), outputs[1])
        return outputs if return_softmax_lse else outputs[0]
    validated = causal, scale, window_size, softcap, rotary_interleaved, splits
    outputs = steps.computed(
        Call(out, return_softmax_lse, rotary, (given, validated)),
        q,
        *cache,
        lengths,
        cache_leftpad,
        None if alibi_slopes is None else validate.slopes(alibi_slopes, q.device, q.shape[0], q.shape[2]),
        None if s_aux is None else validate.sinks(s_aux, q.device, q.shape[2], "s_aux"),
        None if tree_mask is None else caches.tree_of(tree_mask, q),
        causal=is_causal,
        softmax_scale=scale,
        window_left=left,
        window_right=right,
        softcap=softcap,
        num_splits=splits,
        **new,
    )
    return sequences.flat(outputs) if is_packed else outputs


def make_ready(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, softcap: float) -> None:
    """Has made ready what a row of each sequence against such caches, in one piece, runs."""
    cache = caches.cache_of(q, k_cache, v_cache, None, None)
    lengths = caches.lengths_of(None, cache)
    step = Step(q[:, :1], *cache, lengths, causal=True, softcap=softcap)
    ready.ready_for(step.problem, q.device)
