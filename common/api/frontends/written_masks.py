"""Masks of transformers that are functions of positions, as expressions: `attention(mask=...)` takes those.

A function is traced into text (flex_trace.py), once for a forward pass. What stands for the mask in the model holds no
element; its last size is a number, by which the mask is found again. So it may be moved to any device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flashladder.common.api.frontends.flex_trace import trace
from flashladder.common.api.frontends.flex_tree import POSITION, ROW
from flashladder.common.errors import UnsupportedProblemError

DIMENSIONS = 6  # of what stands for such a mask
_numbers = itertools.count(1)
_by_number: WeakValueDictionary[int, Written] = WeakValueDictionary()
_kept = WeakTensorKeyDictionary()  # masks live as long as what stands for them
refusals = WeakTensorKeyDictionary()  # of masks that are drawn: why no expression says them

Function = Callable[..., torch.Tensor]  # of (batch, head, query, key), as transformers' masks are


@dataclass(frozen=True)
class Written:
    """A mask as `attention` takes it, and its maker for who takes none such."""

    options: dict[str, Any]  # mask, tensors, causal
    draw: Callable[[], torch.Tensor]  # (batch, 1, queries, keys), true where a query sees a key


@dataclass(frozen=True)
class Places:
    """How many queries and keys there are, and which the first ones are."""

    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int

    @property
    def end_alike(self) -> bool:
        """Whether the last query is the last key, as in `attention`, and the first query no key before the first."""
        return self.q_offset + self.q_length == self.kv_offset + self.kv_length and self.q_offset >= self.kv_offset


def write(
    function: Function, places: Places, device: torch.device, is_causal: bool, draw: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """What stands for the mask of a function; `is_causal` promises that it shows no key behind a query.

    UnsupportedProblemError, by the name of an operation, for what no expression says.
    """
    row, row_offset = (POSITION, places.kv_offset) if places.end_alike else (ROW, places.q_offset)

    offsets = [_offset(by, device) for by in (row_offset, places.kv_offset)]

    def moved(index: torch.Tensor, by: torch.Tensor | None) -> torch.Tensor:
        return index if by is None else index + by

    def of_positions(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        # transformers asks for no head but the first
        return function(b, torch.zeros_like(h), *map(moved, (q, k), offsets))

    traced = trace("the mask's function", of_positions, device, False, "m", row)
    options = {"mask": traced.text, "tensors": traced.tensors, "causal": is_causal and places.end_alike}
    number = next(_numbers)
    written = _by_number[number] = Written(options, draw)
    mask = torch.empty(*(0,) * (DIMENSIONS - 1), number, dtype=torch.bool, device=device)
    _kept[mask] = written
    return mask


def _offset(by: int, device: torch.device) -> torch.Tensor | None:
    """A tensor, as a number would be compiled anew with every token."""
    return torch.tensor(by, dtype=torch.int32, device=device) if by else None


def written(mask: torch.Tensor) -> Written:
    """The mask that something stands for. UnsupportedProblemError where the forward pass that made it is over."""
    if (found := _by_number.get(mask.shape[-1])) is None:
        raise UnsupportedProblemError("a mask that was made in a forward pass that is over: make it anew")
    return found
