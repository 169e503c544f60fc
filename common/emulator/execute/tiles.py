"""What a bulk copy moves: a stretch of bytes, or the tile of a tensor that a tensor map and coordinates name.

A tile lies in shared memory as a dense array, dimension 0 fastest, its rows swizzled (PTX ISA, 5.5.7). Elements outside
of the tensor are zero in a tile that is loaded, and are not written where one is stored (5.5.3.3, zero fill mode).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ..tensor_map import TensorMap
from .descriptors import swizzled
from .memory import VIEW_CODES, GlobalMemory

CHUNK = 16  # bytes: what the swizzle keeps together, and what sizes are multiples of


class Region(ABC):
    """A part of global memory, another one in each CTA, that has its place in shared memory too."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of it in shared memory."""

    @abstractmethod
    def of(self, rows: np.ndarray) -> "Region":
        """What belongs to these CTAs."""

    @property
    @abstractmethod
    def elements(self) -> tuple[np.ndarray, np.ndarray | None, int]:
        """The global addresses of its elements, (CTAs, elements) u8, in the order of shared memory before the swizzle;
        which of them exist (None: all); and the bytes of one: 16 if that cuts nothing off."""

    @abstractmethod
    def places(self, address: int) -> np.ndarray:
        """The shared addresses of its chunks of 16 bytes, if it begins at `address`."""

    @property
    def traffic(self) -> tuple[int, int]:
        """Sectors of 32 bytes and bytes of global memory, of all its CTAs together."""
        addresses, inside, size = self.elements
        sectors = addresses >> np.uint64(5)
        starts = np.ones(sectors.shape, bool)
        starts[:, 1:] = sectors[:, 1:] != sectors[:, :-1]
        if inside is None:
            return int(starts.sum()), size * sectors.size
        starts[:, 1:] |= ~inside[:, :-1]
        return int((starts & inside).sum()), size * int(inside.sum())

    def load(self, memory: GlobalMemory) -> np.ndarray:
        """Its chunks, (CTAs, chunks); zero where it lies outside of its tensor."""
        addresses, inside, size = self.elements
        if inside is not None and not inside.any():
            values = np.zeros(addresses.shape, VIEW_CODES[size])
        else:
            values = memory.load(addresses, size)
        if inside is not None:
            values = np.where(inside, values, values.dtype.type(0))
        return np.ascontiguousarray(values).view(VIEW_CODES[CHUNK])

    def store(self, memory: GlobalMemory, chunks: np.ndarray) -> None:
        """Writes its chunks, but for what lies outside of its tensor."""
        addresses, inside, size = self.elements
        if inside is not None and not inside.any():
            return
        memory.store(addresses, np.ascontiguousarray(chunks).view(VIEW_CODES[size]), inside)


@dataclass(frozen=True)
class Stretch(Region):
    """Consecutive bytes from `starts` on, (CTAs) u8."""

    starts: np.ndarray
    size: int

    @property
    def num_bytes(self) -> int:
        """See Region."""
        return self.size

    def of(self, rows: np.ndarray) -> "Stretch":
        """See Region."""
        return replace(self, starts=self.starts[rows])

    @property
    def elements(self) -> tuple[np.ndarray, None, int]:
        """See Region."""
        return self.starts[:, None] + np.arange(0, self.size, CHUNK, dtype=np.uint64), None, CHUNK

    def places(self, address: int) -> np.ndarray:
        """See Region."""
        return address + np.arange(0, self.size, CHUNK)


@dataclass(frozen=True)
class Tile(Region):
    """A box of a tensor that begins at `coordinates`, (CTAs, rank) i8, which may be any integers."""

    map: TensorMap
    coordinates: np.ndarray

    @property
    def num_bytes(self) -> int:
        """See Region."""
        return int(np.prod(self.map.box)) * self.map.element_bytes

    @property
    def start(self) -> np.ndarray:
        """Where its rows begin along dimension 0, in bytes, (CTAs): a multiple of 16 (PTX ISA, 5.5.3.1)."""
        return np.asarray(self.coordinates[:, 0] * self.map.element_bytes)

    @property
    def is_cut_within_chunks(self) -> bool:
        """Whether the tensor ends in the midst of 16 bytes of its rows. What a store does then is not known: an H200
        writes other bytes than those of the elements inside."""
        edge = self.map.dims[0] * self.map.element_bytes
        inside = (self.start < edge) & (edge < self.start + self.map.box[0] * self.map.element_bytes)
        return bool(edge % CHUNK and inside.any())

    @property
    def begins_before(self) -> bool:
        """Whether it begins before its tensor along some dimension. To an H200 a store of such a tile is an illegal
        instruction, though PTX names no such limit (5.5.3.3)."""
        return bool((self.coordinates < 0).any())

    def of(self, rows: np.ndarray) -> "Tile":
        """See Region."""
        return replace(self, coordinates=self.coordinates[rows])

    @cached_property
    def elements(self) -> tuple[np.ndarray, np.ndarray | None, int]:
        """See Region. In the place of an address outside of the tensor stands that of an element inside, if any is:
        the tensor's own need not be in memory."""
        tensor, size = self.map, self.map.element_bytes
        unit = size if tensor.dims[0] * size % CHUNK else CHUNK
        starts = [self.start // unit, *self.coordinates.T[1:]]
        extents = [tensor.dims[0] * size // unit, *tensor.dims[1:]]
        strides = [unit, *tensor.strides]
        offsets, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), bool)
        for start, steps, extent, stride in zip(starts, _steps(tensor.box, size, unit), extents, strides, strict=True):
            place = start[:, None] + steps
            inside = inside & (place >= 0) & (place < extent)
            offsets = offsets + place * stride
        addresses = offsets.astype(np.uint64) + np.uint64(tensor.address)
        if inside.all():
            return addresses, None, unit
        one = np.unravel_index(inside.argmax(), inside.shape)
        return np.where(inside, addresses, addresses[one] if inside[one] else np.uint64(tensor.address)), inside, unit

    def places(self, address: int) -> np.ndarray:
        """See Region. A row takes the whole span of its swizzle."""
        return _places(self.map, address)


@lru_cache(maxsize=256)
def _steps(box: tuple[int, ...], size: int, unit: int) -> tuple[np.ndarray, ...]:
    """How far each element of a box is from its beginning, along each dimension; along dimension 0 by `unit` bytes."""
    extents = (*reversed(box[1:]), box[0] * size // unit)
    return tuple(step.reshape(-1) for step in reversed(np.indices(extents)))


@lru_cache(maxsize=1024)
def _places(tensor: TensorMap, address: int) -> np.ndarray:
    row_bytes = tensor.box[0] * tensor.element_bytes
    pitch = max(row_bytes, tensor.swizzle_bytes)
    plain = np.arange(0, int(np.prod(tensor.box[1:])) * pitch, pitch)[:, None] + np.arange(0, row_bytes, CHUNK)
    found = swizzled(address + plain.reshape(-1), max(tensor.swizzle_bytes // CHUNK, 1))
    found.setflags(write=False)
    return found
