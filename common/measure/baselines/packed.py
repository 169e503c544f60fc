"""Other people's kernels for packed sequences: FlashAttention-2 as torch ships it, FlashAttention-3 and -4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashladder.common.measure.baselines import Baseline, RunOnce, by_name, forward
from flashladder.common.measure.baselines.forward import Output, options_of, options_of_packed, sinks_for_4
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.operations import packed
from flashladder.common.problem.problem import Problem


def _flash_packed(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Without an LSE: torch's is laid out as its FlashAttention-2 has it."""
    q, k, v = tensors.q[0], tensors.k[0], tensors.v[0]
    kernel = torch.ops.aten._flash_attention_forward.default
    starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k)
    causal, scale = problem.causal, problem.softmax_scale

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, *starts, 0.0, causal, False, scale=scale)
        return Output(o[None], lse)

    return run


def _flash_3_packed(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Its varlen function; or `fwd(q, k, v, ...)`, where a module has kernels for lengths alone."""
    q, k, v = tensors.q[0], tensors.k[0], tensors.v[0]
    options = options_of_packed(problem, tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    if fwd := getattr(module, "fwd", None):
        return lambda: Output(fwd(q, k, v, **options)[0][None])
    return lambda: Output(module.flash_attn_varlen_func(q, k, v, **options)[None])


def _flash_4_packed(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = tensors.q[0], tensors.k[0], tensors.v[0]
    starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    longest = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    options = {**options_of(problem, None), **sinks_for_4(problem, tensors), **longest, "return_lse": True}

    def run() -> Output:
        return Output(module.flash_attn_varlen_func(q, k, v, None, *starts, **options)[0][None])

    return run


_NAME = packed.OPERATION.name
_FA3 = replace(
    forward.BASELINES["fa3"],
    title="FlashAttention-3 of packed sequences",
    bind=_flash_3_packed,
    operation=_NAME,
    bounds=(),
)
_FA4 = replace(
    forward.BASELINES["fa4"], title="FlashAttention-4 of packed sequences", bind=_flash_4_packed, operation=_NAME
)
_TITLE = "FlashAttention-2 of packed sequences (torch)"
BASELINES = by_name(Baseline(_NAME, "fa2", _TITLE, "torch", "torch", "pip install torch", _flash_packed), _FA3, _FA4)
