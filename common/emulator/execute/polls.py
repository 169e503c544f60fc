"""Waits for global memory: lanes that load a word again and again, until a thread of any CTA changes it.

A loop of strong loads or atomic operations is no gate by itself. It becomes one when lanes have come back to the same
word, found the same value there, and nobody has written to global memory since: they are put aside until somebody does.
When no warp can go on otherwise they look again, as a loop may count its looks and give up; but not for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..compile.program import PtxBlock
from .arrays import Array, Mask, every_lane
from .chunk import Chunk, Waiting, Warp

LOOKS = 1000  # again and again, while nothing happens


@dataclass(frozen=True)
class Look:
    """What lanes found where, and how many writes to global memory there had been."""

    index: int
    address: Array
    values: Array
    mask: Mask
    writes: int

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Look)
            and (self.index, self.writes) == (other.index, other.writes)
            and all(
                np.array_equal(np.asarray(a), np.asarray(b))
                for a, b in ((self.mask, other.mask), (self.address, other.address), (self.values, other.values))
            )
        )


@dataclass(frozen=True, kw_only=True)
class Polling(Waiting):
    """Lanes that wait for a change of global memory, and what they have found last."""

    look: Look

    def stopped_at(self, blocks: Sequence[PtxBlock]) -> int:
        """See Waiting."""
        return self.look.index


def polls_of(chunk: Chunk) -> "Polls":
    """The gate of a chunk."""
    return chunk.gate("polls", lambda: Polls(chunk))


class Polls:
    """The gate of all warps of a chunk that wait for global memory."""

    def __init__(self, chunk: Chunk) -> None:
        self.waiting: list[Polling] = []
        self._chunk = chunk
        self._last: dict[tuple[int, int], tuple[Look, bool]] = {}  # by warp and instruction: the look, whether repeated
        self._idle, self._seen = 0, -1

    def note(self, warp: Warp, index: int, address: Array, values: Array, mask: Mask) -> None:
        """Lanes have looked."""
        look = Look(index, address, values, mask, self._chunk.machine.global_writes)
        before = self._last.get((warp.index, index))
        self._last[warp.index, index] = look, before is not None and before[0] == look

    def put_aside(self, warp: Warp, block: int, mask: Mask) -> bool:
        """Whether lanes that come to a block would only look again; they wait here then."""
        for instruction in self._chunk.program.blocks[block].instructions:
            look, repeated = self._last.get((warp.index, instruction.index), (None, False))
            if look and repeated and look.writes == self._chunk.machine.global_writes and _covers(look.mask, mask):
                self.waiting.append(Polling(warp, block, mask, look=look))
                return True
        return False

    def open(self, stuck: bool) -> bool:
        """See Gate."""
        now = self._chunk.machine.global_writes
        ready = [each for each in self.waiting if each.look.writes != now]
        self.waiting = [each for each in self.waiting if each.look.writes == now]
        for each in ready:
            each.go_on()
        return bool(ready)

    def look_again(self) -> bool:
        """Lets all look once more, though nothing has happened; whether there is any use in it."""
        if self._seen != self._chunk.machine.global_writes:
            self._idle, self._seen = 0, self._chunk.machine.global_writes
        self._idle += 1
        if not self.waiting or self._idle > LOOKS:
            return False
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            look, _ = self._last[each.warp.index, each.look.index]
            self._last[each.warp.index, each.look.index] = look, False
            each.go_on()
        return True

    def progress(self, each: Waiting, row: int) -> str:
        """See Gate."""
        assert isinstance(each, Polling)
        at = row if len(each.look.address) > 1 else 0
        lane = 0 if each.mask is None else int(np.argmax(every_lane(each.mask)[row if len(each.mask) > 1 else 0]))
        address = int(every_lane(each.look.address)[at, lane])
        values = each.look.values
        found = every_lane(values)[row if len(values) > 1 else 0, lane]
        memory, started = self._chunk.machine.memory, int(self._chunk.cta_ids.max()) + 1
        total = int(np.prod(self._chunk.machine.grid))
        later = f"; {total - started} CTAs have not begun: so many run together" if started < total else ""
        return f"a change of {memory.describe(address)}, where it finds {found} and nobody writes{later}"


def _covers(looked: Mask, mask: Mask) -> bool:
    """Whether these lanes are among those that looked."""
    if looked is None:
        return True
    if mask is None:
        return bool(looked.all())
    return bool((~mask | looked).all())
