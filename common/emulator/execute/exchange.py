"""Exchanges between the lanes of a warp, on arrays (1 or CTAs, 1 or 32)."""

from typing import Any

import numpy as np

from .arithmetic import flush
from .arrays import ALL_LANES

_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def shuffle_sources(mode: str, lane: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """shfl.sync: the lane that each lane reads, itself where that lies outside its segment; and where it does not.

    `clamp` packs the segment mask (bits 8-12) and the bound (bits 0-4), as PTX says.
    """
    own, lane, clamp = ALL_LANES[None], lane.astype(np.int64) & 31, clamp.astype(np.int64)
    segment, bound = clamp >> 8 & 31, clamp & 31
    highest = (own & segment) | (bound & ~segment)
    lowest = own & segment
    if mode == "up":
        source, inside = own - lane, own - lane >= highest
    elif mode == "down":
        source, inside = own + lane, own + lane <= highest
    elif mode == "bfly":
        source, inside = own ^ lane, (own ^ lane) <= highest
    else:
        source = lowest | (lane & ~segment)
        inside = source <= highest
    return np.where(inside, source, own), inside


def shuffle(value: np.ndarray, source: np.ndarray) -> np.ndarray:
    """shfl.sync: each lane's value from the lane that `source` (rows, 32) names."""
    value = np.broadcast_to(value, (value.shape[0], 32))
    if source.shape[0] == 1:
        return value.take(source[0], axis=1)
    return np.take_along_axis(np.broadcast_to(value, (source.shape[0], 32)), source, axis=1)


def vote(mode: str, predicate: np.ndarray, members: np.ndarray) -> np.ndarray:
    """vote.sync over the member lanes (bool (rows, 32)): a predicate, or the ballot (u4); (rows, 1)."""
    rows = max(predicate.shape[0], members.shape[0])
    predicate = np.broadcast_to(predicate, (rows, 32))
    if mode == "ballot":
        return ((predicate & members).astype(np.uint32) << ALL_LANES.astype(np.uint32)).sum(axis=1, dtype=np.uint32)[
            :, None
        ]
    every, some = (predicate | ~members).all(axis=1), (predicate & members).any(axis=1)
    result = {"all": every, "any": some, "uni": every | ~some}[mode]
    return np.asarray(result[:, None])


def reduce(name: str, value: np.ndarray, members: np.ndarray) -> np.ndarray:
    """redux.sync over the member lanes; (rows, 1). Rows of which no lane is a member stay 0."""
    rows = max(value.shape[0], members.shape[0])
    value = np.broadcast_to(value, (rows, 32))
    members = np.broadcast_to(members, (rows, 32))
    result = np.zeros((rows, 1), value.dtype)
    for row in np.flatnonzero(members.any(axis=1)):
        result[row] = _REDUCTIONS[name].reduce(value[row][members[row]])
    return result


def atomic_function(name: str, old: Any, values: list[Any]) -> Any:
    """The new value of an atomic operation (PTX ISA, "atom"), on numpy scalars of one type."""
    value = values[0]
    if name == "cas":
        return values[1] if old == value else old
    if name == "exch":
        return value
    if name == "inc":
        return old.dtype.type(0) if old >= value else old + old.dtype.type(1)
    if name == "dec":
        return value if old == 0 or old > value else old - old.dtype.type(1)
    if name == "add.ftz":
        return flush(flush(old) + flush(value))
    return _REDUCTIONS[name](old, value)
