"""A launch: PTX is parsed, compiled and executed, chunk of CTAs by chunk, under the eyes of the race detector."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial

import numpy as np

from .compile.codegen import compile_kernel
from .compile.program import Program
from .execute.cluster import ALONE, GridShape, ordered_ctas
from .execute.counters import Report, summarise
from .execute.machine import Machine
from .execute.memory import GlobalMemory
from .execute.scheduler import Scheduler
from .execute.vocabulary import VOCABULARY
from .parse.parser import parse
from .races.detector import detector
from .races.global_memory import GlobalRaces


@lru_cache(maxsize=16)
def compile_ptx(text: str, entry: str) -> Program:
    """The executable form of one entry of a PTX module, remembered for the next launch."""
    return compile_kernel(parse(text, entry), VOCABULARY)


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
    ordered_sums: bool = False,
    cluster: GridShape = ALONE,
    progress: Callable[..., None] | None = None,
    entering: Callable[[int], None] | None = None,
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
        ordered_sums: with `race`, atomic additions of floats by several CTAs must come in one order: otherwise not each
            run gives the same bits.
        cluster: CTAs of a cluster, where the kernel's code does not say it.
        max_instructions: of one warp and chunk, against endless loops.
        progress: called with (CTAs done, CTAs in total) first and after each chunk; within one now and then, with where
            a warp is as a third argument.
        entering: called with the number of each block that a warp is about to run.

    Raises:
        EmulatorError: the kernel did something wrong, or uses an instruction that is not known.
    """
    started = time.perf_counter()
    program = ptx if isinstance(ptx, Program) else compile_ptx(ptx, entry)
    machine = Machine(program, params, grid, num_threads, shared_bytes, memory, cluster)
    machine.max_instructions, machine.lazy_copies, machine.lagging = max_instructions, lazy_copies, lagging
    machine.entering = entering
    watcher_of = partial(detector, GlobalRaces(machine, prior or {}, ordered_sums)) if race else None
    total, order = grid[0] * grid[1] * grid[2], ordered_ctas(grid, machine.cluster)
    size = math.prod(machine.cluster)
    chunk = max(chunk // size, 1) * size
    with np.errstate(all="ignore"):
        for first in range(0, total, chunk):
            if progress:
                progress(first, total)
                machine.tell = partial(progress, first, total)
            Scheduler(machine, order[first : first + chunk], watcher_of).run()
        if progress:
            progress(total, total)
    report = summarise(machine.counters, machine.program)
    report.num_ctas, report.elapsed = total, time.perf_counter() - started
    return report
