"""Loads from shared memory whose values have surely come back: operands of products that have been waited for.

A load is under way when it has been issued, and neither ptxas nor an arrival at an mbarrier waits for it: only what
needs its value does. Arithmetic is no proof of that: ptxas moves a sum, and even an mma.sync, behind an arrival that
stands after it. A wgmma is: when wgmma.wait_group says that it is complete (PTX ISA 9.7.15.7.3), it has read its
registers, so that the load "has been performed": "the value read has been transmitted from memory" (9.7.13.4).
"""

from collections.abc import Iterable

import numpy as np

from .order import Where

_GROUPS = 8  # that wgmma.wait_group may leave under way, and one more


class UsedLoads:
    """By warp, the epochs of the loads whose values products have: those being issued, and by group of wgmma."""

    def __init__(self, of_products: dict[int, frozenset[int]], num_warps: int) -> None:
        self._loads = frozenset[int]().union(*of_products.values())
        self._of_products = of_products
        self._loaded: dict[tuple[int, int], np.ndarray] = {}  # by warp and load: (rows)
        self._used = np.zeros((1, num_warps, _GROUPS + 1), np.int64)  # the group being filled, then the latest ones

    def part(self, count: int) -> None:
        """Gives each CTA its own row."""
        self._used = np.repeat(self._used, count, axis=0)
        self._loaded = {key: np.repeat(epochs, count) for key, epochs in self._loaded.items()}

    def load(self, warp: int, index: int, where: Where, epochs: np.ndarray) -> None:
        """A warp executes a load in these epochs (rows)."""
        if index in self._loads:
            self._loaded.setdefault((warp, index), np.zeros(len(self._used), np.int64))[where] = epochs

    def start(self, warp: int, products: Iterable[int], where: Where) -> None:
        """A warp issues products."""
        for load in {load for product in products for load in self._of_products.get(product, ())}:
            if (warp, load) in self._loaded:
                own = self._used[where, warp, 0]
                self._used[where, warp, 0] = np.maximum(own, self._loaded[warp, load][where])

    def commit(self, warp: int, where: Where) -> None:
        """A group ends."""
        self._used[where, warp, 1:] = self._used[where, warp, :-1].copy()

    def waited(self, warp: int, pending: int, where: Where) -> np.ndarray:
        """The epochs (rows) of the loads that all but the latest `pending` groups have used."""
        return np.asarray(self._used[where, warp, pending + 1])
