"""How torch.utils.flop_counter.FlopCounterMode comes to count the operators here: by its own convention for attention.

A query and a key count whether a mask hides the key or not, in two products of the forward pass and five of the
backward pass. Packed sequences and caches count as many keys as they have, which waits for the GPU; where tensors have
no values, as many as there may be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}  # by torch's operator


def formula(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorates a function that is given what these operators are, and returns their FLOPs."""

    def keep(count: Callable[..., int]) -> Callable[..., int]:
        operators = (getattr(torch.ops.flashladder, name) for name in names)
        _formulas.update(dict.fromkeys(operators, lambda *arguments, out_val=None, **_: count(*arguments)))
        return count

    return keep


def tell() -> None:
    """Has counters that are on count the operators. Importing torch's takes long, so only who counts does it."""
    if torch.compiler.is_compiling() or (module := sys.modules.get(_COUNTER)) is None:
        return
    module.flop_registry.update(_formulas)  # of counters to come
    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(counter := getattr(mode, "counter", None), module.FlopCounterMode):
            counter.flop_registry.update(_formulas)


def lengths(tensor: torch.Tensor, most: int) -> list[int]:
    """Of sequences."""
    has_values = type(tensor) is torch.Tensor and not tensor.is_meta
    return list(tensor.tolist()) if has_values else [most] * tensor.shape[0]
