"""Bulk copies and TMA (PTX ISA, "Bulk copy", "Tensor copy"), which execute/bulk.py performs. Cache hints do nothing."""

from ...parse.ptx import Imm, Instruction, Operand, TensorAddress
from ..emitter import BlockEmitter
from .registry import Match, op

_HINT = r"(?:\.L2::cache_hint)?"
_LANDS = r"\.mbarrier::complete_tx::bytes(?P<multicast>\.multicast::cluster)?"
_TILE_OUT = r"bulk\.tensor\.[1-5]d\.global\.shared::cta"


def _tile(e: BlockEmitter, operand: Operand) -> str:
    assert isinstance(operand, TensorAddress)
    coordinates = "".join(f"{e.read(item, 's32')}, " for item in operand.coordinates.items)
    return f"TileOperand({e.address(operand.map)}, ({coordinates}))"


def _bytes(e: BlockEmitter, address: Operand, size: Operand) -> str:
    return f"BytesOperand({e.address(address)}, {e.read(size, 'u32')})"


def _load(e: BlockEmitter, i: Instruction, m: Match, source: str, barrier: Operand, *hints: Operand) -> None:
    ctas = e.read(hints[0], "u16") if m["multicast"] else "None"
    what = f"{e.address(i.operands[0])}, {source}, {e.address(barrier)}, {ctas}"
    e.line(f"w.access.bulk.load({i.index}, {what}, {e.mask()})")


@op(rf"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(?:cluster|cta)\.global(?:\.tile)?{_LANDS}{_HINT}", outputs=0)
def load_tile(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """[target], [map, {coordinates}], [mbarrier]{, CTAs}{, cache-policy}."""
    _load(e, i, m, _tile(e, i.operands[1]), *i.operands[2:])


@op(rf"cp\.async\.bulk\.shared::(?:cluster|cta)\.global{_LANDS}{_HINT}", outputs=0)
def load_bytes(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """[target], [source], size, [mbarrier]{, CTAs}{, cache-policy}."""
    _load(e, i, m, _bytes(e, *i.operands[1:3]), *i.operands[3:])


@op(rf"cp\.async\.{_TILE_OUT}(?:\.tile)?\.bulk_group{_HINT}", outputs=0)
@op(rf"cp\.reduce\.async\.{_TILE_OUT}\.(?P<f>add|min|max|and|or|xor)(?:\.tile)?\.bulk_group{_HINT}", outputs=0)
def store_tile(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """[map, {coordinates}], [source]{, cache-policy}."""
    function = m.groupdict().get("f")
    what = f"{_tile(e, i.operands[0])}, {e.address(i.operands[1])}, {function!r}, None"
    e.line(f"w.access.bulk.store({i.index}, {what}, {e.mask()})")


@op(rf"cp\.async\.bulk\.global\.shared::cta\.bulk_group{_HINT}", outputs=0)
@op(
    rf"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group{_HINT}\."
    r"(?:(?P<h>add)\.noftz\.(?P<half>f16|bf16)|(?P<f>add|min|max)\.(?P<t>[us]32|[us]64|f32|f64)|(?P<b>and|or|xor)\.(?P<w>b32|b64))",
    outputs=0,
)
def store_bytes(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """[target], [source], size{, cache-policy}."""
    parts = m.groupdict()
    function = parts.get("h") or parts.get("f") or parts.get("b")
    type = parts.get("half") or parts.get("t") or parts.get("w")
    target = _bytes(e, i.operands[0], i.operands[2])
    e.line(f"w.access.bulk.store({i.index}, {target}, {e.address(i.operands[1])}, {function!r}, {type!r}, {e.mask()})")


@op(r"cp\.async\.bulk\.commit_group", outputs=0)
def commit(e: BlockEmitter, i: Instruction, m: Match) -> None:
    e.line(f"w.access.bulk.commit({i.index}, {e.mask()})")


@op(r"cp\.async\.bulk\.wait_group(?P<read>\.read)?", outputs=0)
def wait(e: BlockEmitter, i: Instruction, m: Match) -> None:
    allowed = i.operands[0]
    assert isinstance(allowed, Imm)
    e.line(f"w.access.bulk.wait({i.index}, {allowed.value}, {bool(m['read'])}, {e.mask()})")


@op(rf"cp\.async\.bulk\.prefetch(?:\.tensor\.[1-5]d)?\.L2\.global(?:\.tile)?{_HINT}", outputs=0)
@op(r"prefetch(?:\.param|\.const)?\.tensormap", outputs=0)
def prefetch(e: BlockEmitter, i: Instruction, m: Match) -> None:
    """A hint without effect."""
