"""One warp index across all CTAs of a chunk: its registers, and what the generated code asks of the machine.

All arrays are (1 or CTAs, 1 or 32): CTA, lane. A mask tells the active lanes; None means all of all CTAs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import exchange
from .copies import Copy, CopyQueue
from .errors import ConvergenceError, EmulatorError, MemoryAccessError
from .fragments import registers_to_rows, rows_to_registers
from .memory import VIEW_CODES, AccessFault
from .shared import ALL_LANES, WINDOW

if TYPE_CHECKING:
    from .scheduler import Chunk

# Generic addresses of the shared window; global tensors lie at 2**36 and above.
GENERIC_SHARED = 1 << 28
_GENERIC_GLOBAL = 1 << 36


_EVERY_LANE = np.full((1, 1), 0xFFFFFFFF, np.uint32)


def split(values: np.ndarray, code: str, count: int) -> list[np.ndarray]:
    """Elements of 1 to 16 bytes as `count` arrays of numpy type `code`."""
    if count == 1:
        return [values.view(code)]
    parts = values.view(code).reshape(*values.shape, count)
    return [parts[..., n] for n in range(count)]


def join(values: Sequence[np.ndarray], code: str) -> np.ndarray:
    """The inverse of split: the values side by side in one element."""
    if len(values) == 1:
        return values[0].view(VIEW_CODES[values[0].dtype.itemsize])
    shape = np.broadcast_shapes(*(value.shape for value in values))
    parts = np.empty((*shape, len(values)), code)
    for n, value in enumerate(values):
        parts[..., n] = value
    return parts.view(VIEW_CODES[parts.itemsize * len(values)])[..., 0]


class Warp:
    """Warp `index` of every CTA of a chunk. `ready` maps a block to the mask of the lanes that are about to run it."""

    def __init__(self, chunk: "Chunk", index: int, num_threads: int) -> None:
        self.chunk, self.index = chunk, index
        self.registers = [np.zeros((1, 1), code) for code in chunk.program.storage]
        lanes = min(32, num_threads - 32 * index)
        self.live: np.ndarray | None = None if lanes == 32 else (ALL_LANES < lanes)[None]
        self.ready: dict[int, np.ndarray | None] = {0: self.live}
        self.executed = 0
        self.copies = CopyQueue(self._land)
        self._special = chunk.special_registers(index)
        self._local = None

    # -- names

    def special(self, name: str) -> np.ndarray:
        """A special register; clocks count the instructions this warp has executed."""
        if name in ("%clock", "%clock64", "%globaltimer"):
            return np.full((1, 1), self.executed, "u4" if name == "%clock" else "u8")
        found = self._special.get(name)
        if found is None:
            raise EmulatorError(f"the emulator does not know the special register {name}")
        return found

    def address_of(self, name: str, offset: int) -> np.ndarray:
        """The address (1, 1) u8 of a variable in its own space, plus an offset."""
        return np.full((1, 1), self.chunk.machine.addresses[name] + offset, np.uint64)

    def to_generic(self, address: np.ndarray) -> np.ndarray:
        return address + np.uint64(GENERIC_SHARED)

    def from_generic(self, address: np.ndarray) -> np.ndarray:
        return address - np.uint64(GENERIC_SHARED)

    def is_space(self, space: str, address: np.ndarray) -> np.ndarray:
        shared = (address >= GENERIC_SHARED) & (address < _GENERIC_GLOBAL)
        if space == "shared":
            return shared
        return address >= _GENERIC_GLOBAL if space == "global" else np.zeros((1, 1), bool)

    # -- errors

    def _at(self, index: int, row: int, lane: int | None) -> str:
        instruction = self.chunk.program.kernel.instructions[index]
        who = f"CTA {self.chunk.cta_name(row)}, warp {self.index}" + ("" if lane is None else f", lane {lane}")
        return f"{who}, at {instruction.where()}: `{instruction.text}`"

    def _memory_error(self, index: int, fault: AccessFault, width: int) -> MemoryAccessError:
        row, lane = divmod(max(fault.position, 0), width)
        return MemoryAccessError(f"{fault}\n  {self._at(index, row, lane)}")

    def trap(self, index: int, mask: np.ndarray | None) -> None:
        row, lane = (0, 0) if mask is None else (int(n[0]) for n in np.nonzero(mask))
        raise EmulatorError(f"trap\n  {self._at(index, row, lane)}")

    def converged(self, index: int, mask: np.ndarray | None) -> None:
        """Checks that the warps which execute an .aligned instruction do so with all their lanes."""
        if mask is not None:
            self._check_members(index, _EVERY_LANE, mask)

    # -- loads and stores

    def load(self, index: int, space: str, address: np.ndarray, code: str, count: int, mask: np.ndarray | None) -> list[np.ndarray]:
        """`count` arrays of type `code` read from consecutive bytes; zero in inactive lanes."""
        size = np.dtype(code).itemsize * count
        if space == "param":
            offset = int(address.flat[0])
            return split(np.frombuffer(self.chunk.machine.params, VIEW_CODES[size], 1, offset).reshape(1, 1), code, count)
        if space == "generic":
            space, address = self._resolve(index, address, mask)
        if space == "shared":
            return split(self._load_shared(index, address, size, mask), code, count)
        return split(self._load_global(index, address, size, mask), code, count)

    def store(self, index: int, space: str, address: np.ndarray, values: tuple[np.ndarray, ...], code: str, mask: np.ndarray | None) -> None:
        """Writes values side by side."""
        if space == "generic":
            space, address = self._resolve(index, address, mask)
        data = join(values, code)
        if space == "shared":
            self._store_shared(index, address, data, mask)
        else:
            self._store_global(index, address, data, mask)

    def _resolve(self, index: int, address: np.ndarray, mask: np.ndarray | None) -> tuple[str, np.ndarray]:
        """The space of generic addresses, and the addresses in it."""
        shared = self.is_space("shared", address)
        if mask is not None:
            address, shared = np.where(mask, address, 0), shared | ~mask
        if shared.all():
            return "shared", self.from_generic(address)
        if mask is not None:
            shared = shared & mask
        if shared.any():
            raise EmulatorError(f"one access reaches both shared and global memory\n  {self._at(index, 0, None)}")
        return "global", address

    def _load_shared(self, index: int, address: np.ndarray, size: int, mask: np.ndarray | None, collective: bool = False) -> np.ndarray:
        shared = self.chunk.shared
        try:
            groups = shared.groups(address, size, mask)
        except AccessFault as fault:
            raise self._memory_error(index, fault, 32) from None
        shared.count(self.chunk.counters, index, groups, size)
        if self.chunk.race:
            for pattern, rows in groups:
                self.chunk.race.read(self, index, pattern, rows, collective)
        return shared.gather(groups, size)

    def _store_shared(self, index: int, address: np.ndarray, data: np.ndarray, mask: np.ndarray | None) -> None:
        shared, size = self.chunk.shared, data.itemsize
        try:
            groups = shared.groups(address, size, mask)
        except AccessFault as fault:
            raise self._memory_error(index, fault, 32) from None
        shared.count(self.chunk.counters, index, groups, size)
        if self.chunk.race:
            for pattern, rows in groups:
                self.chunk.race.write(self, index, pattern, rows)
        shared.scatter(groups, size, data)

    def _load_global(self, index: int, address: np.ndarray, size: int, mask: np.ndarray | None) -> np.ndarray:
        if mask is not None:
            if not mask.any():
                return np.zeros((1, 1), VIEW_CODES[size])
            address = self._inactive_to_active(address, mask)
        try:
            values = self.chunk.machine.memory.load(address, size)
        except AccessFault as fault:
            raise self._memory_error(index, fault, address.shape[1]) from None
        self.chunk.count_global(index, address, size, mask)
        return values

    def _store_global(self, index: int, address: np.ndarray, data: np.ndarray, mask: np.ndarray | None) -> None:
        if mask is not None:
            if not mask.any():
                return
            address = self._inactive_to_active(address, mask)
        shape = (max(address.shape[0], data.shape[0]), 32)
        try:
            self.chunk.machine.memory.store(np.broadcast_to(address, shape), data, mask)
        except AccessFault as fault:
            raise self._memory_error(index, fault, 32) from None
        self.chunk.count_global(index, address, data.itemsize, mask)

    @staticmethod
    def _inactive_to_active(address: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Addresses in which an inactive lane repeats an active one, of its own CTA if there is one."""
        shape = np.broadcast_shapes(address.shape, mask.shape)
        address, mask = np.broadcast_to(address, shape), np.broadcast_to(mask, shape)
        own = np.take_along_axis(address, mask.argmax(axis=1)[:, None], axis=1)
        some = own[int(np.argmax(mask.any(axis=1)))]
        return np.where(mask, address, np.where(mask.any(axis=1)[:, None], own, some))

    def atomic(
        self, index: int, space: str, name: str, address: np.ndarray, values: tuple[np.ndarray, ...], code: str, mask: np.ndarray | None
    ) -> np.ndarray:
        """atom and red, one lane after the other in CTA and lane order; the old values."""
        if space == "generic":
            space, address = self._resolve(index, address, mask)
        shape = (len(self.chunk.cta_ids), 32)
        address, *operands = (np.broadcast_to(part, shape) for part in (address, *values))
        old = np.zeros(shape, code)
        for row, lane in np.argwhere(np.broadcast_to(True if mask is None else mask, shape)).tolist():
            view, element = self._atomic_cell(index, space, row, lane, int(address[row, lane]), code)
            old[row, lane] = view[element]
            view[element] = exchange.atomic_function(name, old[row, lane], [operand[row, lane] for operand in operands])
        return old

    def _atomic_cell(self, index: int, space: str, row: int, lane: int, address: int, code: str) -> tuple[np.ndarray, int]:
        """One element of global or shared memory: an array of type `code` and the element's index in it."""
        where, size = np.full((1, 1), address, np.uint64), np.dtype(code).itemsize
        try:
            if space == "global":
                return self.chunk.machine.memory.cell(where, code)
            (pattern, _), = self.chunk.shared.groups(where, size, None)
        except AccessFault as fault:
            raise self._memory_error(index, AccessFault(32 * row + lane, str(fault)), 32) from None
        return self.chunk.shared.views[size][row].view(code), int(pattern.elements[0])

    # -- exchanges

    def shuffle(
        self, index: int, mode: str, value: np.ndarray, lane: np.ndarray, clamp: np.ndarray, members: np.ndarray, mask: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        self._check_members(index, members, mask)
        return exchange.shuffle(mode, value, lane, clamp)

    def vote(self, index: int, mode: str, predicate: np.ndarray, members: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        return exchange.vote(mode, predicate, self._check_members(index, members, mask))

    def reduce(self, index: int, name: str, value: np.ndarray, members: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        return exchange.reduce(name, value, self._check_members(index, members, mask))

    def sync_warp(self, index: int, members: np.ndarray, mask: np.ndarray | None) -> None:
        """bar.warp.sync: orders the lanes' earlier accesses before their later ones."""
        self._check_members(index, members, mask)
        if self.chunk.race:
            self.chunk.race.sync_warp(self.index, self.chunk.rows(mask))

    def active_mask(self, mask: np.ndarray | None) -> np.ndarray:
        lanes = np.ones((1, 32), bool) if mask is None else np.broadcast_to(mask, (mask.shape[0], 32))
        return exchange.vote("ballot", lanes, lanes)

    def _check_members(self, index: int, members: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """The member lanes of a .sync instruction, (1 or CTAs, 32), after checking that they are all here."""
        wanted = members.astype(np.int64) >> ALL_LANES & 1 == 1
        if mask is not None:
            here = np.broadcast_to(mask, (mask.shape[0], 32))
            missing = wanted & ~here & here.any(axis=1)[:, None]
            if missing.any():
                row = int(np.argmax(missing.any(axis=1)))
                lanes = np.nonzero(missing[row])[0].tolist()
                raise ConvergenceError(f"a warp-wide instruction that names lanes {lanes}, which are elsewhere\n  {self._at(index, row, None)}")
        return wanted

    # -- matrices

    def load_matrix(self, index: int, address: np.ndarray, count: int, trans: bool, mask: np.ndarray | None) -> np.ndarray:
        """ldmatrix.x`count`: registers (count, CTAs, 32) u4."""
        self.converged(index, mask)
        rows = self._load_shared(index, *self._row_addresses(address, 8 * count, mask), collective=True)
        return rows_to_registers(np.ascontiguousarray(rows[:, : 8 * count]), trans)

    def store_matrix(self, index: int, address: np.ndarray, values: tuple[np.ndarray, ...], trans: bool, mask: np.ndarray | None) -> None:
        """stmatrix of len(values) matrices."""
        self.converged(index, mask)
        address, size, mask = self._row_addresses(address, 8 * len(values), mask)
        rows = registers_to_rows(values, trans)
        data = np.zeros((rows.shape[0], 32), rows.dtype)
        data[:, : rows.shape[1]] = rows
        self._store_shared(index, address, data, mask)

    @staticmethod
    def _row_addresses(address: np.ndarray, num_rows: int, mask: np.ndarray | None) -> tuple[np.ndarray, int, np.ndarray | None]:
        """Only the first `num_rows` lanes name rows (of 16 bytes)."""
        if num_rows < 32:
            first = (ALL_LANES < num_rows)[None]
            mask = first if mask is None else mask & first
        return np.broadcast_to(address, (address.shape[0], 32)), 16, mask

    # -- asynchronous copies

    def copy_async(
        self, index: int, target: np.ndarray, source: np.ndarray, size: int, source_size: np.ndarray | None, mask: np.ndarray | None
    ) -> None:
        """cp.async of `size` bytes a lane, of which those beyond `source_size` become zero."""
        data = self._copy_source(index, source, size, source_size, mask)
        shared = self.chunk.shared
        try:
            groups = shared.groups(target, size, mask)
        except AccessFault as fault:
            raise self._memory_error(index, fault, 32) from None
        shared.count(self.chunk.counters, index, groups, size)
        if self.chunk.race:
            for pattern, rows in groups:
                self.chunk.race.issue_copy(self, index, pattern, rows)
        if not self.chunk.lazy_copies:
            shared.scatter(groups, size, data)
        self.copies.issue(index, target, size, data, mask)

    def _copy_source(self, index: int, source: np.ndarray, size: int, source_size: np.ndarray | None, mask: np.ndarray | None) -> np.ndarray:
        if source_size is None or (source_size == size).all():
            return self._load_global(index, source, size, mask)
        whole = source_size == size
        data = self._load_global(index, source, size, whole if mask is None else mask & whole)
        data = np.where(whole, data, data.dtype.type(0))
        part = ~whole & (source_size > 0) if mask is None else ~whole & (source_size > 0) & mask
        if part.any():
            data = self._partial_source(index, source, size, source_size, part, data)
        return data

    def _partial_source(
        self, index: int, source: np.ndarray, size: int, source_size: np.ndarray, part: np.ndarray, data: np.ndarray
    ) -> np.ndarray:
        """`data` with the lanes of `part` replaced by their first source_size bytes and zeros."""
        shape = np.broadcast_shapes(data.shape, source.shape, source_size.shape)
        octets = np.zeros((*shape, size), np.uint8)
        for n in range(size):
            wanted = part & (source_size > n)
            if wanted.any():
                octets[..., n] = np.where(wanted, self._load_global(index, source + np.uint64(n), 1, wanted), 0)
        return np.where(part, octets.view(data.dtype)[..., 0], data)

    def _land(self, copy: Copy) -> None:
        shared = self.chunk.shared
        groups = shared.groups(copy.address, copy.size, copy.mask)
        if self.chunk.race:
            for pattern, rows in groups:
                self.chunk.race.land_copy(self, copy.index, pattern, rows)
        if self.chunk.lazy_copies:
            shared.scatter(groups, copy.size, copy.data)
