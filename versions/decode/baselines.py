"""Other people's kernels for decode: FlashAttention-2 as torch ships it, its own package, FlashAttention-3, cuDNN.

What torch ships knows no lengths on the device: it takes problems whose sequences fill the cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashladder.common.measure.baselines import Baseline, CpuBaseline, RunOnce, by_name
from flashladder.common.measure.baselines.forward import BASELINES as OF_FORWARD
from flashladder.common.measure.baselines.forward import Output
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem


def _takes_full_caches(problem: Problem) -> str | None:
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


def _with_kvcache(table: str, module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """flash_attn_with_kvcache; `table` is its name for a block table."""
    caches = tensors.q, tensors.k_cache, tensors.v_cache
    options = {
        "cache_seqlens": tensors.cache_seqlens,
        "softmax_scale": problem.softmax_scale,
        "causal": problem.causal,
        "num_splits": problem.num_splits,
    }
    if problem.paged:
        options[table] = tensors.block_table

    def run() -> Output:
        return Output(module.flash_attn_with_kvcache(*caches, **options))

    return run


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
    ),
    _baseline(
        name="fa3",
        title="FlashAttention-3",
        module="flash_attn_interface",
        package="flash_attn_3",
        install=OF_FORWARD["fa3"].install,
        bind=partial(_with_kvcache, "page_table"),
        arches=(9,),
    ),
)
ON_CPU = by_name(
    CpuBaseline(
        "decode", "sdpa", "scaled_dot_product_attention (torch)", "torch", "torch", "", _sdpa, _takes_full_caches
    )
)
