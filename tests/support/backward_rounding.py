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
from flashladder.common.problem.problem import Problem
from flashladder.common.studies.accuracy.yardstick import gradients


def bounded_by_flash_attention(task: Problem, tensors: Tensors) -> Expected:
    """The exact gradients, each with FlashAttention's rule or twice the errors of its roundings.

    Where those roundings overflow, nothing is promised.
    """
    expected = expect(task, tensors)
    compute = _of_each_sequence if task.packed else gradients
    for cut in (0.0, task.head_dim / 16 * 2.0**-24):
        found = compute(task, tensors.by_name, 1 - cut)
        for name in expected.exact:
            error = (found[name] - expected.exact[name]).abs().nan_to_num(nan=math.inf)
            expected.tolerances[name] = max(expected.tolerances[name], 2 * float(error.max()))
    return expected


def _of_each_sequence(task: Problem, tensors, share) -> dict[str, torch.Tensor]:
    """Of packed sequences, each alone."""
    made = {f"d{name}": torch.zeros_like(tensors[name], dtype=torch.float64) for name in "qkv"}
    for number, rows, keys, alone in packed.parts(task):
        places = {"q": rows, "k": keys, "v": keys, "o": rows, "dout": rows}
        given = {name: tensors[name][:, place] for name, place in places.items()}
        given |= packed.of_sequence(task, tensors, number)
        given |= {name: tensors[name][None, :, rows] for name in ("lse", "dlse") if name in tensors}
        for name, gradient in gradients(alone, given, share, number).items():
            made[name][:, places[name[1]]] = gradient
    return made
