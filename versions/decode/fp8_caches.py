"""Caches in 8-bit floats: what the operation has of its own with the option fp8_cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flashladder.common.problem.buffers import View, contiguous
from flashladder.common.problem.fp8 import FP8, LARGEST, quantised
from flashladder.common.problem.problem import Problem

if TYPE_CHECKING:  # which imports this file
    from flashladder.versions.decode.operation import Decode
else:
    Decode = object

DESCALES = {"k_cache": "k_descale", "v_cache": "v_descale"}


class Fp8Caches(Decode):
    """Two more inputs: k_descale and v_descale (batch, num_heads_k), fp32. To be derived from before the operation."""

    def dtype(self, problem: Problem, name: str) -> torch.dtype:
        """Of the caches e4m3."""
        return FP8 if name in DESCALES else super().dtype(problem, name)

    def bytes_moved(self, problem: Problem) -> float:
        """A byte a number."""
        return super().bytes_moved(problem) / 2

    def views(self, problem: Problem) -> list[dict[str, View]]:
        """With the scales."""
        of_heads = contiguous(problem.batch, problem.num_heads_k)
        return [*super().views(problem), *({name: of_heads} for name in DESCALES.values())]

    def _write(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, keys: torch.Tensor
    ) -> None:
        """A head's scale is that of its largest number, times 0.75 to 1.5: in some heads the largest ones saturate."""
        numbers = keys if len(keys) else keys.new_zeros((1, *keys.shape[1:]))
        largest = numbers.float().nan_to_num(0.0).abs().amax((0, 2))
        heads = torch.arange(len(largest), device=largest.device)
        spread = 0.75 * 2 ** ((heads + sequence) % 8 / 7)
        descale = torch.where(largest > 0, spread * largest / LARGEST, 1.0)
        tensors[DESCALES[name]][sequence].copy_(descale)
        super()._write(problem, tensors, name, sequence, quantised(keys, descale))

    def _read(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, length: int
    ) -> torch.Tensor:
        """Each number times its scale, exact in fp64."""
        numbers = super()._read(problem, tensors, name, sequence, length).double()
        return numbers * tensors[DESCALES[name]][sequence].double()[:, None]
