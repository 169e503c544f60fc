"""The parsed form of a PTX kernel: registers, operands, instructions, memory variables, source positions."""

import re
from dataclasses import dataclass, field

# Storage of a register by its declared class: numpy type codes. Types of the same width share storage.
REGISTER_STORAGE = {
    "pred": "?", "b8": "u1", "u8": "u1", "s8": "u1", "b16": "u2", "u16": "u2", "s16": "u2", "f16": "u2",
    "b32": "u4", "u32": "u4", "s32": "u4", "f16x2": "u4", "f32": "f4",
    "b64": "u8", "u64": "u8", "s64": "u8", "f64": "f8",
}  # fmt: skip

# How an instruction type interprets its operands.
NUMPY_TYPES = {
    "pred": "?", "b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f16x2": "u4", "bf16x2": "u4", "f32": "f4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reg:
    """A virtual register: one object each, `name` unique in the kernel, also if an inline-asm block declared it."""

    name: str
    type: str

    @property
    def storage(self) -> str:
        """Numpy type code of the array that holds it."""
        return REGISTER_STORAGE[self.type]


@dataclass(frozen=True)
class Special:
    """A read-only register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Imm:
    """An immediate: an integer, or a float whose `bits` are its IEEE pattern of that many bits."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable of the parameter, shared, constant, global or local space, with a byte offset, or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """A memory operand [base + offset]."""

    base: Reg | Symbol | Imm
    offset: int = 0


@dataclass(frozen=True)
class TensorAddress:
    """A tile of a tensor [map, {coordinates}]: the generic address of a tensor map, and where the tile begins."""

    map: "Operand"
    coordinates: "Vector"


@dataclass(frozen=True)
class Vector:
    """A braced list of operands."""

    items: tuple["Operand", ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations `d|p` of setp, shfl and match."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True)
class Not:
    """A negated predicate operand."""

    reg: Reg


@dataclass(frozen=True)
class Sink:
    """The bit bucket `_`."""


Operand = Reg | Special | Imm | Symbol | Address | TensorAddress | Vector | Pair | Not | Sink

# Source positions from the innermost inlined function outwards: ((file, line), ...).
SourceChain = tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Instruction:
    """One PTX instruction with its predicate guard and where it comes from."""

    index: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: Reg | None
    guard_negated: bool
    line: int
    text: str
    source: SourceChain

    def where(self) -> str:
        """The chain of source lines, innermost first: `load.cuh:24 < kernel.cu:40`; without -lineinfo the PTX line."""
        return format_chain(self.source) or f"PTX line {self.line}"

    def described(self) -> str:
        """Where it stands and what it is, for reports."""
        return f"at {self.where()}: `{self.text}`"


def format_chain(chain: SourceChain) -> str:
    """`file:line < file:line`, innermost first, with the files' base names."""
    return " < ".join(f"{file.rsplit('/', 1)[-1]}:{line}" for file, line in chain)


_CHAIN = re.compile(r"\bat ((?:[^\s:]+:\d+(?: < )?)+): `")


def described_chains(report: str) -> list[SourceChain]:
    """The chains of all instructions that a report describes, without those that have a PTX line alone."""
    places = ([place.rsplit(":", 1) for place in chain.split(" < ")] for chain in _CHAIN.findall(report))
    return [tuple((file, int(line)) for file, line in chain) for chain in places]


@dataclass(frozen=True)
class Variable:
    """A declared array or scalar. `size` is 0 for `extern .shared name[]`; `data` the initial bytes, if any."""

    name: str
    space: str
    size: int
    align: int
    data: bytes | None = None


@dataclass
class PtxKernel:
    """One entry function, ready for control-flow analysis. `directives`: the numbers of .maxntid and its like."""

    name: str
    params: dict[str, Variable] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    target: str = ""
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
