"""Shared memory of a chunk of CTAs.

Most kernels compute the same shared addresses in every CTA, so accesses are resolved once for all CTAs that agree: an
AccessPattern says which bytes the lanes of one warp touch, and is cached, with its bank conflicts and its words for a
watcher.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from .arrays import ALL_LANES, Array, Mask
from .counters import Counters, shared_wavefronts
from .memory import VIEW_CODES, AccessFault, aligned_bytes, typed_views

WINDOW = 1024  # shared addresses start here: the first KiB belongs to the system, as on the hardware


@dataclass(frozen=True)
class AccessPattern:
    """The accesses of one warp, alike in several CTAs.

    Attributes:
        lanes: the active lanes, (n).
        elements: what each active lane accesses, in units of the access size from the window's start, (n).
        words: every granule touched, (n * granules a lane), lane by lane.
        word_lanes: the lane of each of these.
        repeated: which of these are touched by more than one lane.
        is_one_address: all 32 lanes access one address; elements then has length 1.
        wavefronts, ideal, bank_words: see counters.shared_wavefronts.
    """

    lanes: np.ndarray
    elements: np.ndarray
    words: np.ndarray
    word_lanes: np.ndarray
    repeated: np.ndarray
    is_one_address: bool
    wavefronts: int
    ideal: int
    bank_words: int


# A pattern, and the rows (CTAs of the chunk) it holds for; None: all.
Group = tuple[AccessPattern, np.ndarray | None]


class PatternCache:
    """Patterns of all chunks of a launch: `size` bytes of shared memory, words of `granule` bytes."""

    def __init__(self, size: int, granule: int) -> None:
        self.size, self.granule = size, granule
        self._found: dict[tuple[bytes, int, bytes | None], list[Group]] = {}

    def find(self, address: Array, size: int, mask: Mask, row: int = 0) -> list[Group]:
        """The pattern of one row of addresses as a group for all CTAs; empty if no lane is active."""
        if mask is not None and mask.all():
            mask = None
        key = (address.tobytes(), size, None if mask is None else mask.tobytes())
        found = self._found.get(key)
        if found is None:
            lanes = ALL_LANES if mask is None else np.nonzero(np.broadcast_to(mask[0], 32))[0]
            is_one = address.shape[1] == 1 and mask is None
            chosen = np.broadcast_to(address[0], 32)[lanes].astype(np.int64)
            found = [(self._build(chosen, lanes, size, is_one, row), None)] if len(lanes) else []
            self._found[key] = found
        return found

    def _build(self, address: np.ndarray, lanes: np.ndarray, size: int, is_one: bool, row: int) -> AccessPattern:
        offset = address - WINDOW
        outside = (offset < 0) | (offset + size > self.size)
        wrong = outside | (offset % size != 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            fault = f"out of bounds: offset {offset[at]} of {self.size} bytes"
            message = fault if outside[at] else f"misaligned: offset {offset[at]}"
            raise AccessFault(32 * row + int(lanes[at]), f"{size}-byte access to shared memory {message}")
        per_lane = max(1, size // self.granule)
        words = (offset[:, None] // self.granule + np.arange(per_lane)).reshape(-1)
        times = Counter(words.tolist())
        repeated = np.array([times[word] > 1 for word in words.tolist()])
        elements = offset[:1] // size if is_one else offset // size
        conflicts = shared_wavefronts(offset.tolist(), lanes.tolist(), size)
        return AccessPattern(lanes, elements, words, np.repeat(lanes, per_lane), repeated, is_one, *conflicts)


class SharedMemory:
    """Shared memory of `num_ctas` CTAs, filled with 0xFF: NaN in every float type."""

    def __init__(self, num_ctas: int, patterns: PatternCache) -> None:
        self.num_ctas, self.patterns = num_ctas, patterns
        self.views = typed_views(aligned_bytes(num_ctas, max(patterns.size, 16)))

    def groups(self, address: Array, size: int, mask: Mask) -> list[Group]:
        """The accesses of a warp in all its CTAs, those that agree together.

        Args:
            address: byte addresses, u4 or u8.
            size: bytes a lane, a power of two up to 16.

        Raises:
            AccessFault: a lane is out of bounds or misaligned; `.culprit` is 32 * row + lane.
        """
        if address.shape[0] == 1 and (mask is None or mask.shape[0] == 1):
            return self.patterns.find(address, size, mask)
        members: dict[tuple[bytes, bytes | None], list[int]] = {}
        for row in range(self.num_ctas):
            own_address, own_mask = _row(address, row), None if mask is None else _row(mask, row)
            if own_mask is None or own_mask.any():
                key = (own_address.tobytes(), None if own_mask is None else own_mask.tobytes())
                members.setdefault(key, []).append(row)
        result: list[Group] = []
        for rows in members.values():
            own_mask = None if mask is None else _row(mask, rows[0])
            for pattern, _ in self.patterns.find(_row(address, rows[0]), size, own_mask, rows[0]):
                result.append((pattern, None if len(rows) == self.num_ctas else np.array(rows)))
        return result

    def gather(self, groups: list[Group], size: int) -> Array:
        """The elements read, of `size`-byte type; zero where a lane is inactive."""
        view = self.views[size]
        if len(groups) == 1:
            pattern, rows = groups[0]
            if rows is None and (pattern.is_one_address or len(pattern.lanes) == 32):
                return view.take(pattern.elements, axis=1)
        result = np.zeros((self.num_ctas, 32), VIEW_CODES[size])
        for pattern, rows in groups:
            source = view if rows is None else view[rows]
            result[_cells(rows, pattern.lanes)] = source.take(pattern.elements, axis=1)
        return result

    def scatter(self, groups: list[Group], size: int, values: Array) -> None:
        """Writes elements; of lanes that write the same address the last wins."""
        for pattern, rows in groups:
            chosen = values if rows is None or values.shape[0] == 1 else values[rows]
            if values.shape[1] > 1 and len(pattern.lanes) < 32:
                chosen = chosen[:, pattern.lanes]
            elements = np.broadcast_to(pattern.elements, len(pattern.lanes))
            self.views[size][_cells(rows, elements)] = chosen

    def count(self, counters: Counters, index: int, groups: list[Group], size: int) -> None:
        """Adds the traffic of one instruction."""
        for pattern, rows in groups:
            ctas = self.num_ctas if rows is None else len(rows)
            transferred = ctas * len(pattern.lanes) * size
            wavefronts, ideal, words = (ctas * n for n in (pattern.wavefronts, pattern.ideal, pattern.bank_words))
            counters.shared[index].add(ctas, wavefronts, ideal, transferred, words)


def _row(values: Array, row: int) -> Array:
    return values if values.shape[0] == 1 else values[row : row + 1]


def _cells(rows: np.ndarray | None, columns: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray]:
    """An index of these columns of these rows (None: all)."""
    return (slice(None), columns) if rows is None else (rows[:, None], columns)
