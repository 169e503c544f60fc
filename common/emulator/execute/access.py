"""What one warp does to memory: loads, stores, atomics, matrix loads, asynchronous copies. Generated code calls it."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from ..errors import MemoryAccessError, UnsupportedInstructionError
from . import exchange
from .arrays import ALL_LANES, Array, Mask, every_lane, first_lanes, has_lanes, narrow
from .bulk import BulkQueue
from .chunk import Warp
from .cluster import ranks_of
from .copies import Copy, CopyQueue
from .fragments import registers_to_rows, rows_to_registers
from .memory import VIEW_CODES, AccessFault, aligned_bytes, typed_views
from .polls import polls_of
from .shared import AccessPattern, Group
from .spaces import resolve
from .watcher import Access


def split(values: Array, code: str, count: int) -> list[Array]:
    """Elements of 1 to 16 bytes as `count` arrays of numpy type `code`."""
    if count == 1:
        return [values.view(code)]
    parts = values.view(code).reshape(*values.shape, count)
    return [parts[..., n] for n in range(count)]


def join(values: Sequence[Array], code: str) -> Array:
    """The inverse of split: the values side by side in one element."""
    if len(values) == 1:
        return values[0].view(VIEW_CODES[values[0].itemsize])
    parts = np.empty((*np.broadcast_shapes(*(value.shape for value in values)), len(values)), code)
    for n, value in enumerate(values):
        parts[..., n] = value
    return parts.view(VIEW_CODES[parts.itemsize * len(values)])[..., 0]


class WarpAccess:
    """The memory side of a warp. Faults become errors that name tensor, CTA, warp, lane and source lines."""

    def __init__(self, warp: Warp) -> None:
        self.warp, self.chunk = warp, warp.chunk
        self.machine = warp.chunk.machine
        self.copies = CopyQueue(self._land)
        self.bulk, self.polls = BulkQueue(warp), polls_of(warp.chunk)
        self._local: dict[int, np.ndarray] | None = None

    def _error(self, index: int, fault: AccessFault) -> MemoryAccessError:
        return MemoryAccessError(f"{fault}\n  {self.warp.at(index, *divmod(fault.culprit, 32))}")

    def _global_error(self, index: int, fault: AccessFault, address: Array, mask: Mask) -> MemoryAccessError:
        """Names the first active lane with the address at fault; inactive lanes repeat the addresses of others."""
        wrong = narrow(mask, every_lane(address) == fault.culprit)
        row, lane = (int(n) for n in np.argwhere(wrong)[0])
        return self._error(index, AccessFault(32 * row + lane, str(fault)))

    # -- loads and stores

    def load(self, index: int, space: str, address: Array, code: str, count: int, mask: Mask) -> list[Array]:
        """`count` arrays of type `code` read from consecutive bytes; zero in inactive lanes."""
        size = np.dtype(code).itemsize * count
        if space == "generic":
            space, address = resolve(self.warp, index, address, mask)
        if space == "param":
            return split(self._load_param(index, address, size, mask), code, count)
        if space == "shared":
            return split(self._load_shared(index, address, size, mask), code, count)
        if space == "local":
            return split(self._local_cells(index, address, size, mask)[0], code, count)
        return split(self._load_global(index, address, size, mask), code, count)

    def look(self, index: int, space: str, address: Array, code: str, count: int, mask: Mask) -> list[Array]:
        """A strong load: it may look at what other CTAs write."""
        if space == "generic":
            space, address = resolve(self.warp, index, address, mask)
        values = self.load(index, space, address, code, count, mask)
        if space == "global":
            self.polls.note(self.warp, index, address, join(values, code), mask)
        return values

    def store(self, index: int, space: str, address: Array, values: tuple[Array, ...], code: str, mask: Mask) -> None:
        """Writes values side by side."""
        if space == "generic":
            space, address = resolve(self.warp, index, address, mask)
        data = join(values, code)
        if space == "shared":
            self._store_shared(index, address, data, mask)
        elif space == "local":
            old, view, cells = self._local_cells(index, address, data.itemsize, mask)
            view[cells] = data if mask is None else np.where(mask, data, old)
        else:
            self._store_global(index, address, data, mask)

    def _load_param(self, index: int, address: Array, size: int, mask: Mask) -> Array:
        params = np.frombuffer(self.machine.params + bytes(-len(self.machine.params) % size), VIEW_CODES[size])
        place = address if mask is None else np.where(mask, address, np.uint64(0))
        wrong = (place % np.uint64(size) != 0) | (place + np.uint64(size) > len(self.machine.params))
        if wrong.any():
            fault = f"{size}-byte read of the parameters out of bounds or misaligned"
            raise self._error(index, AccessFault(int(np.argmax(np.broadcast_to(wrong, (len(wrong), 32)))), fault))
        return params.take((place // np.uint64(size)).astype(np.int64))

    def _groups(self, index: int, address: Array, size: int, mask: Mask) -> list[Group]:
        """The accesses to shared memory, counted."""
        try:
            groups = self.chunk.shared.groups(address, size, mask)
        except AccessFault as fault:
            raise self._error(index, fault) from None
        self.chunk.shared.count(self.chunk.counters, index, groups, size)
        return groups

    def _load_shared(self, index: int, address: Array, size: int, mask: Mask, collective: bool = False) -> Array:
        if self.machine.maps_addresses and ranks_of(address).any():
            return self._load_cluster(index, address, size, mask)
        groups = self._groups(index, address, size, mask)
        if watcher := self.chunk.watcher:
            for pattern, rows in groups:
                watcher.read(Access(self.warp, index, pattern, rows, "reads", collective))
        return self.chunk.shared.gather(groups, size)

    def _store_shared(self, index: int, address: Array, data: Array, mask: Mask) -> None:
        if self.machine.maps_addresses and ranks_of(address).any():
            self._store_cluster(index, address, data, mask)
            return
        groups = self._groups(index, address, data.itemsize, mask)
        if watcher := self.chunk.watcher:
            for pattern, rows in groups:
                watcher.write(Access(self.warp, index, pattern, rows, "writes"))
        self.chunk.shared.scatter(groups, data.itemsize, data)
        if watcher and any(pattern.repeated.any() for pattern, _ in groups):
            kept = self.chunk.shared.gather(groups, data.itemsize)
            watcher.check_agreement(Access(self.warp, index, groups[0][0], None, "writes"), narrow(mask, kept != data))

    def _load_cluster(self, index: int, address: Array, size: int, mask: Mask) -> Array:
        """A load from the shared memory of CTAs of the cluster."""
        result = np.zeros((len(self.chunk.cta_ids), 32), VIEW_CODES[size])
        for rank, places, lanes in self.chunk.cluster.by_rank(address, mask):
            for pattern, rows, where in self._cluster_groups(index, places, size, lanes, rank):
                if watcher := self.chunk.watcher:
                    watcher.read(Access(self.warp, index, pattern, rows, "reads"), at=rank - 1 if rank else None)
                chosen = np.arange(len(result)) if rows is None else rows
                found = self.chunk.shared.views[size][where[:, None], pattern.elements]
                result[chosen[:, None], pattern.lanes] = found
        return result

    def _store_cluster(self, index: int, address: Array, data: Array, mask: Mask) -> None:
        """A store to the shared memory of CTAs of the cluster."""
        data = np.broadcast_to(data, (len(self.chunk.cta_ids), 32))
        for rank, places, lanes in self.chunk.cluster.by_rank(address, mask):
            for pattern, rows, where in self._cluster_groups(index, places, data.itemsize, lanes, rank):
                if watcher := self.chunk.watcher:
                    watcher.write(Access(self.warp, index, pattern, rows, "writes"), at=rank - 1 if rank else None)
                chosen = np.arange(len(data)) if rows is None else rows
                self.chunk.shared.views[data.itemsize][where[:, None], pattern.elements] = data[chosen][
                    :, pattern.lanes
                ]

    def _cluster_groups(
        self, index: int, address: Array, size: int, mask: Mask, rank: int
    ) -> Iterator[tuple[AccessPattern, np.ndarray | None, np.ndarray]]:
        """The accesses to a rank's memory (plus 1; 0: the own CTA's): pattern, CTAs, and the CTAs that they reach."""
        for pattern, rows in self._groups(index, address, size, mask):
            who = np.arange(len(self.chunk.cta_ids)) if rows is None else rows
            yield pattern, rows, self.chunk.cluster.rows_of(who, rank - 1) if rank else who

    def _load_global(self, index: int, address: Array, size: int, mask: Mask) -> Array:
        if mask is not None:
            if not mask.any():
                return np.zeros((1, 1), VIEW_CODES[size])
            address = _only_active(address, mask)
        try:
            values = self.machine.memory.load(address, size)
        except AccessFault as fault:
            raise self._global_error(index, fault, address, mask) from None
        self.chunk.count_global(index, address, size, mask)
        if self.chunk.watcher:
            self.chunk.watcher.global_access(self.warp, index, address, size, mask, "reads it")
        return values

    def _store_global(self, index: int, address: Array, data: Array, mask: Mask) -> None:
        if mask is not None:
            if not mask.any():
                return
            address = _only_active(address, mask)
        everywhere = np.broadcast_to(address, (max(address.shape[0], data.shape[0]), 32))
        try:
            self.machine.memory.store(everywhere, data, mask)
        except AccessFault as fault:
            raise self._global_error(index, fault, everywhere, mask) from None
        self.machine.global_writes += 1
        if self.chunk.watcher:
            self.chunk.watcher.global_access(self.warp, index, everywhere, data.itemsize, mask, "writes it")
        self.chunk.count_global(index, address, data.itemsize, mask)

    def _local_cells(
        self, index: int, address: Array, size: int, mask: Mask
    ) -> tuple[Array, np.ndarray, tuple[np.ndarray, np.ndarray, Array]]:
        """Every thread's own memory: the elements at `address`, their array (CTAs, 32, elements), their index in it."""
        num_ctas, per_thread = len(self.chunk.cta_ids), self.machine.local_bytes
        if self._local is None:
            self._local = typed_views(aligned_bytes(num_ctas, 32, per_thread))
        address = address.astype(np.int64) if mask is None else np.where(mask, address, 0).astype(np.int64)
        wrong = (address < 0) | (address + size > per_thread) | (address % size != 0)
        if wrong.any():
            position = int(np.argmax(np.broadcast_to(wrong, (num_ctas, 32))))
            raise self._error(
                index, AccessFault(position, f"{size}-byte access to local memory out of bounds or misaligned")
            )
        view, cells = self._local[size], (np.arange(num_ctas)[:, None], ALL_LANES[None], address // size)
        return view[cells], view, cells

    def atomic(
        self,
        index: int,
        space: str,
        name: str,
        address: Array,
        values: tuple[Array, ...],
        code: str,
        mask: Mask,
        elements: int = 1,
    ) -> Array:
        """atom and red, one lane after the other in CTA and lane order, sums that meet nowhere at once; the old values.

        More elements than one lie one behind the other, in global memory, and each has one of the values.
        """
        if space == "generic":
            space, address = resolve(self.warp, index, address, mask)
        if (space, name, code) == ("global", "add", "f4"):
            name = "add.ftz"  # of f32 the hardware flushes subnormals there, but not in shared memory (PTX ISA, "atom")
        size, shape = np.dtype(code).itemsize, (len(self.chunk.cta_ids), 32)
        if space == "shared" and self.machine.maps_addresses and ranks_of(address).any():
            what = "atomic operations on another CTA's shared memory"
            raise UnsupportedInstructionError(f"{what}\n  {self.warp.at(index, 0)}")
        if space == "shared":
            groups = self._groups(index, address, size, mask)
            if watcher := self.chunk.watcher:
                for pattern, rows in groups:
                    watcher.atomic(Access(self.warp, index, pattern, rows, "updates"))
        address, *operands = (np.broadcast_to(part, shape) for part in (address, *values))
        old, changes = np.zeros(shape, code), False
        chosen = np.broadcast_to(True if mask is None else mask, shape)
        is_sum = space == "global" and name in ("add", "add.ftz")
        element_addresses = address[chosen][:, None] + np.arange(0, elements * size, size, dtype=np.uint64)
        if cells := self.machine.memory.cells(element_addresses, code) if is_sum else None:
            view, at = cells
            before = view[at]
            summands = np.stack([operand[chosen] for operand in operands], axis=-1)
            view[at] = exchange.atomic_function(name, before, [summands])
            old[chosen] = before[:, -1]
            changes = (view[at] != before).any()
        lanes = [] if cells else np.argwhere(chosen).tolist()
        for (row, lane), n in product(lanes, range(elements)):
            where = address[row : row + 1, lane : lane + 1] + n * size
            try:
                if space == "global":
                    view, element = self.machine.memory.cell(where, code)
                else:
                    ((pattern, _),) = self.chunk.shared.patterns.find(where, size, None)
                    view, element = self.chunk.shared.views[size][row].view(code), int(pattern.elements[0])
            except AccessFault as fault:
                raise self._error(index, AccessFault(32 * row + lane, str(fault))) from None
            old[row, lane] = view[element]
            given = [operand[row, lane] for operand in (operands if elements == 1 else operands[n : n + 1])]
            view[element] = exchange.atomic_function(name, view[element], given)
            changes |= space == "global" and view[element] != old[row, lane]
        if space == "global":
            self.machine.global_writes += bool(changes)
            if mask is None or mask.any():
                active = _only_active(address, mask)
                self.chunk.count_global(index, active, size * elements, mask)
                if self.chunk.watcher:
                    self.chunk.watcher.global_access(self.warp, index, active, size * elements, mask, "updates it")
            self.polls.note(self.warp, index, address, old, mask)
        return old

    # -- matrices

    def load_matrix(self, index: int, address: Array, count: int, trans: bool, mask: Mask) -> np.ndarray:
        """ldmatrix.x`count`: registers (count, CTAs, 32) u4."""
        self.warp.converged(index, mask)
        rows = self._load_shared(
            index, every_lane(address), 16, narrow(mask, first_lanes(8 * count)) if count < 4 else mask, collective=True
        )
        return rows_to_registers(rows if count == 4 else np.ascontiguousarray(rows[:, : 8 * count]), trans)

    def store_matrix(self, index: int, address: Array, values: tuple[Array, ...], trans: bool, mask: Mask) -> None:
        """stmatrix of len(values) matrices."""
        self.warp.converged(index, mask)
        rows = registers_to_rows(values, trans)
        data = np.zeros((rows.shape[0], 32), rows.dtype)
        data[:, : rows.shape[1]] = rows
        self._store_shared(index, every_lane(address), data, narrow(mask, first_lanes(8 * len(values))))

    # -- asynchronous copies

    def copy_async(
        self, index: int, target: Array, source: Array, size: int, source_size: Array | None, mask: Mask
    ) -> None:
        """cp.async of `size` bytes a lane, of which those beyond `source_size` become zero."""
        data = self._copy_source(index, source, size, source_size, mask)
        groups = self._groups(index, target, size, mask)
        if watcher := self.chunk.watcher:
            for pattern, rows in groups:
                watcher.issue_copy(Access(self.warp, index, pattern, rows, "issues a copy to it"))
        if not self.machine.lazy_copies:
            self.chunk.shared.scatter(groups, size, data)
        self.copies.issue(index, target, size, data, mask)

    def _copy_source(self, index: int, source: Array, size: int, source_size: Array | None, mask: Mask) -> Array:
        if source_size is None or (source_size == size).all():
            return self._load_global(index, source, size, mask)
        whole = source_size == size
        data = self._load_global(index, source, size, narrow(mask, whole))
        data = np.where(whole, data, data.dtype.type(0))
        part = narrow(mask, ~whole & (source_size > 0))
        if part.any():
            octets = np.zeros((*np.broadcast_shapes(data.shape, source.shape, part.shape), size), np.uint8)
            for n in range(size):
                wanted = part & (source_size > n)
                octets[..., n] = np.where(wanted, self._load_global(index, source + np.uint64(n), 1, wanted), 0)
            data = np.where(part, octets.view(data.dtype)[..., 0], data)
        return data

    def _land(self, copy: Copy) -> None:
        shared = self.chunk.shared
        groups = shared.groups(copy.address, copy.size, copy.mask)
        if watcher := self.chunk.watcher:
            for pattern, rows in groups:
                watcher.land_copy(Access(self.warp, copy.index, pattern, rows, "waits for its copy"))
        if self.machine.lazy_copies:
            shared.scatter(groups, copy.size, copy.data)


def _only_active(address: Array, mask: Mask) -> Array:
    """Addresses in which an inactive lane repeats an active one, of its own CTA if there is one."""
    if mask is None:
        return address
    shape = np.broadcast_shapes(address.shape, mask.shape)
    address, mask = np.broadcast_to(address, shape), np.broadcast_to(mask, shape)
    has_active = has_lanes(mask)
    own = np.take_along_axis(address, mask.argmax(axis=1)[:, None], axis=1)
    return np.where(mask, address, np.where(has_active[:, None], own, own[int(np.argmax(has_active))]))
