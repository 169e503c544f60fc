"""Loads, stores, atomics, matrix loads and asynchronous copies (PTX ISA, "Data Movement and Conversion Instructions").

The emitted code evaluates addresses and values and hands them to the Warp, which knows the memories.
"""

from ...parse.ptx import NUMPY_TYPES, Imm, Instruction, Operand, Reg, Vector
from ..emitter import BlockEmitter
from ..program import is_poll
from .registry import Match, op

_ORDER = r"(?:\.(?:weak|volatile|(?:relaxed|acquire|release)\.(?:cta|cluster|gpu|sys)))?"
_SPACE = r"(?:\.(?P<space>global|shared|param|const|local)(?:::cta|::cluster|::entry)?)?"
_EVICT = r"(?:\.L1::(?:evict_(?:normal|unchanged|first|last)|no_allocate))?(?:\.L2::evict_(?:normal|first|last))?"
_HINT = r"(?P<hint>\.L2::cache_hint)?(?:\.L2::(?:64B|128B|256B))?"
_TYPE = r"(?:\.(?P<vec>v2|v4))?\.(?P<t>[bsu](?:8|16|32|64)|f32|f64)"


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _space(m: Match) -> str:
    return repr(m["space"] or "generic")


@op(rf"ld{_ORDER}{_SPACE}(?:\.(?:ca|cg|cs|lu|cv))?(?:\.nc)?{_EVICT}{_HINT}{_TYPE}")
def load(e: BlockEmitter, i: Instruction, m: Match) -> None:
    targets = _items(i.operands[0])
    what = f"{e.address(i.operands[1])}, {NUMPY_TYPES[m['t']]!r}, {len(targets)}"
    how = "look" if is_poll(i) else "load"
    values = e.let(f"w.access.{how}({i.index}, {_space(m)}, {what}, {e.mask()})")
    for n, target in enumerate(targets):
        e.write(target, f"{values}[{n}]", m["t"])


@op(rf"st{_ORDER}{_SPACE}(?:\.(?:wb|cg|cs|wt))?{_EVICT}{_HINT}{_TYPE}", outputs=0)
def store(e: BlockEmitter, i: Instruction, m: Match) -> None:
    values = "".join(f"{e.read(item, m['t'])}, " for item in _items(i.operands[1]))
    what = f"{e.address(i.operands[0])}, ({values}), {NUMPY_TYPES[m['t']]!r}"
    e.line(f"w.access.store({i.index}, {_space(m)}, {what}, {e.mask()})")


_ATOMIC_SPACE = r"(?:\.(?P<space>global|shared)(?:::cta|::cluster)?)?"
_REACH = r"(?:\.(?:cta|cluster|gpu|sys))?"  # which nvcc also writes behind the space
_SCOPE = rf"(?:\.(?:relaxed|acquire|release|acq_rel))?{_REACH}{_ATOMIC_SPACE}{_REACH}"
_FUNCTION = r"(?P<f>add|min|max|and|or|xor|exch|cas|inc|dec)\.(?P<t>[bsu](?:32|64)|f32|f64)"


def _atomic(e: BlockEmitter, i: Instruction, m: Match, address: Operand, values: tuple[Operand, ...]) -> str:
    """The expression of the old values."""
    operands = "".join(f"{e.read(value, m['t'])}, " for value in values)
    what = f"{m['f']!r}, {e.address(address)}, ({operands}), {NUMPY_TYPES[m['t']]!r}"
    return f"w.access.atomic({i.index}, {_space(m)}, {what}, {e.mask()})"


