"""Backward attention: the gradients dQ, dK and dV of Q, K and V, given dO, that of O.

P = exp(softmax_scale * Q K^T - LSE)         dV = P^T dO         dP = dO V^T
dS = P * (dP - rowsum(dO * O))               dQ = softmax_scale * dS K      dK = softmax_scale * dS^T Q

With a softcap c, scores S become c * tanh(S / c), and dS has a factor of 1 - tanh(S / c)^2. Where LSE has a gradient
too, dS = P * (dP - rowsum(dO * O) + dLSE). Masks and ALiBi change P alone. Where an expression says what a score
becomes, dS has the derivative of that for a factor, and tensors that it reads may have gradients as well.

With dsinks, each row adds to the gradient of its head's sink, which has a share of the row's weights:
exp(sink - LSE) * (dLSE - rowsum(dO * O)).

With dropout, P of dV and dP are 0 where a weight is dropped, and larger elsewhere, as P of O is; P of dS is not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.expression import Mods
from flashladder.common.problem.buffers import INPUT, OUTPUT, Tensor, contiguous, laid_out
from flashladder.common.problem.config import listing
from flashladder.common.problem.dropout import RNG_STATE
from flashladder.common.problem.operations import forward, packed
from flashladder.common.problem.operations.forward import (
    SINKS,
    SLOPES,
    Forward,
    draw_sinks,
    full_precision_matmul,
    heads_of,
    kept,
    masked_scores,
    modified_scores,
    probabilities,
    row_blocks,
)
from flashladder.common.problem.operations.packed import STARTS, Packed
from flashladder.common.problem.options import Option
from flashladder.common.problem.problem import DETERMINISTIC, LSE, Operation, Problem

OF_FORWARD = 2.5  # five matrix products where the forward pass has two
DLSE, DSINKS = "dlse", "dsinks"
_INPUTS = ("q", "k", "v", "o", "dout", LSE, *STARTS, SLOPES, DLSE, SINKS, RNG_STATE)  # as kernels get those there are


class Backward(Forward):
    """q, k, v, o and lse are those of the forward pass; dout is like o, dq, dk and dv are like q, k and v. Packed
    sequences have cu_seqlens_q and cu_seqlens_k, ALiBi has its slopes, a gradient of lse is dlse, like lse, and
    dropout has rng_state. For the gradient of sinks there are these, (num_heads,) fp32, and dsinks, like lse. Of
    tensors that expressions read, gradients that are asked for are fp32, element after element."""

    name = "backward"
    features = tuple(name for name in Packed.features if name != "sinks")  # they are in LSE; for dQ, dK, dV that is all
    options = (
        Option(DLSE, bool, "the log-sum-exp has a gradient too", default=False),
        Option(DSINKS, bool, "the gradient of sinks is asked for too", default=False),
        Option("wants_dq", bool, "dQ is asked for", default=True),
        Option("wants_dkv", bool, "dK and dV are asked for", default=True),
        Option(DETERMINISTIC, bool, "each run gives the same bits", default=False),
    )
    sizes = Packed.sizes
    gone_through = "seqlen_q"
    # Seconds on the emulator for a rung without tensor cores, too.
    small: ClassVar[Mapping[str, Any]] = {"batch": 1, "num_heads": 1, "seqlen_q": 128}
    signed_together = (("q", "k", "dq", "dk"), ("v", "o", "dout", "dv"))  # neither S nor dP changes

    def families_of(self, problem: Problem) -> Collection[str]:
        """Those of the forward pass."""
        return _of_forward(problem).families

    def implied(self, problem: Problem) -> dict[str, Any]:
        """What the lengths of packed sequences say, and how expressions are spelled."""
        is_packed = problem.seqlens_q or problem.seqlens_k or problem.packed
        return packed.OPERATION.implied(problem) if is_packed else super().implied(problem)

    def check(self, problem: Problem) -> None:
        """Something is asked for. Gradients of tensors that expressions read are sums in any order."""
        super().check(problem)
        read = Mods.parse(problem.mods).gradients
        if not (problem.wants_dq or problem.wants_dkv or read):
            raise UnsupportedProblemError("wants_dq=false, wants_dkv=false: no gradient is asked for")
        if read and problem.deterministic:
            raise UnsupportedProblemError(
                f"deterministic=true: gradients of {listing(read)}, which a score reads, are summed in any order; ask "
                "for none of them, or leave deterministic out"
            )

    def argument(self, problem: Problem, name: str) -> Any:
        """Of all sequences together, whether they are packed or not."""
        if name in self.sizes and not problem.packed:
            return problem.batch * getattr(problem, name.replace("total", "seqlen"))
        for tensor, shape in zip(Mods.parse(problem.mods).tensors, problem.extents, strict=True):
            if name == tensor.count:
                return math.prod(shape)
        return super().argument(problem, name)

    def tolerance(self, problem: Problem, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> float:
        """Gradients of what expressions read are sums of large terms, which cancel out: of these fp32 leaves less."""
        found = super().tolerance(problem, name, exact, rounded)
        return 100 * found if name in _read(problem) else found

    def flops(self, problem: Problem) -> float:
        """Of the five products, as wide as the two of the forward pass."""
        return OF_FORWARD * _of_forward(problem).flops(problem)

    def block_flops(self, block_m: int, block_n: int, head_dim: int, head_dim_v: int) -> int:
        """Three products are as wide as K, two as V."""
        return 2 * block_m * block_n * (3 * head_dim + 2 * head_dim_v)

    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """Those of the forward pass; what is given and computed here has buffers of its own. dQ may be left out, or dK
        and dV."""
        p, of_forward = problem, _of_forward(problem).tensors(problem)
        found = {name: replace(tensor, role=INPUT, optional=False) for name, tensor in of_forward.items()}

        def like(name: str, **different: Any) -> Tensor:
            batch, seqlen, heads, columns = found[name].shape
            return Tensor(laid_out(p.layout, (batch, seqlen, heads, columns)), found[name].dtype, **different)

        found |= {"dout": like("o")} | ({DLSE: found[LSE]} if p.dlse else {})
        wanted = {"dq": p.wants_dq, "dk": p.wants_dkv, "dv": p.wants_dkv}
        outputs = {name: like(name[1], role=OUTPUT, optional=not is_wanted) for name, is_wanted in wanted.items()}
        if p.dsinks:
            found[SINKS] = Tensor(contiguous(p.num_heads), torch.float32)
            outputs[DSINKS] = replace(found[LSE], role=OUTPUT)
        inputs = (*_INPUTS, *(tensor.field for tensor in Mods.parse(p.mods).tensors))
        sums = {name: Tensor(found[of].view, torch.float32, OUTPUT) for name, of in _read(p).items()}
        return {name: found[name] for name in inputs if name in found} | outputs | sums

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """What the forward pass has as it draws it, O and LSE as it gives them, dO and dLSE standard normal."""
        of_forward = _of_forward(problem)
        of_forward.draw(problem, tensors, generator)
        if problem.dsinks:
            draw_sinks(tensors[SINKS], generator)
        for name in ("dout", *([DLSE] if problem.dlse else [])):
            tensor = tensors[name]
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=generator.device))
        self.settle(problem, tensors)

    def settle(self, problem: Problem, tensors: Mapping[str, torch.Tensor]) -> None:
        """O and LSE are those of the forward pass."""
        for name, values in _of_forward(problem).compute(problem, tensors, torch.float32).items():
            tensors[name].copy_(values)

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """What automatic differentiation of the textbook's formula gives; but for dsinks, LSE is not looked at."""
        return (_of_each_sequence if problem.packed else gradients)(problem, tensors, dtype)


