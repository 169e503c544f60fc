"""ALiBi (Press et al., arXiv:2108.12409): attention whose scores lose a slope for each key on the way to their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flashladder.common.problem.buffers import View, contiguous
from flashladder.common.problem.operations.forward import Forward
from flashladder.common.problem.operations.packed import Packed

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem

SLOPES = "alibi_slopes"


class _Slopes(Forward):
    """One more input: alibi_slopes (batch, num_heads), fp32, of the sequences and their heads."""

    inputs = (*Forward.inputs, SLOPES)
    fp32 = (*Forward.fp32, SLOPES)

    def views(self, problem: Problem) -> list[dict[str, View]]:
        """Those without it, and the slopes."""
        return [*super().views(problem), {SLOPES: contiguous(problem.batch, problem.num_heads)}]

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Slopes from 1 down to 2^-8, as the paper's are."""
        super().draw(problem, tensors, generator)
        slopes = tensors[SLOPES]
        slopes.copy_(torch.exp2(-8 * torch.rand(slopes.shape, generator=generator, device=generator.device)))


class _PackedSlopes(_Slopes, Packed):
    inputs = (*Packed.inputs, SLOPES)


BIASED = {"forward": _Slopes(), "packed": _PackedSlopes()}  # by the name of the operation without a bias
