"""Backward attention: the gradients dQ, dK and dV of Q, K and V, given dO, that of O.

P = exp(softmax_scale * Q K^T - LSE)         dV = P^T dO         dP = dO V^T
dS = P * (dP - rowsum(dO * O))               dQ = softmax_scale * dS K      dK = softmax_scale * dS^T Q

With dropout, P of dV and dP are 0 where a weight is dropped, and larger elsewhere, as P of O is; P of dS is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from flashladder.common.problem.buffers import View, laid_out
from flashladder.common.problem.dropout import RNG_STATE
from flashladder.common.problem.operations import forward
from flashladder.common.problem.operations.forward import (
    Forward,
    WithDropout,
    full_precision_matmul,
    heads_of,
    kept,
    masked_scores,
    probabilities,
    row_blocks,
)
from flashladder.common.problem.problem import Operation, Problem

OF_FORWARD = 2.5  # five matrix products where the forward pass has two


class Backward(Forward):
    """q, k, v, o and lse are those of the forward pass; dout is like o, dq, dk and dv are like q, k and v."""

    name = "backward"
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o", "dout", "lse")
    outputs = ("dq", "dk", "dv")
    features = ("causal", "dropout_p")
    # Seconds on the emulator for a rung without tensor cores, too.
    small: ClassVar[Mapping[str, Any]] = {"batch": 1, "num_heads": 1, "seqlen_q": 128}
    signed_together = (("q", "k", "dq", "dk"), ("v", "o", "dout", "dv"))  # neither S nor dP changes

    def variant(self, problem: Problem) -> Operation:
        """Dropout has a random state."""
        return _WITH_DROPOUT if problem.dropout_p else OPERATION

    def flops(self, problem: Problem) -> float:
        """Of the five products, as wide as the two of the forward pass."""
        return OF_FORWARD * super().flops(problem)

    def block_flops(self, block_m: int, block_n: int, head_dim: int, head_dim_v: int) -> int:
        """Three products are as wide as K, two as V."""
        return 2 * block_m * block_n * (3 * head_dim + 2 * head_dim_v)

    def views(self, problem: Problem) -> list[dict[str, View]]:
        """Those of the forward pass; what is given and computed here has buffers of its own."""
        given = super().views(problem)
        shapes = {name: view.shape for views in given for name, view in views.items()}
        layout = "bshd" if problem.layout == forward.PACKED_INPUTS else problem.layout
        like = {"dout": "o", "dq": "q", "dk": "k", "dv": "v"}
        return [*given, *({name: _laid_out(layout, shapes[of])} for name, of in like.items())]

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Q, K and V as the family has them, O and LSE as they give, dO standard normal."""
        super().draw(problem, tensors, generator)
        dout = tensors["dout"]
        dout.copy_(torch.randn(dout.shape, generator=generator, device=generator.device))
        o, lse = forward.attention(problem, tensors, torch.float32)
        tensors["o"].copy_(o)
        tensors["lse"].copy_(lse)

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """What automatic differentiation of the textbook's formula gives; O and LSE are not looked at."""
        return gradients(problem, tensors, dtype)


def _laid_out(layout: str, shape: tuple[int, ...]) -> View:
    batch, seqlen, heads, columns = shape
    return laid_out(layout, (batch, seqlen, heads, columns))


def gradients(problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """dq, dk and dv with every intermediate in `dtype`; sums over rows are kept in fp32 at least, and rounded once."""
    p = problem
    made = {f"d{name}": torch.empty_like(tensors[name], dtype=dtype) for name in "qkv"}
    with full_precision_matmul():
        for batch in range(p.batch):
            q, k, v, dout = heads_of(p, tensors, ("q", "k", "v", "dout"), batch, dtype)
            wide = torch.promote_types(dtype, torch.float32)
            dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
            for rows in row_blocks(p):
                P = probabilities(masked_scores(p, tensors, batch, q[:, rows], k, rows))
                dP = kept(p, tensors, batch, rows, dout[:, rows] @ v.mT)
                dS = torch.ops.aten._softmax_backward_data(dP, P, -1, dtype)
                made["dq"][batch, rows] = (p.softmax_scale * (dS @ k)).transpose(0, 1)
                dk += p.softmax_scale * (dS.mT @ q[:, rows])
                dv += kept(p, tensors, batch, rows, P).mT @ dout[:, rows]
            for name, sums in (("dk", dk), ("dv", dv)):
                of_group = sums.unflatten(0, (p.num_heads_k, -1)).sum(1)
                made[name][batch] = of_group.transpose(0, 1)
    return made


class _WithDropout(WithDropout, Backward):
    inputs = (*Backward.inputs, RNG_STATE)


OPERATION = Backward()
_WITH_DROPOUT = _WithDropout()
