"""Where a kernel refuses, a model goes on with somebody else's, and is told so once."""

from __future__ import annotations

import re
import warnings

import torch

_said: set[str] = set()


class FallbackWarning(UserWarning):
    """Attention that was to run here ran elsewhere."""


@torch.compiler.assume_constant_result  # under torch.compile it is said when the call is traced
def say(instead: str, reason: str) -> None:
    """Warns that `instead` runs: once in a process for reasons that differ in numbers only."""
    if (kind := f"{instead}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', reason)}") not in _said:
        _said.add(kind)
        warnings.warn(f"{instead} runs instead of FlashLadder: {reason}", FallbackWarning, stacklevel=3)
