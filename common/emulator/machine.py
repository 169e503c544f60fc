"""A launch: a compiled kernel, its memories and its grid; runs the CTAs chunk by chunk."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial

import numpy as np

from .cluster import GridShape, ordered_ctas
from .codegen import Program, compile_kernel
from .counters import Counters, Report, summarise
from .errors import EmulatorError
from .global_races import GlobalRaces
from .memory import GlobalMemory
from .parse import parse
from .ptx import Address, Imm, PtxKernel, Symbol, Variable
from .scheduler import Chunk
from .shared import WINDOW, PatternCache

ALONE: GridShape = 1, 1, 1  # without a cluster


@lru_cache(maxsize=16)
def compile_ptx(text: str, entry: str) -> Program:
    """The executable form of one entry of a PTX module, remembered for the next launch."""
    return compile_kernel(parse(text, entry))


class Machine:
    """What all chunks of a launch share."""

    def __init__(
        self,
        program: Program,
        params: bytes,
        grid: tuple[int, int, int],
        num_threads: int,
        dynamic_shared: int,
        memory: GlobalMemory,
        prior: Mapping[str, str] | None = None,
        cluster: GridShape = ALONE,
    ) -> None:
        self.program, self.params, self.grid, self.num_threads = program, params, grid, num_threads
        self.dynamic_shared, self.memory = dynamic_shared, memory
        self.race, self.lazy_copies, self.max_instructions = True, True, 0
        self.lagging: Collection[int] = ()
        self.num_ctas = grid[0] * grid[1] * grid[2]
        self.global_races = GlobalRaces(self, prior or {})
        self.global_writes = 0  # so far, by instruction: what may end a wait for global memory
        self.said = time.monotonic()  # when the last progress was told
        self.tell: Callable[[str], None] | None = None  # where a warp is, now and then
        self.addresses, sizes = _place_variables(program.kernel, memory)
        self.shared_bytes, self.local_bytes = sizes["shared"] + dynamic_shared, sizes["local"]
        if len(params) != sizes["param"]:
            raise EmulatorError(f"{program.kernel.name} takes {sizes['param']} bytes of parameters, not {len(params)}")
        self.cluster = _cluster(program.kernel, cluster)
        self.maps_addresses = any(i.opcode.startswith("mapa") for i in program.kernel.instructions)
        self.granule = smallest_shared_access(program.kernel)
        self.syncs_lanes = synchronises_lanes(program.kernel)
        self.patterns = PatternCache(self.shared_bytes, self.granule)
        self.counters = Counters(len(program.blocks))


def _cluster(kernel: PtxKernel, launched: GridShape) -> GridShape:
    """The clusters in which a kernel is launched, or those that its code wants."""
    x, y, z, *_ = (*kernel.directives.get("reqnctapercluster", launched), 1, 1, 1)
    if launched not in (ALONE, (x, y, z)):
        raise EmulatorError(f"{kernel.name} is launched in clusters of {launched}, but compiled for {(x, y, z)}")
    return x, y, z


def _place_variables(kernel: PtxKernel, memory: GlobalMemory) -> tuple[dict[str, int], dict[str, int]]:
    """The address of every variable in its own space, and the bytes that each space takes (shared: static)."""
    used = {
        part.name
        for instruction in kernel.instructions
        for operand in instruction.operands
        if isinstance(part := operand.base if isinstance(operand, Address) else operand, Symbol)
    }
    addresses: dict[str, int] = {}
    sizes: dict[str, int] = defaultdict(int)

    def place(variable: Variable) -> None:
        start = -(-sizes[variable.space] // variable.align) * variable.align
        addresses[variable.name] = start + (WINDOW if variable.space == "shared" else 0)
        sizes[variable.space] = start + variable.size

    for param in kernel.params.values():
        place(param)
    variables = sorted(kernel.variables.values(), key=lambda variable: variable.size == 0)  # extern arrays come last
    for variable in variables:
        if variable.space in ("shared", "local"):
            place(variable)
        elif variable.space in ("const", "global") and variable.name in used:
            data = np.frombuffer(variable.data or bytes(variable.size), np.uint8)
            addresses[variable.name] = memory.add(
                f".{variable.space} {variable.name}", data, readonly=variable.space == "const"
            )
    return addresses, sizes


def smallest_shared_access(kernel: PtxKernel) -> int:
    """The race detector's word: 4 bytes, or the smallest element that the kernel moves to or from shared memory."""
    smallest = 4
    for instruction in kernel.instructions:
        root, *words = instruction.opcode.split(".")
        if root in ("ld", "st") and not {"global", "param", "const", "local"} & set(words):
            smallest = min(smallest, int(words[-1][1:]) // 8)
    return smallest


def synchronises_lanes(kernel: PtxKernel) -> bool:
    """Whether lanes may synchronise without their warp: a bar.warp.sync for a part of it, arrivals at an mbarrier. The
    race detector then remembers what each lane did."""
    masks = [i.operands[0] for i in kernel.instructions if i.opcode == "bar.warp.sync"]
    some = any(not isinstance(mask, Imm) or mask.value % (1 << 32) != 0xFFFFFFFF for mask in masks)
    return some or any(i.opcode.startswith("mbarrier.") for i in kernel.instructions)


def run(
    ptx: str | Program,
    params: bytes,
    grid: tuple[int, int, int],
    num_threads: int,
    shared_bytes: int,
    memory: GlobalMemory,
    entry: str = "attention_forward",
    *,
    race: bool = True,
    lazy_copies: bool = True,
    lagging: Collection[int] = (),
    chunk: int = 64,
    max_instructions: int = 50_000_000,
    prior: Mapping[str, str] | None = None,
    cluster: GridShape = ALONE,
    progress: Callable[..., None] | None = None,
) -> Report:
    """Executes a kernel.

    Args:
        ptx: the text of a PTX module, or what compile_ptx made of it.
        params: the packed kernel parameters; pointers are addresses of `memory`.
        grid: CTAs along x, y, z.
        num_threads: threads of a CTA, along x.
        shared_bytes: dynamic shared memory.
        memory: holds the tensors; outputs are read from it afterwards.
        race: detect races and reads of copies in flight.
        lazy_copies: an asynchronous copy lands at its wait; otherwise as soon as it is issued.
        lagging: warps of each CTA, by number, that go on only when no other can, and stop at each synchronisation, also
            where they need not wait; so a warp shows that others rely on without having waited for it. With any, a test
            of an mbarrier says no at first, which shows who goes on all the same.
        chunk: CTAs that are executed together.
        prior: tensors that an earlier grid writes, which may still run (programmatic dependent launch), each with the
            name of its kernel: with `race`, a thread that accesses one has to know of a griddepcontrol.wait.
        cluster: CTAs of a cluster, where the kernel's code does not say it.
        max_instructions: of one warp and chunk, against endless loops.
        progress: called with (CTAs done, CTAs in total) first and after each chunk; within one now and then, with where
            a warp is as a third argument.

    Raises:
        EmulatorError: the kernel did something wrong, or uses an instruction that is not known.
    """
    started = time.perf_counter()
    program = ptx if isinstance(ptx, Program) else compile_ptx(ptx, entry)
    machine = Machine(program, params, grid, num_threads, shared_bytes, memory, prior, cluster)
    machine.max_instructions, machine.lazy_copies, machine.race = max_instructions, lazy_copies, race
    machine.lagging = lagging
    total, order = grid[0] * grid[1] * grid[2], ordered_ctas(grid, machine.cluster)
    size = math.prod(machine.cluster)
    chunk = max(chunk // size, 1) * size
    with np.errstate(all="ignore"):
        for first in range(0, total, chunk):
            if progress:
                progress(first, total)
                machine.tell = partial(progress, first, total)
            Chunk(machine, order[first : first + chunk]).run()
        if progress:
            progress(total, total)
    report = summarise(machine.counters, machine.program)
    report.num_ctas, report.elapsed = total, time.perf_counter() - started
    return report
