"""The machine code of a kernel, without a GPU: `read(artifact)` disassembles it.

instruction   nvdisasm's text, taken apart        flow        blocks, loops, the main loop over K and V
opcodes       kinds, pipes, tensor-core work      registers   live registers
pipes         cycles of each pipe on a GPU        occupancy   CTAs of an SM
code          all of it for one artifact          diff        two kernels side by side
commits       kernels of two commits              allocation  whether other registers hold the same values
"""

from flashladder.common.compiler.sass.code import Code, count, read
from flashladder.common.compiler.sass.instruction import SassInstruction, disassemble, parse
from flashladder.common.compiler.sass.occupancy import Occupancy, occupancy, occupancy_of
from flashladder.common.compiler.sass.pipes import Bound, bounds, loads, throughput

__all__ = [
    "Bound",
    "Code",
    "Occupancy",
    "SassInstruction",
    "bounds",
    "count",
    "disassemble",
    "loads",
    "occupancy",
    "occupancy_of",
    "parse",
    "read",
    "throughput",
]
