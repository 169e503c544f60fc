"""What a family of inputs is, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashladder.common.problem.families.sketch import Sketch, heads_first

NORMAL = "normal"

Design = Callable[[Sketch], None]
ScaleOf = Callable[[torch.dtype], float]


@dataclass(frozen=True)
class Family:
    """A kind of inputs. Without a design: standard normal q, k and v."""

    name: str
    purpose: str
    design: Design | None = None
    softmax_scale: ScaleOf | None = None  # its default, where that is not 1/sqrt(head_dim)
    one_hot: bool = False  # each row's weight is on one key: O is a row of V, to the bit

    def draw(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, random: torch.Generator
    ) -> None:
        """Fills the tensors, (batch, seqlen, heads, head_dim), with numbers made on the generator's device.

        Of a design, a narrower v has the first columns.
        """
        if self.design is None:
            for tensor in (q, k, v):
                tensor.copy_(torch.randn(tensor.shape, generator=random, device=random.device))
            return
        for sequence in range(len(q)):
            inputs = [tensor[sequence : sequence + 1] for tensor in (q, k, v)]
            sketch = Sketch(inputs[0], inputs[1], v.shape[3], softmax_scale, random)
            self.design(sketch)
            for tensor, drawn in zip(inputs, (sketch.q, sketch.k, sketch.v), strict=True):
                heads_first(tensor).copy_(drawn[..., : tensor.shape[-1]])


FAMILIES = {NORMAL: Family(NORMAL, "Standard normal q, k and v: what most tests use.")}


def designed(softmax_scale: ScaleOf | None = None, one_hot: bool = False) -> Callable[[Design], Design]:
    """Makes a design a family of its name, whose purpose is the first line of its docstring."""

    def register(design: Design) -> Design:
        purpose = (design.__doc__ or "").partition("\n")[0]
        FAMILIES[design.__name__] = Family(design.__name__, purpose, design, softmax_scale, one_hot)
        return design

    return register
