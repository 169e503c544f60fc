"""What L2 holds between launches: as many copies of tensors as it does not, and no part that is set aside.

What a stream keeps there as persisting would outlive the flush between cold launches.

A kernel's host code may set a part of L2 aside and give its stream an access policy window; lines in it are evicted by
nothing else, and other kernels have less of L2 (CUDA C++ Programming Guide, "L2 cache"; karpathy/llm.c, pull request
851, saw four times the bandwidth of HBM so).
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch

BESIDE = 2  # times L2, what is read between two launches on the same tensors
LARGE = 20  # times L2, from which on tensors leave next to nothing there themselves


def copies(num_bytes: float, l2_bytes: int) -> int:
    """How many more tensors of so many bytes are to be read before the first ones again, so that none is in L2."""
    return 0 if num_bytes >= LARGE * l2_bytes else math.ceil(BESIDE * l2_bytes / num_bytes)


class Flush:
    """Fills L2 with other memory, by reading it: what is written would go to memory in the time of the next launch."""

    def __init__(self, l2_bytes: int, device: str = "cuda") -> None:
        self.memory = torch.zeros(BESIDE * l2_bytes // 4, device=device)
        self._sum = torch.zeros((), device=device)

    def __call__(self) -> None:
        torch.sum(self.memory, 0, out=self._sum)


class SetAside:
    """The part of L2 that the current context sets aside. Nothing where the driver does not say."""

    def __init__(self) -> None:
        self._driver = _driver()

    def bytes(self) -> int:
        """How much is set aside now."""
        if self._driver is None:
            return 0
        status, size = self._driver.cuCtxGetLimit(self._limit)
        return 0 if status else int(size)

    def clear(self) -> None:
        """Set nothing aside, and let all lines be evicted."""
        if self._driver is not None and self.bytes():
            self._driver.cuCtxSetLimit(self._limit, 0)
            self._driver.cuCtxResetPersistingL2Cache()

    @property
    def _limit(self) -> Any:
        return self._driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE


def _driver() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError:  # then no rung runs either
        return None
