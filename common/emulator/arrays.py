"""The shapes that everything here agrees on.

An Array is (1 or CTAs, 1 or 32): row r is CTA r of the chunk, column l is lane l; what is the same everywhere stays 1.
A Mask tells the active lanes, in such a shape; None means all lanes of all CTAs.
"""

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
Mask = np.ndarray | None

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
