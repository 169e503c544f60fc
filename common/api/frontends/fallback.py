"""Where a kernel refuses, a model goes on with somebody else's, and is told so once."""

from __future__ import annotations

import re
import warnings

import torch

from flashladder.common.api import differentiable, gradients
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.head_dims import HEAD_DIMS
from flashladder.common.problem.problem import DTYPES

_said: set[str] = set()


class FallbackWarning(UserWarning):
    """Attention that was to run here ran elsewhere."""


def foresee(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """UnsupportedProblemError for what `attention` would refuse of (batch, seqlen, heads, head_dim) when it runs.

    Under torch.compile it runs when it is too late for somebody else's.
    """
    if q.dtype not in DTYPES.values():
        raise UnsupportedProblemError(f"q is {q.dtype}; kernels take {listing(DTYPES.values())}")
    if v.shape[:3] != k.shape[:3]:
        raise UnsupportedProblemError(
            f"v is {tuple(v.shape)}, k {tuple(k.shape)}; kernels take them alike but for head_dim"
        )
    trains = gradients.needed(q, k, v)
    most = differentiable.trained_widths(q).head_dims[-1] if trains else HEAD_DIMS[-1]
    if (head_dim := max(q.shape[3], v.shape[3])) > most:
        kernels = "kernels of gradients" if trains else "kernels"
        raise UnsupportedProblemError(f"{kernels} take head_dim up to {most}, not {head_dim}")


@torch.compiler.assume_constant_result  # under torch.compile it is said when the call is traced
def say(instead: str, reason: str) -> None:
    """Warns that `instead` runs: once in a process for reasons that differ in numbers only."""
    if (kind := f"{instead}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', reason)}") not in _said:
        _said.add(kind)
        warnings.warn(f"{instead} runs instead of FlashLadder: {reason}", FallbackWarning, stacklevel=3)
