"""Global memory: named tensors, each far from the next in a 47-bit address space, so that a stray access hits none."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import MemoryAccessError

_SPACING_BITS = 36  # a tensor every 64 GiB: an index that overflows 32 bits still lands between tensors
GLOBAL_START = 1 << _SPACING_BITS
VIEW_CODES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def typed_views(data: np.ndarray) -> dict[int, np.ndarray]:
    """The same bytes as elements of 1, 2, 4, 8 and 16 bytes. The last axis is a multiple of 16 bytes."""
    return {size: data.view(code) for size, code in VIEW_CODES.items()}


def aligned_bytes(*shape: int) -> np.ndarray:
    """A byte array aligned to 16, its last axis rounded up to 16; filled with 0xFF: NaN in every float type."""
    data = np.empty((*shape[:-1], -(-shape[-1] // 16)), np.complex128).view(np.uint8)
    data[...] = 0xFF
    return data


def _all_ones(size: int) -> np.ndarray:
    """`size` bytes of True as one element."""
    return np.ones(size, np.uint8).view(VIEW_CODES[size])


@dataclass
class Tensor:
    """One allocation. `written` (bool per byte) is kept where reading before writing is an error."""

    name: str
    base: int
    size: int
    views: dict[int, np.ndarray]
    readonly: bool
    written: np.ndarray | None


class GlobalMemory:
    """The tensors a kernel can reach, and the constants of its module."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self.stored_to: set[str] = set()  # names of tensors, since somebody cleared it

    def add(self, name: str, array: np.ndarray, readonly: bool = False, initialised: bool = True) -> int:
        """Copies an array's bytes in.

        Args:
            name: what error messages call it.
            array: any contiguous array; its storage is what the kernel sees.
            readonly: a write raises.
            initialised: False for an output: reading a byte that was not written raises.

        Returns:
            Its device address, aligned to 2**36.
        """
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data = aligned_bytes(max(raw.size, 1))
        data[: raw.size] = raw
        base = (len(self._tensors) + 1) << _SPACING_BITS
        written = None if initialised else np.zeros(data.size, bool)
        self._tensors.append(Tensor(name, base, raw.size, typed_views(data), readonly, written))
        return base

    def read(self, name: str) -> np.ndarray:
        """A copy of a tensor's bytes."""
        tensor = self._named(name)
        return tensor.views[1][: tensor.size].copy()

    def _named(self, name: str) -> Tensor:
        return next(tensor for tensor in self._tensors if tensor.name == name)

    def find(self, first: int, last: int) -> Tensor | None:
        """The tensor that holds the bytes first..last (inclusive), if one holds them all."""
        index = (first >> _SPACING_BITS) - 1
        if 0 <= index < len(self._tensors):
            tensor = self._tensors[index]
            if last < tensor.base + tensor.size:
                return tensor
        return None

    def describe(self, address: int) -> str:
        """An address in words, by the nearest tensor: `tensor v, byte offset 4608 of 4096`."""
        nearest = ((address + GLOBAL_START // 2) >> _SPACING_BITS) - 1
        if not 0 <= nearest < len(self._tensors):
            return f"address {address:#x}, which belongs to no tensor"
        tensor = self._tensors[nearest]
        offset = address - tensor.base
        if offset < 0:
            return f"{-offset} bytes before tensor {tensor.name}"
        return f"tensor {tensor.name}, byte offset {offset} of {tensor.size}"

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Elements of `size` bytes at addresses (u8, any shape).

        Raises:
            AccessFault: out of bounds, misaligned, or never written.
        """
        tensor, index = self._locate(addresses, size, writes=False)
        if tensor is None:
            return self._by_tensor(addresses, lambda part, chosen: self.load(part, size), VIEW_CODES[size])
        if tensor.written is not None:
            self._check_written(tensor, addresses, index, size)
        return tensor.views[size].take(index)

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray | None) -> None:
        """Writes elements where the mask says; `addresses` has the full shape, and is valid in inactive lanes too."""
        size = values.itemsize
        tensor, index = self._locate(addresses, size, writes=True)
        values = np.broadcast_to(values, addresses.shape)
        if mask is not None:
            mask = np.broadcast_to(mask, addresses.shape)
        if tensor is None:
            self._by_tensor(addresses, lambda part, chosen: self._store_part(part, values, mask, chosen), "?")
            return
        if mask is not None:
            index, values = index[mask], values[mask]
        tensor.views[size][index] = values
        self.stored_to.add(tensor.name)
        if tensor.written is not None:
            tensor.written.view(VIEW_CODES[size])[index] = _all_ones(size)

    def cell(self, address: np.ndarray, code: str) -> tuple[np.ndarray, int]:
        """One element (at a (1, 1) address) as an array of numpy type `code` and an index; it counts as written."""
        size = np.dtype(code).itemsize
        tensor, index = self._locate(address, size, writes=True)
        assert tensor is not None
        self.stored_to.add(tensor.name)
        if tensor.written is not None:
            self._check_written(tensor, address, index, size)
        return tensor.views[size].view(code), int(index[0, 0])

    def cells(self, addresses: np.ndarray, code: str) -> tuple[np.ndarray, np.ndarray] | None:
        """The same of several, of any shape; None where two are one, or of different tensors, or one is wrong."""
        size = np.dtype(code).itemsize
        if not addresses.size or len(np.unique(addresses)) < addresses.size:
            return None
        try:
            tensor, index = self._locate(addresses, size, writes=True)
            if tensor is None:
                return None
            if tensor.written is not None:
                self._check_written(tensor, addresses, index, size)
        except AccessFault:
            return None
        self.stored_to.add(tensor.name)
        return tensor.views[size].view(code), index

    def _store_part(
        self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray | None, chosen: np.ndarray
    ) -> bool:
        self.store(addresses, values[chosen], None if mask is None else mask[chosen])
        return True

    def _by_tensor(
        self, addresses: np.ndarray, action: Callable[[np.ndarray, np.ndarray], np.ndarray | bool], code: str
    ) -> np.ndarray:
        """An access whose lanes reach several tensors: one action for each of them."""
        result = np.empty(addresses.shape, code)
        owner = addresses >> np.uint64(_SPACING_BITS)
        for each in np.unique(owner):
            chosen = owner == each
            result[chosen] = action(addresses[chosen], chosen)
        return result

    def _check_written(self, tensor: Tensor, addresses: np.ndarray, index: np.ndarray, size: int) -> None:
        assert tensor.written is not None
        unwritten = tensor.written.view(VIEW_CODES[size]).take(index) != _all_ones(size)
        if unwritten.any():
            address = int(addresses.reshape(-1)[int(np.argmax(unwritten))])
            raise AccessFault(address, f"{size}-byte read of memory that was never written: {self.describe(address)}")

    def _locate(self, addresses: np.ndarray, size: int, writes: bool) -> tuple[Tensor | None, np.ndarray]:
        """The tensor and the element indices of addresses; no tensor if they are all valid but in different ones."""
        owner = (int(addresses.flat[0]) >> _SPACING_BITS) - 1
        if 0 <= owner < len(self._tensors):
            tensor = self._tensors[owner]
            offset = addresses - np.uint64(tensor.base)  # an address below the base wraps round, far beyond the end
            inside = int(offset.max()) <= tensor.size - size
            aligned = not np.bitwise_or.reduce(offset, axis=None) & np.uint64(size - 1)
            if inside and aligned and not (writes and tensor.readonly):
                return tensor, (offset >> np.uint64(size.bit_length() - 1)).view(np.int64)
        if fault := self._fault(addresses, size, writes):
            raise fault
        return None, addresses

    def _fault(self, addresses: np.ndarray, size: int, writes: bool) -> "AccessFault | None":
        """What is wrong with the first address that is wrong."""
        what = "write" if writes else "read"
        for address in addresses.reshape(-1).tolist():
            tensor = self.find(address, address + size - 1)
            if tensor is None:
                return AccessFault(address, f"{size}-byte {what} out of bounds: {self.describe(address)}")
            if address % size:
                return AccessFault(address, f"misaligned {size}-byte {what}: {self.describe(address)}")
            if writes and tensor.readonly:
                return AccessFault(address, f"write to a read-only tensor: {self.describe(address)}")
        return None


class AccessFault(MemoryAccessError):
    """A fault of one lane, to which WarpAccess adds who and where. `culprit` is the address in global memory; in shared
    memory, whose addresses are alike in all CTAs, it is 32 * row + lane."""

    def __init__(self, culprit: int, message: str) -> None:
        super().__init__(message)
        self.culprit = culprit
