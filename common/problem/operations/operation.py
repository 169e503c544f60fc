"""What an operation says of itself, so that tensors, checks and launches of every kind are made in one way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from flashladder.common.problem.buffers import View
from flashladder.common.problem.families import NORMAL

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TINY = 1e-5  # added to the tolerance, for outputs that 16-bit torch gets exactly


class Operation(ABC):
    """What is computed of which tensors. Kernels get them in this order: inputs, then outputs."""

    name: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    fp32: ClassVar[tuple[str, ...]] = ("lse",)  # the tensors that are not of the problem's dtype
    sizes: ClassVar[tuple[str, ...]] = ()  # whole numbers that kernels are told beside those of every operation
    families: ClassVar[Collection[str]] = (NORMAL,)  # of inputs
    # Groups whose columns may change their signs, those of one group alike, where nothing else changes.
    signed_together: ClassVar[tuple[tuple[str, ...], ...]]

    @abstractmethod
    def flops(self, problem: Problem) -> float:
        """The operations of its matrix products, as the field counts them."""

    @abstractmethod
    def views(self, problem: Problem) -> list[dict[str, View]]:
        """All its tensors: what shares a buffer, and where in it."""

    @abstractmethod
    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The outputs by the textbook, with every intermediate in `dtype`: fp64 makes them exact."""

    def dtype(self, problem: Problem, name: str) -> torch.dtype:
        """What one of its tensors is made of."""
        return torch.float32 if name in self.fp32 else DTYPES[problem.dtype]

    def shapes(self, problem: Problem) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, in the order in which kernels get them."""
        found = {name: view.shape for views in self.views(problem) for name, view in views.items()}
        return {name: found[name] for name in (*self.inputs, *self.outputs)}

    def argument(self, problem: Problem, name: str) -> float:
        """A number that kernels are told by its name. AttributeError for one that it does not know."""
        return getattr(problem, name)

    def default_scale(self, problem: Problem) -> float:
        """The softmax_scale of a problem that was given none."""
        return float(problem.head_dim**-0.5)

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Fills the inputs with those of the problem's family: standard normal, in their order."""
        for name in self.inputs:
            tensor = tensors[name]
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=generator.device))

    def tolerance(self, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> float:
        """How far a kernel's output may be from the exact one: twice as far as 16-bit torch is (FlashAttention's rule).

        What is fp32 may be as far as fp32 arithmetic goes.
        """
        if name not in self.fp32:
            return 2 * float((rounded - exact).abs().max()) + _TINY
        finite = exact[exact.isfinite()]
        return 1e-5 * (1 + (float(finite.abs().max()) if finite.numel() else 0.0))
