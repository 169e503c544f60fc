"""What all CTAs of a launch share: a compiled kernel, its parameters and memories, its grid, the counters."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection

import numpy as np

from ..compile.program import Program
from ..errors import EmulatorError
from ..parse.ptx import Address, PtxKernel, Symbol, Variable
from .cluster import ALONE, GridShape
from .counters import Counters
from .memory import GlobalMemory
from .shared import WINDOW, PatternCache


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
        cluster: GridShape = ALONE,
    ) -> None:
        self.program, self.params, self.grid, self.num_threads = program, params, grid, num_threads
        self.dynamic_shared, self.memory = dynamic_shared, memory
        self.lazy_copies, self.max_instructions = True, 0
        self.lagging: Collection[int] = ()
        self.num_ctas = grid[0] * grid[1] * grid[2]
        self.num_warps = -(-num_threads // 32)
        self.global_writes = 0  # so far, by instruction: what may end a wait for global memory
        self.said = time.monotonic()  # when the last progress was told
        self.tell: Callable[[str], None] | None = None  # where a warp is, now and then
        self.entering: Callable[[int], None] | None = None  # told of each block that a warp is about to run
        self.addresses, sizes = _place_variables(program.kernel, memory)
        self.shared_bytes, self.local_bytes = sizes["shared"] + dynamic_shared, sizes["local"]
        if len(params) != sizes["param"]:
            raise EmulatorError(f"{program.kernel.name} takes {sizes['param']} bytes of parameters, not {len(params)}")
        self.cluster = _cluster(program.kernel, cluster)
        self.maps_addresses = any(i.opcode.startswith("mapa") for i in program.kernel.instructions)
        self.granule = smallest_shared_access(program.kernel)
        self.num_words = -(-self.shared_bytes // self.granule)
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
    """The bytes of a word, as a watcher is told of it: 4, or the smallest element that the kernel moves to or from
    shared memory."""
    smallest = 4
    for instruction in kernel.instructions:
        root, *words = instruction.opcode.split(".")
        if root in ("ld", "st") and not {"global", "param", "const", "local"} & set(words):
            smallest = min(smallest, int(words[-1][1:]) // 8)
    return smallest
