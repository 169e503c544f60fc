"""Tensors in guarded memory: every byte around them, and in the gaps of their strides, is a canary.

The canary is a NaN in every dtype, so that a kernel that reads outside a tensor shows in its output; a changed
canary shows that it wrote there. Another NaN, the poison, fills outputs before a run and shows what was not written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from flashladder.common.errors import UnsupportedProblemError

CANARY = 0x7FDB  # a NaN as bf16 and as fp16, twice in a row as fp32, and its upper half as e4m3
POISON = 0x7FAD  # another one; kernels that compute a NaN write 0x7FFF
_GUARD_ROWS = 128  # a whole tile of rows: a kernel that forgets the end of a tensor lands in the guard
_GUARD_MULTIPLE = 128  # elements: keeps the tensors' alignment
LAYOUTS = ("bshd", "bhsd", "padded")  # of (batch, seqlen, heads, head_dim), all four in this order of dimensions
INPUT, UPDATED, OUTPUT = "input", "updated", "output"  # what kernels do with a tensor; UPDATED is an input, too
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class View:
    """A tensor's place in its buffer, in elements from the start of the data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def end(self) -> int:
        """The first element behind the last one of the view."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1


@dataclass(frozen=True)
class Tensor:
    """A tensor of a problem: its place, its dtype, its role, which is INPUT, UPDATED or OUTPUT.

    An optional one may be left out, and is not asked for: kernels get null in its place. `within` names the tensor in
    whose buffer it lies, where it has none of its own. One that `stays` is never copied for the sake of its strides: it
    is large.
    """

    view: View
    dtype: torch.dtype
    role: str = INPUT
    optional: bool = False
    within: str = ""
    stays: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its view."""
        return self.view.shape


def contiguous(*shape: int) -> View:
    """The view that fills its buffer in the order of `shape`."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return View(shape, tuple(strides))


def laid_out(layout: str, shape: tuple[int, int, int, int], padding: int = 8) -> View:
    """(batch, seqlen, heads, head_dim) as one of LAYOUTS has it; `padding` is that of a padded row, in elements."""
    batch, seqlen, heads, head_dim = shape
    if layout == "bhsd":
        by_batch, by_head, by_row, _ = contiguous(batch, heads, seqlen, head_dim).strides
        return View(shape, (by_batch, by_row, by_head, 1))
    if layout == "padded":
        return View(shape, contiguous(batch, seqlen + 3, heads + 1, head_dim + padding).strides)
    return contiguous(*shape)


class Buffer:
    """One allocation that holds the named views, all of one dtype, with guards before, between and behind them."""

    def __init__(self, views: dict[str, View], dtype: torch.dtype, device: torch.device | str) -> None:
        extent = max(view.end for view in views.values())
        rows = max(view.strides[1] if len(view.shape) == 4 else 1 for view in views.values())
        guard = -(-rows * _GUARD_ROWS // _GUARD_MULTIPLE) * _GUARD_MULTIPLE
        self.names = tuple(views)
        self._bits = _allocate(guard + extent + guard, dtype, device)
        self._bits.fill_(_pattern(CANARY, dtype))
        storage = self._bits.view(dtype)
        self.data = storage[guard : guard + extent]
        self.views = {
            name: storage.as_strided(view.shape, view.strides, guard + view.offset) for name, view in views.items()
        }

    def damage(self) -> str | None:
        """What a kernel wrote outside the views; None where every canary lives."""
        changed = self._bits != _pattern(CANARY, self.data.dtype)
        for view in self.views.values():
            changed.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        if not changed.any():
            return None
        first = int(changed.byte().argmax()) - self.data.storage_offset()
        return (
            f"{int(changed.sum())} elements outside {'/'.join(self.names)} were overwritten, the first at element "
            f"{first} of its buffer of {self.data.numel()}"
        )


def _allocate(count: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Integers of a dtype's size. UnsupportedProblemError where there is no room for so many."""
    try:
        return torch.empty(count, dtype=_INTEGERS[dtype.itemsize], device=device)
    except RuntimeError as error:  # torch has no class of its own for the CPU's memory
        if not re.search("out of memory|allocate", str(error)):
            raise
        gib = count * dtype.itemsize / 2**30
        raise UnsupportedProblemError(
            f"there is no room for a tensor of {gib:,.1f} GiB on the device {device}"
        ) from None


def poison(tensor: torch.Tensor) -> None:
    """Fill an output so that what a kernel does not write shows in `unwritten`."""
    tensor.view(_INTEGERS[tensor.dtype.itemsize]).fill_(_pattern(POISON, tensor.dtype))


def unwritten(tensor: torch.Tensor) -> int:
    """How many elements still hold the poison."""
    return int((tensor.view(_INTEGERS[tensor.dtype.itemsize]) == _pattern(POISON, tensor.dtype)).sum())


def _pattern(word: int, dtype: torch.dtype) -> int:
    return {1: word >> 8, 2: word, 4: word << 16 | word, 8: word * 0x1000100010001}[dtype.itemsize]
