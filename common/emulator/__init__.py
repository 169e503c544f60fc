"""Runs compiled kernels without a GPU: the PTX that nvcc made, executed on numpy, watched for races and bad accesses.

    parse     PTX text to instructions              cfg        blocks, liveness, the check for unwritten registers
    codegen   a block to a Python function          ops/       the instructions, one module a family
    machine   a launch                              scheduler  CTAs and warps; gates: what a warp waits at
    warp      registers and exchanges of a warp     access     what it does to memory; copies: what it has in flight
    memory    global memory                         shared     shared memory
    race      who may touch which word when         counters   bank conflicts, sectors, instructions

CTAs run side by side in arrays, warps one after the other up to the next gate, and an asynchronous copy lands as late
as the program allows: the order in which defects show. The race detector finds them whatever the order.

A new instruction is one function in a module of ops/, registered with a pattern that spells out its modifiers. What
Hopper adds has its places: TMA copies are agents like those of copies.py, which land through an mbarrier; an mbarrier
is a Gate, whose clock the race detector carries as it does a barrier's; a wgmma reads shared memory as such an agent.
"""

from .counters import LineCount, Report, total
from .machine import compile_ptx, run
from .memory import GlobalMemory

__all__ = ["GlobalMemory", "LineCount", "Report", "compile_ptx", "run", "total"]
