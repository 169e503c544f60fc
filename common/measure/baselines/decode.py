"""Other people's kernels for decode: FlashAttention-2 as torch ships it, its own package, FlashAttention-3, cuDNN,
FlashInfer.

What torch ships knows no lengths on the device: it takes problems whose sequences fill the cache.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from flashladder.common.measure.baselines import Baseline, CpuBaseline, RunOnce, by_name
from flashladder.common.measure.baselines.forward import BASELINES as OF_FORWARD
from flashladder.common.measure.baselines.forward import Output
from flashladder.common.problem.config import listing
from flashladder.common.problem.decode_sizes import seqlens_q
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem


def _takes_plain_rows(problem: Problem) -> str | None:
    if problem.tree:
        return "is asked for no draft trees here"
    return "is asked for no 8-bit caches here" if problem.fp8_cache else None


def _takes_a_batch(problem: Problem) -> str | None:
    if reason := _takes_plain_rows(problem):
        return reason
    return "is asked for no rows that lie one behind the other here" if problem.packed_q else None


def _takes_full_caches(problem: Problem) -> str | None:
    if reason := _takes_a_batch(problem):
        return reason
    if problem.paged:
        return "reads no pages"
    if any(length != problem.seqlen_k for length in problem.seqlens_k):
        return "knows no lengths but that of the cache"
    return "has its causal mask at the top left" if problem.causal and problem.seqlen_q > 1 else None


def _torch_flash(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = tensors.q, tensors.k_cache, tensors.v_cache
    kernel, scale = torch.ops.aten._flash_attention_forward.default, problem.softmax_scale

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale)
        return Output(o, lse)

    return run


def _torch_cudnn(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = (tensor.transpose(1, 2) for tensor in (tensors.q, tensors.k_cache, tensors.v_cache))
    kernel, scale = torch.ops.aten._scaled_dot_product_cudnn_attention.default, problem.softmax_scale

    def run() -> Output:
        return Output(kernel(q, k, v, None, False, 0.0, False, False, scale=scale)[0].transpose(1, 2))

    return run


def _sdpa(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = (tensor.transpose(1, 2) for tensor in (tensors.q, tensors.k_cache, tensors.v_cache))

    def run() -> Output:
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=problem.softmax_scale, enable_gqa=True)
        return Output(o.transpose(1, 2))

    return run


def _flash_3(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """flash_attn_with_kvcache; or `fwd(q, k, v, ...)` of packed q, where a module has kernels for lengths alone."""
    if not (fwd := getattr(module, "fwd", None)):
        return _with_kvcache("page_table", module, problem, tensors)
    starts = [0, *itertools.accumulate(seqlens_q(problem))]
    options = {
        "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device=tensors.q.device),
        "max_seqlen_q": max(seqlens_q(problem)),
        "seqused_k": tensors.cache_seqlens,
        "max_seqlen_k": problem.seqlen_k,
        "block_table": tensors.block_table if problem.paged else None,
        "softmax_scale": problem.softmax_scale,
        "causal": problem.causal,
        "num_splits": problem.num_splits,
    }
    q = tensors.q.flatten(0, 1)
    return lambda: Output(fwd(q, tensors.k_cache, tensors.v_cache, **options)[0].view_as(tensors.o))


def _with_kvcache(table: str, module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """flash_attn_with_kvcache; `table` is its name for a block table."""
    q = tensors.q[0] if problem.packed_q else tensors.q
    caches = q, tensors.k_cache, tensors.v_cache
    options = {
        "cache_seqlens": tensors.cache_seqlens,
        "softmax_scale": problem.softmax_scale,
        "causal": problem.causal,
        "num_splits": problem.num_splits,
    }
    if problem.paged:
        options[table] = tensors.block_table
    if problem.packed_q:
        options |= {"cu_seqlens_q": tensors.cu_seqlens_q, "max_seqlen_q": max(seqlens_q(problem))}

    def run() -> Output:
        return Output(module.flash_attn_with_kvcache(*caches, **options).view_as(tensors.o))

    return run


def _takes_one_row_or_packed_ones(problem: Problem) -> str | None:
    if reason := _takes_plain_rows(problem):
        return reason
    if problem.packed_q and not problem.paged:
        return "reads packed rows' keys in pages alone"
    if problem.seqlen_q > 1 and not problem.packed_q:
        return f"reads one row a sequence, not {problem.seqlen_q}"
    if not problem.paged and problem.seqlen_k % _PAGE:
        return f"reads a cache in one piece as pages of {_PAGE} keys; seqlen_k={problem.seqlen_k} is no multiple"
    if problem.layout != "bshd":
        return f"takes contiguous tensors, not the layout {problem.layout}"
    if problem.head_dim not in _FLASHINFER_COLUMNS:
        return f"takes head_dim {listing(_FLASHINFER_COLUMNS)}, not {problem.head_dim}"
    return "takes no empty sequence" if 0 in problem.seqlens_k else None


def _flashinfer(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Its plan, which the host makes of the lengths, is no part of a run."""
    lengths, k, v = tensors.cache_seqlens, tensors.k_cache, tensors.v_cache
    if problem.paged:
        size, table = problem.page_size, tensors.block_table
    else:
        size = _PAGE
        k, v = (cache.view(-1, size, *cache.shape[2:]) for cache in (k, v))
        table = torch.arange(len(k), dtype=torch.int32, device=k.device).view(problem.batch, -1)
    pages = (lengths + size - 1) // size
    ends = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    used = torch.arange(table.shape[1], device=k.device) < pages[:, None]
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=k.device)
    cache = ends, table[used], lengths - (pages - 1) * size
    heads = problem.num_heads, problem.num_heads_k, problem.head_dim, size
    options = {"q_data_type": tensors.q.dtype, "kv_data_type": k.dtype, "sm_scale": problem.softmax_scale}
    if problem.packed_q:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(tensors.cu_seqlens_q, *cache, *heads, causal=problem.causal, **options)
    else:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*cache, *heads, **options)
    q = tensors.q.flatten(0, 1)
    return lambda: Output(wrapper.run(q, (k, v)).view_as(tensors.o))  # its LSE is in log2


