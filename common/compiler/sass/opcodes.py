"""What opcodes do: the kind that histograms count them as, the pipe they occupy, the work of the tensor-core ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from flashladder.common.compiler.sass.instruction import SassInstruction

# Kinds that one opcode divides into, by its first modifier: an IMAD is often no multiplication at all but a move, a
# shift or an addition on the FMA pipe.
_DIVIDED = {"IMAD": ("MOV", "SHL", "IADD", "X", "WIDE")}
FILLER = "filler"  # the kind of instructions that can never execute

# The pipe of each opcode, after "Pipelines" in the Profiling Guide of Nsight Compute and, where it is silent, as an
# H100 or H200 counts them: VIADD on the FMA pipe; CS2R, votes, ELECT and R2UR on the ALU; S2R and LDGDEPBAR among loads
# and stores. What is not here (branches, barriers, mbarriers, uniform instructions) takes an issue slot alone.
PIPES = {
    "tensor": ("HMMA", "HGMMA", "IMMA", "QMMA", "QGMMA", "IGMMA", "BMMA"),
    "mufu": ("MUFU", "I2F", "F2I", "F2F", "FRND", "FCHK"),
    "fma": ("FFMA", "FFMA2", "FMUL", "FMUL2", "FADD", "FADD2", "IMAD", "IDP", "VIADD", "HFMA2", "HADD2", "HMUL2"),
    "alu": (
        *("IADD3", "LOP3", "SHF", "LEA", "ISETP", "FSETP", "FMNMX", "FMNMX3", "FSEL", "SEL", "PRMT", "MOV"),
        *("F2FP", "IMNMX", "VIMNMX", "VIADDMNMX", "IABS", "PLOP3", "SGXT", "BMSK", "P2R", "R2P", "I2FP", "CS2R"),
        *("VOTE", "VOTEU", "ELECT", "R2UR"),
    ),
    "lsu": (
        *("LDS", "STS", "LDSM", "STSM", "SHFL", "LDG", "STG", "LDL", "STL", "LD", "ST", "LDGSTS", "LDGDEPBAR", "S2R"),
        *("ATOMS", "RED"),
    ),
}
_BANK_PASSES = {
    **dict.fromkeys(("LDS", "STS", "LDSM", "STSM", "LDGSTS", "LDL"), 1),
    **dict.fromkeys(("LDG", "STG", "LD", "ST", "STL"), 2),
}
_PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes}

_SYNCHRONOUS = re.compile(r"HMMA\.(16816|1688)\.F(16|32)")
_WARPGROUP = re.compile(r"[HQ]GMMA\.64x(\d+)x(\d+)\.F(16|32)")
_READS_A = re.compile(r"[HQ]GMMA\.\S+ \w+, gdesc")  # where another would have registers of A
_WARPGROUP_ROWS = 64


@cache
def kind_of(opcode: str) -> str:
    """The kind of an opcode: LDSM of LDSM.16.M88.4, IMAD.MOV of IMAD.MOV.U32."""
    base, *modifiers = opcode.split(".")
    if modifiers and modifiers[0] in _DIVIDED.get(base, ()):
        return f"{base}.{modifiers[0]}"
    return base


def kinds(instructions: Iterable[SassInstruction]) -> list[str]:
    """The kind of each instruction."""
    return [FILLER if i.is_filler else kind_of(i.opcode) for i in instructions]


def histogram(instructions: Iterable[SassInstruction]) -> Counter[str]:
    """How often each kind is among the instructions."""
    return Counter(kinds(instructions))


def pipe_of(opcode: str) -> str | None:
    """The pipe that an opcode occupies; None where it takes an issue slot alone."""
    return _PIPE_OF.get(opcode.partition(".")[0])


@dataclass(frozen=True)
class Mma:
    """A tensor-core instruction: one warp's share of C += A B, and the 32-bit registers that each thread gives it."""

    flops: int
    a: int
    b: int
    result: int  # C, before and after
    is_warpgroup: bool  # four warps work on it together; B is in shared memory, and A may be

    @classmethod
    def of(cls, m: int, n: int, k: int, result_bits: int, element_bits: int, is_warpgroup: bool) -> Mma:
        """The instruction that is m x n x k for one warp."""
        lane_bits = 32 * 32  # that one register holds in a warp
        a, b, result = (m * k * element_bits, k * n * element_bits, m * n * result_bits)
        return cls(2 * m * n * k, a // lane_bits, b // lane_bits, result // lane_bits, is_warpgroup)


@cache
def mma(opcode: str) -> Mma | None:
    """What a tensor-core opcode does; None for any other."""
    if match := _SYNCHRONOUS.match(opcode):
        return Mma.of(16, 8, 16 if match[1] == "16816" else 8, int(match[2]), 16, is_warpgroup=False)
    if match := _WARPGROUP.match(opcode):  # 64 rows: 16 for each of the four warps
        n, k, result_bits = (int(text) for text in match.groups())
        return Mma.of(16, n, k, result_bits, 16 if opcode.startswith("H") else 8, is_warpgroup=True)
    return None


def reads_a(text: str) -> bool:
    """Whether an instruction is a warpgroup product that reads A, too, from shared memory."""
    return bool(_READS_A.search(text))


@cache
def operand_bytes(opcode: str, from_shared: bool) -> int:
    """What a warpgroup product reads of shared memory: B, which its four warps share, and A where it is there; 0 for
    any other opcode."""
    match = _WARPGROUP.match(opcode)
    if not match:
        return 0
    n, k = int(match[1]), int(match[2])
    return (n + (_WARPGROUP_ROWS if from_shared else 0)) * k * (2 if opcode.startswith("H") else 1)


def mma_flops(opcode: str) -> int:
    """Floating-point operations of one warp's share of a tensor-core instruction; 0 for any other."""
    operation = mma(opcode)
    return operation.flops if operation else 0


def bank_wavefronts(opcode: str) -> int:
    """Times that an instruction has 128 bytes read from or written to the banks of L1 and shared memory.

    What goes to global or local memory is written there and read again, and what comes from global memory likewise;
    what comes from local memory is there already. Bank conflicts make it take longer, but not more accesses.
    """
    return _BANK_PASSES.get(opcode.partition(".")[0], 0) * access_width(opcode)


@cache
def access_width(opcode: str) -> int:
    """32-bit words that each lane of a load or store moves."""
    base, *modifiers = opcode.split(".")
    if base in ("LDSM", "STSM"):
        return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
    return 4 if "128" in modifiers else 2 if "64" in modifiers else 1
