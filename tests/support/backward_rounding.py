"""How far FlashAttention-2's own roundings lead from exact gradients: the bound where its rule says less.

Tensor cores cut off what lies below the highest bits of a sum, at each step of 16 columns: dP is wrong by so much as if
all of it were. Where dP and delta cancel, as in rows of one key, that is all there is. With a softcap, P times its
derivative is rounded before it is multiplied by dP, which FlashAttention-2 does not do: it comes from another warp.
"""

import math

import torch

from flashladder.common.problem.check import Expected, expect
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.operations import packed
from flashladder.common.problem.operations.forward import full_precision_matmul, heads_of, kept, masked_scores
from flashladder.common.problem.problem import Problem


def bounded_by_flash_attention(task: Problem, tensors: Tensors) -> Expected:
    """The exact gradients, each with FlashAttention's rule or twice the errors of its roundings.

    Where those roundings overflow, nothing is promised.
    """
    expected = expect(task, tensors)
    compute = _of_each_sequence if task.packed else _as_flash_attention_rounds
    for cut in (0.0, task.head_dim / 16 * 2.0**-24):
        found = compute(task, tensors.by_name, 1 - cut)
        for name in expected.exact:
            error = (found[name] - expected.exact[name]).abs().nan_to_num(nan=math.inf)
            expected.tolerances[name] = max(expected.tolerances[name], 2 * float(error.max()))
    return expected


def _as_flash_attention_rounds(p: Problem, tensors, share, number=0) -> dict[str, torch.Tensor]:
    """P and dS are rounded, O comes rounded, `share` of dP is left, all else is fp32. `number` counts sequences."""
    made = {f"d{name}": torch.zeros_like(tensors[name], dtype=torch.float64) for name in "qkv"}
    dtype, rows = tensors["q"].dtype, slice(0, p.seqlen_q)
    for batch in range(p.batch):
        q, k, v, o, dout = heads_of(p, tensors, ("q", "k", "v", "o", "dout"), batch, torch.float32)
        with full_precision_matmul():
            scores = masked_scores(p, tensors, batch, q, k, rows)
            weights = (scores - tensors["lse"][batch, ..., None]).exp().nan_to_num(nan=0)  # no key is seen: inf - inf
            delta = (dout * o).sum(-1) - (tensors["dlse"][batch] if "dlse" in tensors else 0)
            dp = kept(p, tensors, number + batch, rows, dout @ v.mT * share)
            of_dp = weights
            if p.softcap:
                slope = 1 - torch.tanh((q * p.softmax_scale) @ k.mT / p.softcap) ** 2
                of_dp = (weights * slope).to(dtype).float()
            ds = (of_dp * (dp - delta[..., None])).to(dtype).float()
            weights = kept(p, tensors, number + batch, rows, weights).to(dtype).float()
            found = {"dq": p.softmax_scale * ds @ k, "dk": p.softmax_scale * ds.mT @ q, "dv": weights.mT @ dout}
        for name, gradient in found.items():
            heads = made[name].shape[2]
            made[name][batch] = gradient.unflatten(0, (heads, -1)).sum(1).to(dtype).transpose(0, 1)
    return made


def _of_each_sequence(task: Problem, tensors, share) -> dict[str, torch.Tensor]:
    """Of packed sequences, each alone."""
    made = {f"d{name}": torch.zeros_like(tensors[name], dtype=torch.float64) for name in "qkv"}
    for number, rows, keys, alone in packed.parts(task):
        places = {"q": rows, "k": keys, "v": keys, "o": rows, "dout": rows}
        given = {name: tensors[name][:, place] for name, place in places.items()}
        given |= packed.of_sequence(task, tensors, number)
        given |= {name: tensors[name][None, :, rows] for name in ("lse", "dlse") if name in tensors}
        for name, gradient in _as_flash_attention_rounds(alone, given, share, number).items():
            made[name][:, places[name[1]]] = gradient
    return made
