"""Runs compiled kernels without a GPU: the PTX that nvcc made, executed on numpy, watched for races and bad accesses.

parse     PTX text to instructions            cfg       blocks, liveness, static checks
codegen   a block to a Python function        ops/      the instructions, one module a family
machine   a launch                            scheduler CTAs, warps, barriers
warp      registers and accesses of a warp    memory, shared, copies   where data lives, and copies in flight
race      races on shared memory              counters  bank conflicts, sectors, instructions
"""

from .counters import LineCount, Report
from .machine import run
from .memory import GlobalMemory

__all__ = ["GlobalMemory", "LineCount", "Report", "run"]
