"""flash-attn's functions by name, signature and result (flash_attn/flash_attn_interface.py of 2.8): a changed import.

What kernels here do not do is refused by the name of its argument. All have gradients but for
`alibi_slopes`.
"""

from __future__ import annotations

import torch

from flashladder.common.api import attention, validate
from flashladder.common.api.packed import packed_attention
from flashladder.common.api.paged import paged_attention
from flashladder.common.errors import UnsupportedProblemError

_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = validate.ALL,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> _Result:
    """`attention` under flash-attn's name: q is (batch, seqlen_q, heads, head_dim), k and v have seqlen_k and heads_k.

    s_aux, (heads,), are attention sinks, by the name that flash-attn's kernels for Hopper have for them.
    `window_size`, also as a tensor of two, counts keys to the left and right of a query's own, -1 all. `deterministic`
    changes nothing in the forward pass, which always is; with it gradients have the same bits each time.
    With `return_attn_probs` it returns (out, softmax_lse, S_dmask): the log-sum-exp, (batch, heads, seqlen_q), and, as
    without dropout in flash-attn, no probabilities (0 elements). Of a row that sees no key softmax_lse is -inf;
    flash-attn says +inf. Under a causal mask flash-attn adds slope * j for ALiBi, so that
    its softmax_lse is larger by slope * (i + seqlen_k - seqlen_q); ours is of the scores that both document.

    With dropout no probabilities are kept: `dropout_mask` gives the mask, and return_attn_probs is refused. dropout_p
    is rounded to 1/256, and 1 / (1 - p) is that of the rounded p: with p up to 0.5 flash-attn's differs by up to 0.4 %.

    Raises UnsupportedProblemError for that, and what `attention` refuses.
    """
    q, k, v = validate.tensors(q=q, k=k, v=v)
    causal, return_lse = validate.flag("causal", causal), validate.flag("return_attn_probs", return_attn_probs)
    _refuse_probabilities(return_attn_probs, dropout_p)
    causal, window = validate.mask(causal, window_size, k.shape[1] if k.dim() == 4 else 0)
    result = attention(
        q,
        k,
        v,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=validate.softcap(softcap),
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    return _returned(result)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = validate.ALL,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_func` of kv (batch, seqlen_k, 2, heads_k, head_dim), which is not copied."""
    k, v = _unpacked("kv", kv, "(batch, seqlen_k, 2, heads_k, head_dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = validate.ALL,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim), which is not copied."""
    q, k, v = _unpacked("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = validate.ALL,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
) -> _Result:
    """`packed_attention` under flash-attn's name: q is (total_q, heads, head_dim), k and v have total_k and heads_k.

    The options are those of `flash_attn_func`; softmax_lse is (heads, total_q). s_aux, (heads,), are attention sinks.

    With a block_table, (sequences, max_pages), k and v are pages, (num_pages, page_size, heads_k, head_dim), with any
    strides that are multiples of 16 bytes. They are read as they lie, and where all lies on a GPU nothing waits for it:
    lengths and tables, int32 or int64, are read there alone. seqused_k, (sequences,), says how many keys each sequence
    has, and cu_seqlens_k is left at None; or cu_seqlens_k does. With seqused_q, (sequences,), each has only its first
    seqused_q rows, and the rows behind them see no key; q is copied then, and so is O. O goes to `out` where that is
    given. Rows behind the last sequence, and those that see no key, have O = 0 and a log-sum-exp of -inf, or the sink.
    Entries of the table behind a sequence's keys are never read. A length beyond the table counts as its end, and a
    page that is none as the last one; on the CPU both are refused. There is no dropout then, and no gradient. Pages may
    be 8-bit floats, with k_descale and v_descale as `flash_attn_with_kvcache` takes them, and a head_dim that is a
    multiple of 16. Long keys of few rows are cut into parts that are computed at the same time. With num_splits=1 none
    are, and a row's bits depend on nothing else in the batch.

    Raises UnsupportedProblemError for seqused_q, seqused_k, scales, num_splits and `out` without a block_table, and
    what `packed_attention` refuses.
    """
    q, k, v = validate.tensors(q=q, k=k, v=v)
    causal, return_lse = validate.flag("causal", causal), validate.flag("return_attn_probs", return_attn_probs)
    _refuse_probabilities(return_attn_probs, dropout_p)
    if block_table is not None:
        if validate.probability("dropout_p", dropout_p):
            raise UnsupportedProblemError(
                f"dropout_p={dropout_p} with a block_table: over pages no weights are dropped"
            )
        validate.flag("deterministic", deterministic)
        result = paged_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            block_table,
            max_seqlen_q,
            max_seqlen_k,
            causal=causal,
            softmax_scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=s_aux,
            k_descale=k_descale,
            v_descale=v_descale,
            num_splits=num_splits,
            out=out,
        )
        return _returned(result) if return_lse else result[0]
    of_pages = {
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "out": out,
    }
    for name, value in {**of_pages, "num_splits": num_splits or None}.items():
        if value is not None:
            raise UnsupportedProblemError(f"{name} is given, but no block_table: without pages kernels take none")
    if cu_seqlens_k is None:
        raise UnsupportedProblemError(
            "cu_seqlens_k is None, but no block_table is given: where do keys of a sequence begin"
        )
    causal, window = validate.mask(causal, window_size, validate.rows("max_seqlen_k", max_seqlen_k))
    return _returned(
        packed_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            causal=causal,
            window=window,
            softmax_scale=softmax_scale,
            softcap=validate.softcap(softcap),
            alibi_slopes=alibi_slopes,
            sinks=s_aux,
            dropout_p=dropout_p,
            deterministic=deterministic,
            return_lse=return_lse,
        )
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = validate.ALL,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_varlen_func` of kv (total_k, 2, heads_k, head_dim), which is not copied."""
    k, v = _unpacked("kv", kv, "(total_k, 2, heads_k, head_dim)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = validate.ALL,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """`flash_attn_varlen_func` of qkv (total, 3, heads, head_dim), which is not copied."""
    q, k, v = _unpacked("qkv", qkv, "(total, 3, heads, head_dim)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _unpacked(name: str, tensor: torch.Tensor, layout: str) -> tuple[torch.Tensor, ...]:
    """Views of what lies in a tensor side by side."""
    tensor = validate.tensor(name, tensor)
    if tensor.dim() != layout.count(",") + 1 or tensor.shape[-3] != len(name):
        raise UnsupportedProblemError(f"{name} has shape {tuple(tensor.shape)}; it should be {layout}")
    return tensor.unbind(-3)


def _refuse_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    """With dropout flash-attn returns them, and the mask in their signs."""
    if validate.number("dropout_p", dropout_p) and return_attn_probs:
        raise UnsupportedProblemError(
            f"return_attn_probs with dropout_p={dropout_p}: kernels keep no probabilities; flashladder.dropout_mask "
            "gives the mask of a call"
        )


def _returned(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> _Result:
    """As flash-attn without dropout does, whose S_dmask is then empty."""
    return (*result, result[0].new_empty(0)) if isinstance(result, tuple) else result
