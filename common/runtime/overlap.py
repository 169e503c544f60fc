"""Where tensors lie in memory: O has a place of its own for each element, which no input has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_EFFORT = 10_000  # of NumPy, which then takes them to overlap: views of one tensor need a few steps


def is_apart_in_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a stride is always longer than what the shorter ones span, so that no two elements are one."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one device have a byte in common; views that interleave have none."""
    (first, end_of_first), (second, end_of_second) = map(_reach, (a, b))
    if end_of_first <= second or end_of_second <= first:
        return False
    arrays = np.asarray(_Addresses(a)), np.asarray(_Addresses(b))
    return bool(np.may_share_memory(*arrays, max_work=_EFFORT))  # type: ignore[arg-type]  # its stubs say 0 or -1


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Its first byte, and the one behind its last."""
    begin, steps = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return begin, begin + tensor.element_size() * reach


class _Addresses:
    """A tensor's memory as NumPy knows it, which does not look what is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }
