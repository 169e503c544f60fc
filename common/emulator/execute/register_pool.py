"""setmaxnreg (PTX ISA 9.7.19.5): the registers that each warp owns, and the pool of its CTA that it gives to and takes
from. An increase waits until the pool has enough."""

from dataclasses import dataclass

import numpy as np

from ..errors import SynchronisationError
from ..parse.ptx import PtxKernel
from .arrays import Mask, has_lanes
from .chunk import Chunk, Waiting, Warp

REGISTER_FILE = 1 << 16  # registers of an SM
_MOST = 256  # a thread
WARPS = 4  # of a warpgroup


def registers_at_launch(kernel: PtxKernel) -> int | None:
    """Registers a thread that a kernel is launched with: its .maxnreg, or what its bounds on threads and CTAs leave it,
    as the compiler gives all of them to a kernel that moves registers. None where nothing bounds them."""
    if "maxnreg" in kernel.directives:
        return kernel.directives["maxnreg"][0]
    threads = kernel.directives.get("reqntid") or kernel.directives.get("maxntid")
    if not threads:
        return None
    ctas = kernel.directives.get("minnctapersm", (1,))[0]
    return min(REGISTER_FILE // (int(np.prod(threads)) * ctas) // 8 * 8, _MOST)


@dataclass(frozen=True)
class RegisterCall:
    """A setmaxnreg: the registers a thread that the warp shall own, more or fewer than it has."""

    wanted: int
    increases: bool

    def enter(self, chunk: Chunk, warp: Warp, mask: Mask, block: int) -> None:
        """See GateCall."""
        chunk.gate("registers", lambda: RegisterPool(chunk)).change(warp, mask, block, self)


@dataclass(frozen=True, kw_only=True)
class RegisterWaiting(Waiting):
    """Warps that wait for `wanted` registers a thread."""

    wanted: int


class RegisterPool:
    """What the warps of each CTA own, (CTAs, warps), and what its pool holds, in registers a thread of a warp."""

    def __init__(self, chunk: Chunk) -> None:
        self.waiting: list[RegisterWaiting] = []
        self._chunk = chunk
        shape = len(chunk.cta_ids), len(chunk.warps)
        self._owned = np.full(shape, registers_at_launch(chunk.program.kernel) or 0, np.int64)
        self._pool = np.zeros(shape[0], np.int64)
        self._executed: list[list[np.ndarray]] = [[] for _ in chunk.warps]  # by warp and turn: the instruction, by CTA

    def change(self, warp: Warp, mask: Mask, block: int, call: RegisterCall) -> None:
        """A warp asks for registers or gives some back.

        Raises:
            SynchronisationError: the kernel's registers have no bound, a decrease that is none, another setmaxnreg than
                the one of the other warps of the warpgroup.
        """
        warp.converged(index := self._chunk.program.blocks[block].last.index, mask)
        present = has_lanes(np.broadcast_to(True if mask is None else mask, (len(self._pool), 32)))
        owned = self._owned[:, warp.index]
        if not owned.all():
            self._refuse(warp, index, present, "the kernel has no bound on its registers: give __launch_bounds__")
        wrong = present & ((owned > call.wanted) if call.increases else (owned < call.wanted))
        self._refuse(warp, index, wrong, f"the warp owns {owned[int(np.argmax(wrong))]} registers a thread")
        self._agree(warp, index, present)
        if call.increases:
            self.waiting.append(RegisterWaiting(warp, block + 1, mask, wanted=call.wanted))
            self.open(stuck=False)
        else:
            self._pool += present * (owned - call.wanted)
            self._owned[present, warp.index] = call.wanted
            warp.send(block + 1, mask)

    def _agree(self, warp: Warp, index: int, present: np.ndarray) -> None:
        """Notes the warp's setmaxnreg, and compares it to those of its warpgroup in the same turn."""
        mine = self._executed[warp.index]
        for turn in range(len(mine) + 1):
            if turn == len(mine):
                mine.append(np.full(len(present), -1))
            free = present & (mine[turn] < 0)
            mine[turn][free] = index
            present = present & ~free
            for other in self._group(warp.index):
                theirs = self._executed[other]
                if turn < len(theirs):
                    differs = free & (theirs[turn] >= 0) & (theirs[turn] != index)
                    self._refuse(warp, index, differs, f"warp {other} of the same warpgroup executed another one")

    def _group(self, warp: int) -> range:
        first = warp // WARPS * WARPS
        return range(first, min(first + WARPS, len(self._executed)))

    def check_all(self) -> None:
        """Raises if a warp has left without a setmaxnreg that others of its warpgroup executed."""
        for warp, mine in enumerate(self._executed):
            for other in self._group(warp):
                for turn, indices in enumerate(mine):
                    theirs = self._executed[other]
                    lacks = indices >= 0 if turn >= len(theirs) else (indices >= 0) & (theirs[turn] < 0)
                    index = int(indices[int(np.argmax(lacks))])
                    self._refuse(
                        self._chunk.warps[warp], index, lacks, f"warp {other} of the warpgroup did not execute it"
                    )

    def _refuse(self, warp: Warp, index: int, wrong: np.ndarray, why: str) -> None:
        if wrong.any():
            raise SynchronisationError(f"wrong use of setmaxnreg: {why}\n  {warp.at(index, int(np.argmax(wrong)))}")

    def open(self, stuck: bool) -> bool:
        """See Gate. Warps are served in the order in which they came."""
        before, self.waiting = self.waiting, []
        served = False
        for each in before:
            present = has_lanes(np.broadcast_to(True if each.mask is None else each.mask, (len(self._pool), 32)))
            missing = each.wanted - self._owned[:, each.warp.index]
            enough = present & (missing <= self._pool)
            if not enough.any() or not (stuck or (enough == present).all()):
                self.waiting.append(each)
                continue
            self._pool -= enough * missing
            self._owned[enough, each.warp.index] = each.wanted
            served = True
            going, staying = each.part(enough | ~present), each.part(present & ~enough)
            assert going is not None
            going.go_on()
            if staying is not None and (present & ~enough).any():
                self.waiting.append(staying)
        return served

    def progress(self, each: Waiting, row: int) -> str:
        """See Gate."""
        assert isinstance(each, RegisterWaiting)
        missing = each.wanted - self._owned[row, each.warp.index]
        return f"setmaxnreg for {32 * missing} registers more (the pool has {32 * self._pool[row]})"
