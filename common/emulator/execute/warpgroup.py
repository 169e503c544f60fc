"""wgmma: products of a warpgroup, four warps that multiply together, beside which they go on (PTX ISA, 9.7.15).

A product is started, committed to a group, and waited for. It lands as late as PTX allows: at the first wait_group of
one of the four warps that names its group. Only then are its operands read from shared memory (without `lazy_copies`:
as soon as it starts), and the accumulators written; inflight.py makes sure that nobody touches these in between, the
race detector that nobody writes the operands.

A group is the warpgroup's (9.7.15.7.2: commit_group creates one "per warpgroup"): a wait_group lets a warp go on when
all four have committed the groups that it waits for, and proves for all four that the operands have been read. CUTLASS
relies on that: its consumers release a stage once a warpgroup. So all rows are multiplied at once, and products that
feed one accumulator become one along k.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..compile.forms import Form
from ..errors import ConvergenceError, MemoryAccessError
from .arrays import Array, Mask, classes, has_lanes
from .chunk import Chunk, Waiting, Warp
from .counters import WAVEFRONT_BYTES
from .fragments import accumulators_of
from .products import Started, part_of, product_of_chain, read_early, summed, units_read, value_at
from .watcher import AgentAccess

NUM_WARPS = 4


@dataclass(frozen=True)
class WaitCall:
    """wgmma.wait_group: see GateCall."""

    index: int
    pending: int

    def enter(self, chunk: Chunk, warp: Warp, mask: Mask, block: int) -> None:
        """See GateCall."""
        warp.converged(self.index, mask)
        warpgroup_of(warp).wait(Waiting(warp, block + 1, mask), self.pending)


def warpgroup_of(warp: Warp) -> "Warpgroup":
    """The warpgroup that a warp belongs to: its products, a gate of the chunk."""
    number = warp.index // NUM_WARPS
    return warp.chunk.gate(f"warpgroup {number}", lambda: Warpgroup(warp.chunk, number))


class Warpgroup:
    """Four consecutive warps of every CTA of a chunk, and their products in flight."""

    def __init__(self, chunk: Chunk, number: int) -> None:
        self._chunk = chunk
        self._warps = chunk.warps[NUM_WARPS * number : NUM_WARPS * (number + 1)]
        num_ctas = len(chunk.cta_ids)
        self._commits = np.zeros((NUM_WARPS, num_ctas), np.int64)
        self._started: list[list[Started]] = [[] for _ in range(NUM_WARPS)]
        self._unread: list[Started] = []  # of the warp that runs, what the watcher has not been told
        self._waits: list[tuple[Waiting, int, np.ndarray]] = []  # pending groups that are allowed, groups awaited

    @property
    def waiting(self) -> list[Waiting]:
        """See Gate."""
        return [each for each, _, _ in self._waits]

    # -- what a warp does

    def start(
        self, warp: Warp, form: Form, a: tuple[Array, ...], b: Array, adds: Array, more: bool, mask: Mask
    ) -> None:
        """wgmma.mma_async. With `more` another one follows at once: the watcher is told of them together."""
        warp.converged(form.index, mask)
        rows = self._rows(mask)
        if len(self._warps) < NUM_WARPS:
            raise ConvergenceError(f"a warpgroup of fewer than four warps\n  {warp.at(form.index, 0)}")
        if not form.a_in_registers:
            a = (_uniform(warp, form, a[0], rows),)
        b, adds = _uniform(warp, form, b, rows), _uniform(warp, form, adds, rows)
        started = Started(form, rows, self._commits[warp.index % NUM_WARPS].copy(), a, b, adds)
        if not self._chunk.machine.lazy_copies:
            started = read_early(self._chunk.shared.views[16], started, warp.index % NUM_WARPS)
        self._started[warp.index % NUM_WARPS].append(started)
        self._unread.append(started)
        self._count(warp, form, int(rows.sum()))
        if not more:
            self._tell(warp)

    def _count(self, warp: Warp, form: Form, ctas: int) -> None:
        """Adds what a product reads of shared memory, once for its four warps. In each of PTX's layouts 8 rows of a
        chunk lie in different banks, and are one wavefront."""
        read = 0 if warp.index % NUM_WARPS else ctas * form.shared_bytes
        wavefronts = read // WAVEFRONT_BYTES
        self._chunk.counters.shared[form.index].add(ctas, wavefronts, wavefronts, read, read // 4)

    def _tell(self, warp: Warp) -> None:
        """Checks what the products read that this warp has started since the last call, and tells the watcher."""
        products, self._unread = self._unread, []
        rows = products[0].rows
        if self._chunk.watcher:
            starting = None if rows.all() else np.nonzero(rows)[0]
            self._chunk.watcher.wgmma_starts(warp, [product.form.index for product in products], starting)
        for chosen in classes(rows, [each[:, 0] for product in products for each in product.matrices if len(each) > 1]):
            row = int(np.argmax(chosen))
            parts = tuple(
                (product.form.shape, tuple(value_at(each, row) for each in product.matrices)) for product in products
            )
            units, index = units_read(parts, warp.index % NUM_WARPS), products[0].form.index
            self._check_bounds(warp, index, row, units)
            if self._chunk.watcher:
                where = None if chosen.all() else np.nonzero(chosen)[0]
                granule = self._chunk.machine.granule
                self._chunk.watcher.wgmma_reads(AgentAccess(warp, index, None, units, granule, where, "reads by wgmma"))

    def commit(self, warp: Warp, index: int, mask: Mask) -> None:
        """wgmma.commit_group."""
        warp.converged(index, mask)
        self._commits[warp.index % NUM_WARPS] += self._rows(mask)
        if self._chunk.watcher:
            self._chunk.watcher.wgmma_commits(warp, self._chunk.rows(mask))

    def wait(self, each: Waiting, pending: int) -> None:
        """wgmma.wait_group: a warp comes to wait until `pending` groups or fewer are under way."""
        self._waits.append((each, pending, self._commits[each.warp.index % NUM_WARPS] - pending))

    def _rows(self, mask: Mask) -> np.ndarray:
        """The CTAs that a mask has lanes of, as bool."""
        count = self._commits.shape[1]
        return np.ones(count, bool) if mask is None else np.broadcast_to(has_lanes(mask), count)

    def _check_bounds(self, warp: Warp, index: int, row: int, units: np.ndarray) -> None:
        size = self._chunk.machine.shared_bytes
        if units[0] < 0 or units[-1] >= size >> 4:
            at = 16 * int(units[0] if units[0] < 0 else units[-1])
            raise MemoryAccessError(
                f"wgmma reads out of bounds: offset {at} of {size} bytes of shared memory, by its descriptors\n"
                f"  {warp.at(index, row)}"
            )

    # -- the gate

    def open(self, stuck: bool) -> bool:
        """See Gate."""
        common, waits, self._waits = self._commits.min(axis=0), self._waits, []
        opened = False
        for each, pending, needed in waits:
            here = self._rows(each.mask)
            ready = here & (common >= needed)
            if not ready.any() or not (stuck or (ready == here).all()):
                self._waits.append((each, pending, needed))
                continue
            opened = True
            self._land(ready, needed)
            if self._chunk.watcher:
                self._chunk.watcher.wgmma_waits(each.warp, pending, None if ready.all() else np.nonzero(ready)[0])
            if part := each.part(~ready & here):
                self._waits.append((part, pending, needed))
            if part := each.part(ready | ~here):
                part.go_on()
        return opened

    def progress(self, each: Waiting, row: int) -> str:
        """See Gate."""
        needed = next(needed[row] for waiting, _, needed in self._waits if waiting is each)
        late = [str(w.index) for w, count in zip(self._warps, self._commits[:, row], strict=True) if count < needed]
        return f"a wgmma.wait_group (warps {', '.join(late)} of its warpgroup have not committed their products)"

    # -- landing

    def _land(self, rows: np.ndarray, needed: np.ndarray) -> None:
        """Performs the products of groups before `needed` in these CTAs."""
        active = [[each.rows & rows & (each.group < needed) for each in started] for started in self._started]
        signature = [part for parts in active for part in parts]
        if not any(part.any() for part in signature):
            return
        values = [
            np.where(part, value[:, 0], value.dtype.type(0))
            for started, parts in zip(self._started, active, strict=True)
            for each, part in zip(started, parts, strict=True)
            for value in (each.b, each.adds, *(() if each.form.a_in_registers else each.a))
            if len(value) > 1
        ]
        for chosen in classes(rows, [*signature, *values]):
            row = int(np.argmax(chosen))
            self._perform(
                [
                    [each for each, part in zip(started, parts, strict=True) if part[row]]
                    for started, parts in zip(self._started, active, strict=True)
                ],
                chosen,
            )
        self._started = [
            [
                replace(each, rows=left) if part.any() else each
                for each, part in zip(started, parts, strict=True)
                if (left := each.rows & ~part).any()
            ]
            for started, parts in zip(self._started, active, strict=True)
        ]

    def _perform(self, products: list[list[Started]], rows: np.ndarray) -> None:
        """Products of the four warps, in the order in which they were started, alike in all these CTAs."""
        self._check_alike(products, int(np.argmax(rows)))
        chains: dict[tuple[int, ...], list[list[tuple[Started, ...]]]] = {}
        for together in zip(*products, strict=True):
            form = together[0].form
            own = chains.setdefault(form.slots, [])
            if not value_at(together[0].adds, rows):
                own.clear()  # what was summed up before is lost
            if own and own[-1][0][0].form.kind == form.kind:
                own[-1].append(together)
            else:
                own.append([together])
        for own in chains.values():
            for chain in own:
                self._multiply(chain, rows)

    def _check_alike(self, products: list[list[Started]], row: int) -> None:
        """Raises unless the four warps have started the same products on the same matrices."""
        for at in range(max(map(len, products))):
            of_warps = [started[at] if at < len(started) else None for started in products]
            first = next(each for each in of_warps if each)
            for own, each in enumerate(of_warps):
                who = self._warps[own].index
                if each is None or each.form is not first.form:
                    wrong = f"warp {who} of the warpgroup does not execute it"
                elif each.operands_in(row) != first.operands_in(row):
                    wrong = f"its descriptors in warp {who} are not those of another warp of the warpgroup"
                else:
                    continue
                place = self._warps[of_warps.index(first)].at(first.form.index, row)
                raise ConvergenceError(f"a wgmma that the four warps do not execute alike: {wrong}\n  {place}")

    def _multiply(self, chain: list[tuple[Started, ...]], rows: np.ndarray) -> None:
        """A chain of products on one accumulator, alike but for their matrices."""
        form, where = chain[0][0].form, None if rows.all() else np.nonzero(rows)[0]
        adds = bool(value_at(chain[0][0].adds, rows))
        shared = self._chunk.shared.views[16]
        products = accumulators_of(product_of_chain(shared, chain, rows, where))
        for warp, product in zip(self._warps, products, strict=True):
            old = [part_of(warp.registers[slot], where) for slot in form.slots] if adds else None
            results = summed(product, old, form.result)
            for slot, storage, result in zip(form.slots, form.storage, results, strict=True):
                warp.registers[slot] = _merged(warp.registers[slot], result.view(storage), where, len(rows))


def _merged(old: Array, new: Array, where: np.ndarray | None, count: int) -> Array:
    """A register whose value is new in some CTAs."""
    if where is None:
        return new
    whole = np.broadcast_to(old, (count, 32)).copy()
    whole[where] = new
    return whole


def _uniform(warp: Warp, form: Form, values: Array, rows: np.ndarray) -> Array:
    """An operand that all lanes have alike, as (1 or CTAs, 1)."""
    if values.shape[1] > 1:
        differs = (values != values[:, :1]).any(axis=1) & (rows if len(values) > 1 else True)
        if differs.any():
            row = int(np.argmax(differs))
            raise ConvergenceError(
                f"the lanes of a warp give different descriptors or scales\n  {warp.at(form.index, row)}"
            )
    return values[:, :1]
