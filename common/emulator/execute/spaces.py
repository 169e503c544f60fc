"""Generic addresses: where each memory lies among them."""

import numpy as np

from ..errors import EmulatorError
from .arrays import Array, Mask, narrow
from .chunk import Warp
from .memory import GLOBAL_START

# Where shared and local memory and the parameters lie; global tensors lie above.
GENERIC_BASE = {"shared": 1 << 28, "local": 1 << 30, "param": 1 << 32}
_GENERIC_END = {"shared": 1 << 30, "local": 1 << 32, "param": GLOBAL_START}


def is_in(space: str, address: Array) -> Array:
    """isspacep: whether generic addresses lie in a space."""
    if space in GENERIC_BASE:
        return (address >= GENERIC_BASE[space]) & (address < _GENERIC_END[space])
    return address >= GLOBAL_START if space == "global" else np.zeros((1, 1), bool)


def resolve(warp: Warp, index: int, address: Array, mask: Mask) -> tuple[str, Array]:
    """The one space that generic addresses lie in, and the addresses in it."""
    for space, base in GENERIC_BASE.items():
        inside = is_in(space, address)
        if mask is not None:
            inside = inside | ~mask
        if inside.all():
            return space, address - np.uint64(base)
        if narrow(mask, inside).any():
            raise EmulatorError(f"one access reaches {space} and other memory\n  {warp.at(index, 0)}")
    return "global", address
