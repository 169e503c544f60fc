"""Shared memory of a chunk of CTAs.

Most kernels compute the same shared addresses in every CTA, so accesses are resolved once for all CTAs that agree: an
AccessPattern says which bytes the lanes of one warp touch, and is cached, with its bank conflicts and its words for the
race detector.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .counters import Counters, shared_wavefronts
from .memory import VIEW_CODES, AccessFault, aligned_bytes, typed_views

WINDOW = 1024  # shared addresses start here: the first KiB belongs to the system, as on the hardware
ALL_LANES = np.arange(32)


@dataclass(frozen=True)
class AccessPattern:
    """The accesses of one warp, alike in several CTAs.

    Attributes:
        lanes: the active lanes, (n).
        elements: what each active lane accesses, in units of the access size from the window's start, (n).
        words: every granule of the race detector's shadow touched, (n * granules a lane), lane by lane.
        word_lanes: the lane of each of these.
        repeated: which of these are touched by more than one lane.
        uniform: all 32 lanes access the one address; elements then has length 1.
        wavefronts, ideal: see counters.shared_wavefronts.
    """

    lanes: np.ndarray
    elements: np.ndarray
    words: np.ndarray
    word_lanes: np.ndarray
    repeated: np.ndarray
    uniform: bool
    wavefronts: int
    ideal: int


# A pattern, and the rows (CTAs of the chunk) it holds for; None: all.
Group = tuple[AccessPattern, np.ndarray | None]


class SharedMemory:
    """`size` bytes for each of `num_ctas` CTAs. `granule` is the race detector's word: 4 bytes, or the smallest access."""

    def __init__(self, num_ctas: int, size: int, granule: int) -> None:
        self.num_ctas, self.size, self.granule = num_ctas, size, granule
        self.views = typed_views(aligned_bytes(num_ctas, max(size, 16)))
        self._patterns: dict[tuple[bytes, int, bytes | None], AccessPattern] = {}

    def groups(self, address: np.ndarray, size: int, mask: np.ndarray | None) -> list[Group]:
        """The accesses of a warp in all its CTAs, those that agree together.

        Args:
            address: byte addresses, (1 or CTAs, 1 or 32), u4 or u8.
            size: bytes a lane, a power of two up to 16.
            mask: active lanes, (1 or CTAs, 1 or 32); None: all.

        Raises:
            AccessFault: a lane is out of bounds or misaligned; `.position` is 32 * row + lane.
        """
        if address.shape[0] == 1 and (mask is None or mask.shape[0] == 1):
            pattern = self._pattern(address, size, mask, 0)
            return [(pattern, None)] if pattern else []
        rows: dict[tuple[bytes, bytes | None], list[int]] = {}
        for row in range(self.num_ctas):
            own_address = address[row if address.shape[0] > 1 else 0]
            own_mask = None if mask is None else mask[row if mask.shape[0] > 1 else 0]
            if own_mask is None or own_mask.any():
                rows.setdefault((own_address.tobytes(), None if own_mask is None or own_mask.all() else own_mask.tobytes()), []).append(row)
        result: list[Group] = []
        for members in rows.values():
            row = members[0]
            own_mask = None if mask is None else mask[row : row + 1] if mask.shape[0] > 1 else mask
            pattern = self._pattern(address[row : row + 1] if address.shape[0] > 1 else address, size, own_mask, row)
            if pattern:
                result.append((pattern, None if len(members) == self.num_ctas else np.array(members)))
        return result

    def _pattern(self, address: np.ndarray, size: int, mask: np.ndarray | None, row: int) -> AccessPattern | None:
        """The pattern of one row of addresses; None if no lane is active."""
        if mask is not None and mask.all():
            mask = None
        key = (address.tobytes(), size, None if mask is None else mask.tobytes())
        found = self._patterns.get(key)
        if found is None:
            lanes = ALL_LANES if mask is None else np.nonzero(np.broadcast_to(mask[0], 32))[0]
            if not len(lanes):
                return None
            uniform = address.shape[1] == 1 and mask is None
            found = self._patterns[key] = self._build(np.broadcast_to(address[0], 32)[lanes].astype(np.int64), lanes, size, uniform, row)
        return found

    def _build(self, address: np.ndarray, lanes: np.ndarray, size: int, uniform: bool, row: int) -> AccessPattern:
        offset = address - WINDOW
        outside = (offset < 0) | (offset + size > self.size)
        wrong = outside | (offset % size != 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            if outside[at]:
                problem = f"out of bounds: offset {offset[at]} of {self.size} bytes"
            else:
                problem = f"misaligned: offset {offset[at]}"
            raise AccessFault(32 * row + int(lanes[at]), f"{size}-byte shared access {problem}")
        per_lane = max(1, size // self.granule)
        words = (offset[:, None] // self.granule + np.arange(per_lane)).reshape(-1)
        actual, ideal = shared_wavefronts(offset, lanes, size)
        word_lanes = np.repeat(lanes, per_lane)
        _, position, times = np.unique(words, return_inverse=True, return_counts=True)
        elements = offset[:1] // size if uniform else offset // size
        return AccessPattern(lanes, elements, words, word_lanes, times[position] > 1, uniform, actual, ideal)

    def gather(self, groups: list[Group], size: int) -> np.ndarray:
        """The elements read, (CTAs, 1 or 32) of `size`-byte type; zero where a lane is inactive."""
        view = self.views[size]
        if len(groups) == 1 and groups[0][1] is None:
            pattern = groups[0][0]
            if pattern.uniform or len(pattern.lanes) == 32:
                return view.take(pattern.elements, axis=1)
        result = np.zeros((self.num_ctas, 32), VIEW_CODES[size])
        for pattern, rows in groups:
            where = slice(None) if rows is None else rows
            result[self._cells(rows, pattern.lanes)] = view[where].take(pattern.elements, axis=1)
        return result

    def scatter(self, groups: list[Group], size: int, values: np.ndarray) -> None:
        """Writes elements (1 or CTAs, 1 or 32); of lanes that write the same address the last wins."""
        values = np.broadcast_to(values, (self.num_ctas, 32))
        for pattern, rows in groups:
            elements = np.broadcast_to(pattern.elements, len(pattern.lanes))
            self.views[size][self._cells(rows, elements)] = values[self._cells(rows, pattern.lanes)]

    def _cells(self, rows: np.ndarray | None, columns: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray]:
        return (slice(None), columns) if rows is None else (rows[:, None], columns)

    def count(self, counters: Counters, index: int, groups: list[Group], size: int) -> None:
        """Adds the traffic of one instruction."""
        for pattern, rows in groups:
            ctas = self.num_ctas if rows is None else len(rows)
            counters.shared[index].add(ctas, ctas * pattern.wavefronts, ctas * pattern.ideal, ctas * len(pattern.lanes) * size)
