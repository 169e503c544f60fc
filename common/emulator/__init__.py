"""Runs compiled kernels without a GPU: the PTX that nvcc made, executed on numpy, watched for races and bad accesses.

    parse     PTX text to instructions              cfg        blocks, liveness, the check for unwritten registers
    codegen   a block to a Python function          ops/       the instructions, one module a family
    machine   a launch                              scheduler  CTAs and warps, and what is put off while any can go on
    warp      registers and exchanges of a warp     access     what it does to memory; copies: what it has in flight
    gates     what a warp waits at; barriers        mbarrier   barriers in shared memory, with phases
    mbarrier_table  which of them lanes name
    registers setmaxnreg                            cluster    CTAs that reach each other's shared memory
    bulk      bulk copies and TMA                   tiles      what they move: bytes, tiles of tensors
    warpgroup wgmma, as late as it may be done      descriptors  where it finds matrices in shared memory
    products  what it multiplies                    fragments  how matrices lie in registers
    inflight  who may touch its registers         used_loads  loads that it proves to have come
    memory    global memory                         shared     shared memory
    race      who may touch which word when         order      who is ordered after what; stamps: last accesses
    agents    races with copies and wgmma           mbarrier_races  races at mbarriers
    cluster_races  races between CTAs of a cluster  global_races  those between CTAs in global memory
    strength  how accesses to it synchronise        polls    waits for it, gates of their own
    counters  bank conflicts, sectors, instructions mutate     one synchronisation less, to see whether it is missed

CTAs run side by side in arrays, warps one after the other up to the next gate, and an asynchronous copy lands as late
as the program allows: the order in which defects show. The race detector finds them whatever the order.

A new instruction is one function in a module of ops/, registered with a pattern that spells out its modifiers.
"""

from .counters import LineCount, Report, total
from .machine import compile_ptx, run
from .memory import GlobalMemory

__all__ = ["GlobalMemory", "LineCount", "Report", "compile_ptx", "run", "total"]