@op(rf"atom{_SCOPE}\.{_FUNCTION}")
def atomic(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.write(i.operands[0], e.let(_atomic(e, i, m, i.operands[1], i.operands[2:])), m["t"])


@op(rf"red{_SCOPE}\.{_FUNCTION}", outputs=0)
def reduction(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(_atomic(e, i, m, i.operands[0], i.operands[1:]))


@op(rf"red{_SCOPE}\.(?P<f>add){_HINT}\.(?P<vec>v2|v4)\.(?P<t>f32)", outputs=0)
def vector_reduction(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """Element by element, each atomic by itself."""
    values = _items(i.operands[1])
    operands = "".join(f"{e.read(value, m['t'])}, " for value in values)
    what = f"{m['f']!r}, {e.address(i.operands[0])}, ({operands}), {NUMPY_TYPES[m['t']]!r}"
    e.line(f"w.access.atomic({i.index}, {_space(m)}, {what}, {e.mask()}, {len(values)})")


# PTX has the shape first, ptxas also takes the number first.
_MATRIX = (
    r"\.sync\.aligned(?=[.\w]*\.m8n8)(?:\.m8n8)?\.x(?P<count>[124])(?:\.m8n8)?(?P<trans>\.trans)?"
    r"(?:\.shared(?:::cta)?)?\.b16"
)


@op(rf"ldmatrix{_MATRIX}")
def load_matrix(e: BlockEmitter, i: Instruction, m: Match) -> None:
    values = e.let(
        f"w.access.load_matrix({i.index}, {e.address(i.operands[1])}, {m['count']}, {bool(m['trans'])}, {e.mask()})"
    )
    for n, target in enumerate(_items(i.operands[0])):
        e.write(target, f"{values}[{n}]", "b32")


@op(rf"stmatrix{_MATRIX}", outputs=0)
def store_matrix(e: BlockEmitter, i: Instruction, m: Match) -> None:
    values = ", ".join(e.read(item, "b32") for item in _items(i.operands[1]))
    e.line(f"w.access.store_matrix({i.index}, {e.address(i.operands[0])}, ({values},), {bool(m['trans'])}, {e.mask()})")


@op(rf"cp\.async\.(?:ca|cg)\.shared(?:::cta)?\.global{_HINT}", outputs=0)
def copy_async(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """[dst], [src], cp-size{, src-size | ignore-src}{, cache-policy}; bytes beyond src-size are filled with zero."""
    size = i.operands[2]
    assert isinstance(size, Imm)
    extra = i.operands[3:-1] if m["hint"] else i.operands[3:]
    source_size = "None"
    if extra and isinstance(extra[0], Reg) and extra[0].type == "pred":
        nothing, everything = e.namespace.constant(0, "u4"), e.namespace.constant(size.value, "u4")
        source_size = f"where({e.read(extra[0], 'pred')}, {nothing}, {everything})"
    elif extra and extra[0] != size:
        source_size = e.read(extra[0], "u32")
    addresses = f"{e.address(i.operands[0])}, {e.address(i.operands[1])}"
    e.line(f"w.access.copy_async({i.index}, {addresses}, {size.value}, {source_size}, {e.mask()})")


@op(r"cp\.async\.commit_group", outputs=0)
def commit_group(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.access.copies.commit({e.mask()})")


@op(r"cp\.async\.wait_group", outputs=0)
def wait_group(e: BlockEmitter, i: Instruction, m: Match) -> None:
    pending = i.operands[0]
    assert isinstance(pending, Imm)
    e.line(f"w.access.copies.wait({pending.value}, {e.mask()})")


@op(r"cp\.async\.wait_all", outputs=0)
def wait_all(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.access.copies.wait_all({e.mask()})")


@op(r"createpolicy\.fractional\.L2::evict_(?:first|last|normal|unchanged)(?:\.L2::evict_(?:first|unchanged))?\.b64")
def create_policy(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """A cache policy is a hint: any value will do."""
    e.write(i.operands[0], e.namespace.constant(0, "u8"), "b64")


@op(r"prefetch(?:\.global)?\.L[12](?:::evict_(?:last|normal))?|prefetchu\.L1|discard(?:\.global)?\.L2", outputs=0)
def prefetch(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """A hint without effect."""
