"""Which instruction of a main loop belongs to which limit, by its opcode."""

from __future__ import annotations

from flashladder.common.compiler.sass import SassInstruction
from flashladder.common.compiler.sass.opcodes import kind_of

TENSOR = "tensor cores"  # the work itself, and no limit that could be taken away
_KINDS = {
    "copies": ("LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "UTMALDG", "UBLKCP", "SYNCS"),
    "fragment_loads": ("LDSM",),
    "softmax": (
        *("FMUL", "FADD", "FFMA", "FMNMX", "FMNMX3", "FSETP", "FSEL", "MUFU", "F2FP", "SHFL", "VOTE", "VIMNMX3"),
        "VIMNMX",
    ),
    "address_arithmetic": (
        *("IADD3", "LOP3", "SHF", "LEA", "VIADD", "SEL", "IMAD", "IMAD.SHL", "IMAD.IADD", "IMAD.WIDE", "IMAD.X"),
        *("UIADD3", "USHF", "UIMAD", "ULEA", "ULOP3", "USEL"),
    ),
    "moves": ("MOV", "IMAD.MOV", "UMOV", "R2UR", "CS2R", "PRMT"),
    "spills": ("LDL", "STL"),
    TENSOR: ("HMMA", "HGMMA"),
}
_LIMIT_OF = {kind: name for name, kinds in _KINDS.items() for kind in kinds}


def limit_of(instruction: SassInstruction, has_tensor_cores: bool) -> str:
    """The limit that an instruction belongs to, or TENSOR; empty where it is none of them (branches, comparisons).

    Without tensor cores nearly all of a loop is the products: loads, conversions, addresses and multiplications.
    """
    name = _LIMIT_OF.get(kind_of(instruction.opcode), "")
    return name if has_tensor_cores or name in ("copies", "spills") else "scalar_products"