def _of_forward(problem: Problem) -> Operation:
    """The forward pass of which a problem has the gradients."""
    return packed.OPERATION if problem.packed else forward.OPERATION


def gradients(
    problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, number: int = 0
) -> dict[str, torch.Tensor]:
    """dq, dk and dv, and gradients of what expressions read, with every intermediate in `dtype`; sums over rows are
    kept in fp32 at least, and rounded once.

    A dlse among the tensors is the gradient of the log-sum-exp. `number` is that of the first sequence, where dropout
    counts others before it. In 16 bits and with a softcap or a score O is taken as it is given. Their derivative
    differs from key to key, so what the rounding of O does to dQ does not cancel out, and no kernel can undo it. In
    gradients of what expressions read, which may be few and large sums, it shows most: for these O is always as given.
    """
    p = problem
    has_score = Mods.parse(p.mods).score is not None
    made = {f"d{name}": torch.empty_like(tensors[name], dtype=dtype) for name in "qkv"} | _no_sums(p, tensors, dtype)
    if SINKS in tensors:
        made[DSINKS] = torch.empty_like(tensors[LSE], dtype=dtype)
    with full_precision_matmul():
        for batch in range(p.batch):
            q, k, v, o, dout = heads_of(p, tensors, ("q", "k", "v", "o", "dout"), batch, dtype)
            wide = torch.promote_types(dtype, torch.float32)
            dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
            for rows in row_blocks(p):
                scores = masked_scores(p, tensors, batch, q[:, rows], k, rows)
                P = probabilities(modified_scores(p, tensors, number + batch, rows, scores)).to(dtype)
                dP = kept(p, tensors, number + batch, rows, dout[:, rows] @ v.mT)
                delta = (dout[:, rows].to(wide) * o[:, rows]).sum(-1, keepdim=True)
                dS = with_given_o = P * (dP.to(wide) - delta)
                if not (p.softcap or has_score) or wide == dtype:
                    dS = torch.ops.aten._softmax_backward_data(dP, P, -1, dtype)
                if DLSE in tensors:
                    of_lse = P * tensors[DLSE][batch, :, rows, None].to(dtype)
                    dS, with_given_o = dS + of_lse, with_given_o + of_lse
                dS = dS.to(dtype)
                if has_score:
                    dS, *of_read = _pulled_back(p, tensors, number + batch, rows, scores, dS, with_given_o)
                    for name, of_rows in zip(_read(p), of_read, strict=True):
                        made[name] += of_rows
                if p.softcap:
                    dS = dS * (1 - torch.tanh((q[:, rows] * p.softmax_scale) @ k.mT / p.softcap) ** 2)
                if SINKS in tensors:
                    pull = tensors[DLSE][batch, :, rows, None] - delta if DLSE in tensors else -delta
                    lse = tensors[LSE][batch, :, rows]
                    share = (tensors[SINKS][:, None] - lse).exp().masked_fill(lse == -math.inf, 0)
                    made[DSINKS][batch, :, rows] = pull[..., 0] * share
                made["dq"][batch, rows] = (p.softmax_scale * (dS @ k)).transpose(0, 1)
                dk += p.softmax_scale * (dS.mT @ q[:, rows])
                dv += kept(p, tensors, number + batch, rows, P).mT @ dout[:, rows]
            for name, sums in (("dk", dk), ("dv", dv)):
                of_group = sums.unflatten(0, (p.num_heads_k, -1)).sum(1)
                made[name][batch] = of_group.transpose(0, 1)
    return made


