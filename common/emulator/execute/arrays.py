"""The shapes that everything here agrees on.

An Array is (1 or CTAs, 1 or 32): row r is CTA r of the chunk, column l is lane l; what is the same everywhere stays 1.
A Mask tells the active lanes, in such a shape; None means all lanes of all CTAs.
"""

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
Mask = np.ndarray | None
Rows = np.ndarray | None  # CTAs of the chunk; None: all

ALL_LANES = np.arange(32)


def narrow(mask: Mask, condition: np.ndarray) -> np.ndarray:
    """The lanes of a mask for which a condition holds."""
    return condition if mask is None else mask & condition


def either(a: Mask, b: Mask) -> Mask:
    """The union of two masks."""
    if a is None or b is None:
        return None
    both = a | b
    return None if both.all() else both


def first_lanes(count: int) -> np.ndarray:
    """The mask of the first `count` lanes, (1, 32)."""
    return np.arange(32)[None] < count


def has_lanes(mask: np.ndarray) -> np.ndarray:
    """Which rows of a mask have active lanes, (rows)."""
    return np.asarray(np.any(mask, axis=1))


def every_lane(values: np.ndarray) -> np.ndarray:
    """(rows, 32) of (rows, 1 or 32)."""
    return values if values.shape[1] == 32 else np.repeat(values, 32, axis=1)


def classes(rows: np.ndarray, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Splits CTAs (bool) into classes in which each of the values, one a CTA, is the same."""
    found = [rows] if rows.any() else []
    for value in values:
        parts: list[np.ndarray] = []
        for chosen in found:
            different = np.unique(value[chosen])
            parts += [chosen] if len(different) == 1 else [chosen & (value == each) for each in different]
        found = parts
    return found


def lanes_of(mask: Mask, live: Mask) -> tuple[np.ndarray | None, Rows]:
    """The lanes of a mask in each of its CTAs, (rows, 32), None if these are all that have not left; and the CTAs."""
    if mask is None:
        return None, None
    lanes, rows = np.broadcast_to(mask, (len(mask), 32)), None
    if (lanes == lanes[:1]).all():
        lanes = lanes[:1]
    else:
        rows = np.nonzero(has_lanes(mask))[0]
        lanes = lanes[rows]
    if live is None:
        return (None if lanes.all() else lanes), rows
    alive = live if len(live) == 1 or rows is None else live[rows]
    return (None if (lanes | ~alive).all() else lanes), rows
