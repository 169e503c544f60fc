"""Asynchronous copies in flight: the queue of one warp's cp.async, with a commit group per thread.

A copy is an agent of its own: it is issued by a thread, lands later, and belongs to nobody in between. Here it lands as
late as the program allows: at the wait that its issuer executes. (TMA copies will land through an mbarrier instead.)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Copy:
    """One cp.async of a warp.

    Attributes:
        index: the instruction.
        address: shared destinations, (1 or CTAs, 1 or 32).
        size: bytes a lane.
        data: what will be there, (1 or CTAs, 1 or 32) of `size`-byte type.
        mask: the lanes whose copy is in flight; None: all.
        group: the commit group of each lane's copy, counted from 0.
    """

    index: int
    address: np.ndarray
    size: int
    data: np.ndarray
    mask: np.ndarray | None
    group: np.ndarray


class CopyQueue:
    """Copies of one warp that have not landed. `land` is called with each Copy, masked to the lanes that land."""

    def __init__(self, land: Callable[[Copy], None]) -> None:
        self._land = land
        self._commits = np.zeros((1, 1), np.int64)
        self._pending: list[Copy] = []

    def issue(self, index: int, address: np.ndarray, size: int, data: np.ndarray, mask: np.ndarray | None) -> None:
        self._pending.append(Copy(index, address, size, data, mask, self._commits))

    def commit(self, mask: np.ndarray | None) -> None:
        """cp.async.commit_group: later copies belong to the next group."""
        self._commits = self._commits + (1 if mask is None else mask)

    def wait(self, allowed: int, mask: np.ndarray | None) -> None:
        """cp.async.wait_group: all but the latest `allowed` groups of a thread land; what is not committed does not."""
        self._finish(lambda copy: copy.group < self._commits - allowed, mask)

    def wait_all(self, mask: np.ndarray | None) -> None:
        """cp.async.wait_all: everything lands."""
        self._finish(lambda copy: np.ones((1, 1), bool), mask)

    def _finish(self, is_done: Callable[[Copy], np.ndarray], mask: np.ndarray | None) -> None:
        pending, self._pending = self._pending, []
        for copy in pending:
            done = is_done(copy)
            if mask is not None:
                done = done & mask
            if copy.mask is not None:
                done = done & copy.mask
            if done.all():
                self._land(copy)
            elif not done.any():
                self._pending.append(copy)
            else:
                self._land(replace(copy, mask=done))
                left = ~done if copy.mask is None else copy.mask & ~done
                if left.any():
                    self._pending.append(replace(copy, mask=left))