def _pulled_back(
    problem: Problem, tensors: Mapping[str, torch.Tensor], sequence: int, rows: slice, scores: torch.Tensor,
    gradient: torch.Tensor, gradient_of_read: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The gradient of scores, where the expression's scores have this one; and those of `_read`, with another one."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    given = [scores, *(tensors[name] for name in _read(problem).values())]
    s, *read = (x.detach().to(wide).requires_grad_() for x in given)
    with torch.enable_grad():
        named = {**tensors, **dict(zip(_read(problem).values(), read, strict=True))}
        found = modified_scores(problem, named, sequence, rows, s, gradient != 0)
        if not found.requires_grad:  # it depends on none of them
            return tuple(torch.zeros_like(x) for x in (gradient, *read))
        how: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
        (of_s,) = torch.autograd.grad(found, [s], gradient.to(wide), **how)
        of_read = torch.autograd.grad(found, read, gradient_of_read.to(wide), **how) if read else ()
    return of_s.to(gradient.dtype), *of_read


def _read(problem: Problem) -> dict[str, str]:
    """The gradients that are asked for of tensors that expressions read, with the names of these."""
    mods = Mods.parse(problem.mods)
    return {tensor.gradient: tensor.field for tensor in mods.tensors if tensor.name in mods.gradients}


def _no_sums(problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Zeros for them."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: torch.zeros_like(tensors[of], dtype=wide) for name, of in _read(problem).items()}


def _of_each_sequence(
    problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """`gradients` of packed sequences; 0 in those without rows or without keys."""
    made = {f"d{name}": torch.zeros_like(tensors[name], dtype=dtype) for name in "qkv"} | _no_sums(
        problem, tensors, dtype
    )
    if problem.dsinks:
        made[DSINKS] = torch.zeros_like(tensors[LSE], dtype=dtype)
    for number, rows, keys, alone in packed.parts(problem):
        places = {"q": rows, "k": keys, "v": keys}
        given = {name: tensors[name][:, place] for name, place in {**places, "o": rows, "dout": rows}.items()}
        given |= packed.of_sequence(problem, tensors, number)
        given |= {name: tensors[name][None, :, rows] for name in (LSE, DLSE) if name in tensors}
        for name, gradient in gradients(alone, given, dtype, number).items():
            if name in _read(problem):
                made[name] += gradient
            elif name == DSINKS:
                made[name][:, rows] = gradient[0]
            else:
                made[name][:, places[name[1]]] = gradient
    return made


OPERATION = Backward()
