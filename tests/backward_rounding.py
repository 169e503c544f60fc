"""How far FlashAttention-2's own roundings lead from exact gradients: the bound where its rule says less."""

import math

import torch

from flashladder.common.problem.check import Expected, expect
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.operations.forward import full_precision_matmul
from flashladder.common.problem.problem import Problem


def bounded_by_flash_attention(task: Problem, tensors: Tensors) -> Expected:
    """The exact gradients of as many heads of Q as of K, each with FlashAttention's rule or twice those errors.

    Where those roundings overflow, nothing is promised.
    """
    expected = expect(task, tensors)
    for name, found in _as_flash_attention_rounds(task, tensors).items():
        error = (found - expected.exact[name]).abs().nan_to_num(nan=math.inf)
        expected.tolerances[name] = max(expected.tolerances[name], 2 * float(error.max()))
    return expected


def _as_flash_attention_rounds(task: Problem, tensors: Tensors) -> dict[str, torch.Tensor]:
    """P and dS are rounded, O comes rounded, all else is fp32."""
    q, k, v, o, dout = (tensors.by_name[name].float().transpose(1, 2) for name in ("q", "k", "v", "o", "dout"))
    dtype, scale = tensors.q.dtype, task.softmax_scale
    hidden = torch.ones(task.seqlen_q, task.seqlen_k, dtype=torch.bool, device=q.device).triu(1) & task.causal
    with full_precision_matmul():
        p = (scale * q @ k.mT - tensors.lse[..., None]).exp().masked_fill(hidden, 0)
        ds = (p * (dout @ v.mT - (dout * o).sum(-1, keepdim=True))).to(dtype).float()
        found = {"dq": scale * ds @ k, "dk": scale * ds.mT @ q, "dv": p.to(dtype).float().mT @ dout}
    return {name: x.to(dtype).double().transpose(1, 2) for name, x in found.items()}
