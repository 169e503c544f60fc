"""Other people's kernels for packed sequences: FlashAttention-2 as torch ships it, and FlashAttention-3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashladder.common.measure.baselines import Baseline, RunOnce, by_name, forward
from flashladder.common.measure.baselines.forward import Output
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
    q, k, v = tensors.q[0], tensors.k[0], tensors.v[0]
    starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k)
    options = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}

    def run() -> Output:
        return Output(module.flash_attn_varlen_func(q, k, v, *starts, **options)[None])

    return run


_NAME = packed.OPERATION.name
_FA3 = replace(
    forward.BASELINES["fa3"],
    title="FlashAttention-3 of packed sequences",
    bind=_flash_3_packed,
    operation=_NAME,
    bounds=(),
)
_TITLE = "FlashAttention-2 of packed sequences (torch)"
BASELINES = by_name(Baseline(_NAME, "fa2", _TITLE, "torch", "torch", "pip install torch", _flash_packed), _FA3)