_PAGE = 64
_FLASHINFER_COLUMNS = (64, 128, 256)
_baseline = partial(Baseline, "decode")
_OF_TORCH = ("torch", "torch", OF_FORWARD["fa2"].install)
BASELINES = by_name(
    _baseline("fa2", OF_FORWARD["fa2"].title, *_OF_TORCH, _torch_flash, _takes_full_caches),
    _baseline(
        name="cudnn",
        title=OF_FORWARD["cudnn"].title,
        module="torch",
        package="cudnn",
        install=OF_FORWARD["cudnn"].install,
        bind=_torch_cudnn,
        refuses=_takes_full_caches,
    ),
    _baseline(
        name="flash-attn",
        title="FlashAttention-2",
        module="flash_attn",
        package="flash-attn",
        install=OF_FORWARD["flash-attn"].install,
        bind=partial(_with_kvcache, "block_table"),
        refuses=_takes_a_batch,
    ),
    _baseline(
        name="fa3",
        title="FlashAttention-3",
        module="flash_attn_interface",
        package="flash_attn_3",
        install=OF_FORWARD["fa3"].install,
        bind=_flash_3,
        refuses=_takes_plain_rows,
        arches=(9,),
    ),
    _baseline(
        name="flashinfer",
        title=OF_FORWARD["flashinfer"].title,
        module="flashinfer",
        package="flashinfer-python",
        install=OF_FORWARD["flashinfer"].install,
        bind=_flashinfer,
        refuses=_takes_one_row_or_packed_ones,
    ),
)
ON_CPU = by_name(
    CpuBaseline(
        "decode", "sdpa", "scaled_dot_product_attention (torch)", "torch", "torch", "", _sdpa, _takes_full_caches
    )
)
