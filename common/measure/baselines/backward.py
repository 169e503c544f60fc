"""Other people's kernels for the backward pass, without what automatic differentiation costs around them. "Official" is
FlashAttention-2 as torch ships it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from flashladder.common.measure.baselines import Baseline, CpuBaseline, RunOnce, by_name
from flashladder.common.measure.baselines.forward import BASELINES as OF_FORWARD
from flashladder.common.problem.config import listing
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem


class Gradients(NamedTuple):
    """Like q, k and v: (batch, seqlen, heads, head_dim)."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def _takes_dense_tensors(problem: Problem) -> str | None:
    more = {"packed sequences": problem.packed, "gradient of the log-sum-exp": problem.dlse}
    unknown = [what for what, is_asked in more.items() if is_asked]
    return f"takes no {listing(unknown)}" if unknown else None


def _takes_plain_heads(problem: Problem) -> str | None:
    """torch's operators expand K and V before they are called."""
    grouped = None if problem.num_heads == problem.num_heads_k else "takes no grouped queries"
    return _takes_dense_tensors(problem) or grouped


def _takes_square_causal(problem: Problem) -> str | None:
    """Its causal masks are aligned to the top left."""
    unequal = problem.causal and problem.seqlen_q != problem.seqlen_k
    return _takes_plain_heads(problem) or ("takes no causal mask with seqlen_q != seqlen_k" if unequal else None)


def _heads_first(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors.by_name[name].transpose(1, 2) for name in ("dout", "q", "k", "v", "o")]


def _gradients(made: tuple[torch.Tensor, ...]) -> Gradients:
    dq, dk, dv = (tensor.transpose(1, 2) for tensor in made[:3])
    return Gradients(dq, dk, dv)


def _torch_flash(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    dout, q, k, v, o = _heads_first(tensors)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of no dropout
    sizes = (None, None, problem.seqlen_q, problem.seqlen_k, 0.0, problem.causal, seed, seed)

    def run() -> Gradients:
        return _gradients(kernel(dout, q, k, v, o, tensors.lse, *sizes, scale=problem.softmax_scale))

    return run


def _torch_cudnn(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    dout, q, k, v, o = _heads_first(tensors)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of no dropout
    sizes = (seed, seed, None, None, None, problem.seqlen_q, problem.seqlen_k, 0.0, problem.causal)

    def run() -> Gradients:
        lse = tensors.lse.unsqueeze(-1)
        return _gradients(kernel(dout, q, k, v, o, lse, *sizes, scale=problem.softmax_scale))

    return run


def _flash_attn_4(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """What its automatic differentiation calls."""
    forward = (tensors.q, tensors.k, tensors.v, tensors.o)
    options = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}

    def run() -> Gradients:
        return Gradients(*module._flash_attn_bwd(*forward, tensors.by_name["dout"], tensors.lse, **options)[:3])

    return run


def _torch_cpu(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    dout, q, k, v, o = _heads_first(tensors)

    def run() -> Gradients:
        return _gradients(kernel(dout, q, k, v, o, tensors.lse, 0.0, problem.causal, scale=problem.softmax_scale))

    return run


_TORCH = "pip install torch (a CUDA build)"
_baseline = partial(Baseline, "backward")
BASELINES = by_name(
    _baseline("fa2", "FlashAttention-2 (torch)", "torch", "torch", _TORCH, _torch_flash, _takes_square_causal),
    _baseline("cudnn", "cuDNN (torch)", "torch", "cudnn", _TORCH, _torch_cudnn, _takes_square_causal),
    _baseline(
        name="fa4",
        title=OF_FORWARD["fa4"].title,
        module="flash_attn.cute.interface",
        package=OF_FORWARD["fa4"].package,
        install=OF_FORWARD["fa4"].install,
        bind=_flash_attn_4,
        refuses=_takes_dense_tensors,
        arches=OF_FORWARD["fa4"].arches,
    ),
)
ON_CPU = by_name(
    CpuBaseline(
        "backward",
        "sdpa",
        "scaled_dot_product_attention (torch)",
        "torch",
        "torch",
        "",
        _torch_cpu,
        _takes_square_causal,
    )
)
