"""Runs compiled kernels without a GPU: the PTX that nvcc made, executed on numpy, watched for races and bad accesses.

PTX goes through three rooms, and a fourth looks on. Each knows only those before it. In the order to read them:

parse/        PTX text to instructions
    ptx           what a kernel is made of
    parser        the text
compile/      a block of instructions to a Python function
    program       a compiled kernel: blocks, functions      pending       mma.sync, joined to larger products
    emitter       the Python of a block                     ops/          the instructions, one module a family
    blocks        control flow, liveness                    inflight      who may touch the registers of a wgmma
    forms         the shapes of wgmma                       codegen       all blocks
execute/      runs the functions
    arrays        the shape of all values                   arithmetic, fragments, exchange, descriptors  on them
    memory        global memory                             shared        shared memory
    counters      bank conflicts, sectors, instructions     cluster       CTAs that reach each other's shared memory
    tiles         what bulk copies move                     products      what wgmma multiplies
    machine       a launch                                  watcher       what somebody who looks on is told
    chunk         CTAs that run together, warps, gates      spaces        generic addresses
    barrier, cluster_barrier, register_pool, polls  gates: bar, barrier.cluster, setmaxnreg, waits for global memory
    mbarrier      a gate too; mbarrier_table: which of them lanes name
    copies, bulk  cp.async; bulk copies and TMA             warpgroup     wgmma, as late as it may be done
    access        what a warp does to memory                warp          all else that generated code asks of it
    scheduler     warps one after the other                 vocabulary    the names that generated code uses
races/        watches
    order         who is ordered after what                 stamps        last accesses to a word
    program_facts, strength  what the text says before      used_loads    loads that have surely come
    threads       races between threads                     mbarriers     at mbarriers
    agents        with copies and wgmma                     clusters      between CTAs of a cluster
    global_memory between CTAs in global memory             detector      all of them, for a chunk
launch        a run: the only place that knows of all rooms
mutate        one synchronisation less, to see whether it is missed
tensor_map    the 128 bytes by which TMA knows a tensor

CTAs run side by side in arrays, warps one after the other up to the next gate, and an asynchronous copy lands as late
as the program allows: the order in which defects show. The race detector finds them whatever the order.

A new instruction is one function in a module of compile/ops/, registered with a pattern that spells out its modifiers.
"""

from typing import TYPE_CHECKING

from flashladder.common import lazy

if TYPE_CHECKING:
    from .execute.counters import LANES as LANES
    from .execute.counters import NUM_BANKS as NUM_BANKS
    from .execute.counters import TMA as TMA
    from .execute.counters import WGMMA as WGMMA
    from .execute.counters import LineCount as LineCount
    from .execute.counters import Report as Report
    from .execute.counters import total as total
    from .execute.memory import GlobalMemory as GlobalMemory
    from .launch import compile_ptx as compile_ptx
    from .launch import run as run
else:  # who launches on a GPU needs tensor_map alone
    _COUNTERS = ("LANES", "NUM_BANKS", "TMA", "WGMMA", "LineCount", "Report", "total")
    _PUBLIC = {
        **dict.fromkeys(_COUNTERS, ".execute.counters"),
        "GlobalMemory": ".execute.memory",
        **dict.fromkeys(("compile_ptx", "run"), ".launch"),
    }
    __getattr__ = lazy.importer(__name__, _PUBLIC)
