"""Keys on their way to a cache, to slots of pages: what engines do before they call attention.

k_new, v_new   (batch, 1, num_heads_k, head_dim): a token each
k_cache        (num_pages, page_size, num_heads_k, head_dim), and v_cache: written to in place
slot_mapping   (batch), int64: slot i is row i % page_size of page i / page_size; one that is none is not written
positions      (batch), int64, with rotary: those by which keys turn, and rotary_cos and rotary_sin as for decode
k_descale      and v_descale, with fp8_cache, as for decode, but (1, num_heads_k) where they are of heads
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from flashladder.common.problem.buffers import INPUT, UPDATED, Tensor, contiguous, laid_out
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.operations.decode import CACHES, NEW, ROTARY, ROW_BYTES, Decode
from flashladder.common.problem.options import Option
from flashladder.common.problem.problem import BANDWIDTH, DTYPES, Operation, Problem

SLOTS, POSITIONS, DESCALES = "slot_mapping", "positions", ("k_descale", "v_descale")
_LIKE_DECODES = ("page_size", "fp8_cache", "tensor_scales", "page_scales", "rotary", "rotary_dim", "rotary_interleaved")


class Append(Operation):
    """Nothing comes out but what is in the caches then."""

    name = "append"
    options: ClassVar[tuple[Option, ...]] = (
        *(option for option in Decode.options if option.name in _LIKE_DECODES),
        Option("num_pages", int, "pages of the cache", default=16),
        Option("rotary_positions", int, "of angles", default=64),
    )
    sizes = ("page_size", "num_pages", "rotary_dim", "rotary_positions")
    signed_together: ClassVar[tuple[tuple[str, ...], ...]] = ((NEW[0],), (NEW[1],))
    unit = BANDWIDTH
    usual: ClassVar = {"batch": 64, "num_heads": 8, "seqlen_q": 1}
    sampled: ClassVar = {"batch": 64, "num_heads": 8, "seqlen_q": 1}
    small: ClassVar = {"batch": 9, "num_heads": 2, "seqlen_q": 1}

    def argument(self, problem: Problem, name: str) -> Any:
        """All columns turn where a problem does not say."""
        if name == "rotary_dim":
            return int(problem.rotary_dim) or problem.head_dim
        return super().argument(problem, name)

    def flops(self, problem: Problem) -> float:
        """Nothing is multiplied by a matrix."""
        return 0.0

    def bytes_moved(self, problem: Problem) -> float:
        """What is read, and written."""
        p = problem
        numbers = p.batch * p.num_heads_k * (p.head_dim + p.head_dim_v)
        return float(numbers * (DTYPES[p.dtype].itemsize + p.tensors[CACHES[0]].dtype.itemsize))

    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """Each in a buffer of its own."""
        p, dtype = problem, DTYPES[problem.dtype]
        cached = FP8 if p.fp8_cache else dtype

        def laid(batch: int, rows: int, dtype: torch.dtype, role: str = INPUT) -> Tensor:
            shape = batch, rows, p.num_heads_k, p.head_dim
            return Tensor(laid_out(p.layout, shape, ROW_BYTES // dtype.itemsize), dtype, role, stays=role == UPDATED)

        found = {name: laid(p.batch, 1, dtype) for name in NEW}
        found |= {name: laid(p.num_pages, p.page_size, cached, UPDATED) for name in CACHES}
        found[SLOTS] = Tensor(contiguous(p.batch), torch.int64)
        if p.fp8_cache:
            of_pages = (p.num_pages, p.num_heads_k, 1) if p.page_scales else (1, p.num_heads_k)
            shape = (1,) if p.tensor_scales else of_pages
            found |= dict.fromkeys(DESCALES, Tensor(contiguous(*shape), torch.float32))
        if p.rotary:
            angles = contiguous(p.rotary_positions, self.argument(p, "rotary_dim") // 2)
            found |= {POSITIONS: Tensor(contiguous(p.batch), torch.int64)}
            found |= dict.fromkeys(ROTARY, Tensor(angles, dtype))
        return found

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Slots in random order, of which the last is none; scales are powers of 2."""
        p, device = problem, generator.device
        for name in (*NEW, *ROTARY):
            if name in tensors:
                tensors[name].copy_(torch.randn(tensors[name].shape, generator=generator, device=device))
        slots = torch.randperm(p.num_pages * p.page_size, generator=generator, device=device)[: p.batch]
        slots[-1] = -1
        tensors[SLOTS].copy_(slots)
        if p.rotary:
            tensors[POSITIONS].copy_(torch.randint(p.rotary_positions, (p.batch,), generator=generator, device=device))
        for name in DESCALES if p.fp8_cache else ():
            powers = torch.randint(-9, -4, tensors[name].shape, generator=generator, device=device)
            tensors[name].copy_(torch.exp2(powers.float()))

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """No output."""
        return {}


OPERATION = Append()
