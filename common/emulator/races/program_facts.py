"""What a kernel's text tells the race detector before it runs."""

import re
from dataclasses import dataclass
from functools import lru_cache

from ..compile.blocks import sources, writes
from ..compile.inflight import accumulators, fragments, is_product
from ..compile.program import Program
from ..parse.ptx import Imm, Instruction, PtxKernel, Reg
from .order import FENCED, PUBLISHED, USED
from .strength import is_wide_fence

_COPY_IN = re.compile(r"cp\.async\.bulk\.(tensor\.[1-5]d\.)?shared::")


@dataclass(frozen=True)
class ProgramFacts:
    """What matters of a program.

    Attributes:
        num_planes: how many of the planes of order.py it needs.
        loads_of_products: by wgmma, the loads from shared memory behind its registers; empty where no copy may overtake
            them.
        used_loads: all of these loads.
        syncs_lanes: see synchronises_lanes.
    """

    num_planes: int
    loads_of_products: dict[int, frozenset[int]]
    used_loads: frozenset[int]
    syncs_lanes: bool


@lru_cache(maxsize=16)
def facts_of(program: Program) -> ProgramFacts:
    """The facts of a program, remembered for the next launch."""
    kernel = program.kernel
    copies_in = any(_COPY_IN.match(i.opcode) for i in kernel.instructions)  # bulk copies, to shared memory
    has_wide_fence = any(is_wide_fence(i) for i in kernel.instructions)
    loads = loads_of_products(kernel) if copies_in else {}
    return ProgramFacts(
        num_planes=1 + (PUBLISHED if has_wide_fence else USED if copies_in else FENCED),
        loads_of_products=loads,
        used_loads=frozenset[int]().union(*loads.values()),
        syncs_lanes=synchronises_lanes(kernel),
    )


def synchronises_lanes(kernel: PtxKernel) -> bool:
    """Whether lanes may synchronise without their warp: a bar.warp.sync for a part of it, arrivals at an mbarrier. The
    race detector then remembers what each lane did."""
    masks = [i.operands[0] for i in kernel.instructions if i.opcode == "bar.warp.sync"]
    some = any(not isinstance(mask, Imm) or mask.value % (1 << 32) != 0xFFFFFFFF for mask in masks)
    return some or any(i.opcode.startswith("mbarrier.") for i in kernel.instructions)


def loads_of_products(kernel: PtxKernel) -> dict[int, frozenset[int]]:
    """By wgmma.mma_async: the loads from shared memory that any value in its registers depends on."""
    products = [i for i in kernel.instructions if is_product(i)]
    if not products:
        return {}
    writers: dict[Reg, list[Instruction]] = {}
    for instruction in kernel.instructions:
        for reg in writes(instruction):
            writers.setdefault(reg, []).append(instruction)
    behind = {reg: _behind(by) for reg, by in writers.items()}
    return {each.index: frozenset(_loads_behind(each, behind)) for each in products}


def _behind(writers: list[Instruction]) -> tuple[set[int], set[Reg]]:
    """Of those that write a register: the loads from shared memory, and what registers the others use."""
    loads = {each.index for each in writers if _is_shared_load(each)}
    others = [each for each in writers if each.index not in loads and not is_product(each)]
    return loads, {reg for each in others for reg in sources(each)}


def _loads_behind(product: Instruction, behind: dict[Reg, tuple[set[int], set[Reg]]]) -> set[int]:
    todo, seen, found = {*accumulators(product), *fragments(product)}, set[Reg](), set[int]()
    while todo:
        seen |= todo
        known = [behind[reg] for reg in todo if reg in behind]
        found = found.union(*(loads for loads, _ in known))
        todo = set[Reg]().union(*(regs for _, regs in known)) - seen
    return found


def _is_shared_load(instruction: Instruction) -> bool:
    """Whether it may read shared memory into registers."""
    root, *words = instruction.opcode.split(".")
    return root == "ldmatrix" or (root == "ld" and not {"global", "param", "const", "local"} & set(words))
