"""What a rung's kernels declare of themselves (common/cuda/launch.cuh), read back from the PTX.

Each declaration is a constant: launch_<entry> and params_<entry> of a kernel, workspace_<name> of memory that the host
lends.
"""

import ctypes
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from flashladder.common.errors import BuildError
from flashladder.common.problem.config import listing

DEFAULT_GRID = ("cdiv(seqlen_q, block_m)", "num_heads", "batch")
STRIDES = "s"  # the format of a TensorStride
_CONSTANT = re.compile(r"\.align 4 \.b8 (launch|params|workspace)_(\w+)\[(\d+)\] = \{([\d, ]+)\}")

_ALWAYS = ("num_threads", "shared_bytes", "block_m", "block_n", "params_bytes")

Struct = TypeVar("Struct", bound=ctypes.Structure)


class TensorMapRecord(ctypes.Structure):
    """TensorMap."""

    _fields_ = (
        ("tensor", ctypes.c_char * 8),
        *((name, ctypes.c_uint32) for name in ("rows", "columns", "swizzle_bytes")),
    )


class FieldRecord(ctypes.Structure):
    """Field."""

    _fields_ = (("name", ctypes.c_char * 27), ("format", ctypes.c_char), ("offset", ctypes.c_uint32))


class LaunchRecord(ctypes.Structure):
    """Launch."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in _ALWAYS),
        *((name, ctypes.c_uint32) for name in ("order", "ctas_per_sm")),
        ("cluster", ctypes.c_uint32 * 3),
        ("is_dependent", ctypes.c_uint32),
        ("grid", ctypes.c_char * 48 * 3),
        ("tensor_maps", TensorMapRecord * 4),
    )


class WorkspaceRecord(ctypes.Structure):
    """WorkspaceSize."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("order", "element_bytes", "zeroed")),
        ("count", ctypes.c_char * 116),
    )


@dataclass(frozen=True)
class TensorMapInfo:
    """A tensor that a kernel moves by TMA: its box, and the bytes of a swizzled row (0: none)."""

    tensor: str
    rows: int
    columns: int
    swizzle_bytes: int


@dataclass(frozen=True)
class ParamsField:
    """A field of a kernel's first argument: its name, its place, and its format in Python's struct, or STRIDES."""

    name: str
    format: str
    offset: int


@dataclass(frozen=True)
class LaunchInfo:
    """What a kernel declares of its launch."""

    num_threads: int
    shared_bytes: int  # dynamic shared memory of one CTA
    block_m: int
    block_n: int
    params_bytes: int  # size of its first argument
    grid: tuple[str, ...] = DEFAULT_GRID  # tiles along x, y, z: expressions (common/problem/rules.py)
    ctas_per_sm: int = 0  # of a persistent grid; 0: a CTA for each tile
    cluster: tuple[int, int, int] = (1, 1, 1)
    is_dependent: bool = False  # it may begin before the kernel before it has ended
    tensor_maps: tuple[TensorMapInfo, ...] = ()
    fields: tuple[ParamsField, ...] = ()  # of its first argument


@dataclass(frozen=True)
class Workspace:
    """Memory that the host lends a rung for a run."""

    name: str
    element_bytes: int
    count: str  # elements: an expression
    zeroed: bool  # when it is lent; the kernels leave it so


@dataclass(frozen=True)
class PtxDeclaration:
    """The kernels of a rung in the order in which they run, and their workspaces in that of the pointers."""

    launches: dict[str, LaunchInfo]  # by entry
    workspaces: tuple[Workspace, ...]


def read(ptx: str) -> PtxDeclaration:
    """What the PTX declares. BuildError where it declares no kernel."""
    launches = {name: _record(content, LaunchRecord) for name, content in _constants(ptx, "launch")}
    fields = {name: _fields(content) for name, content in _constants(ptx, "params")}
    workspaces = {name: _record(content, WorkspaceRecord) for name, content in _constants(ptx, "workspace")}
    if not launches:
        raise BuildError("the kernel declares no launch; put FLASHLADDER_LAUNCH(...) of params.cuh into it")
    if without := launches.keys() - fields.keys():
        raise BuildError(
            f"{listing(without)} declares no fields of its argument; put FLASHLADDER_FIELDS(...) into its struct"
        )
    return PtxDeclaration(
        {
            name: _launch(launches[name], fields[name])
            for name in sorted(launches, key=lambda name: launches[name].order)
        },
        tuple(
            Workspace(name, record.element_bytes, record.count.decode(), bool(record.zeroed))
            for name, record in sorted(workspaces.items(), key=lambda item: item[1].order)
        ),
    )


def _launch(record: Any, fields: tuple[ParamsField, ...]) -> LaunchInfo:
    grid = tuple(text.value.decode() for text in record.grid)
    x, y, z = (max(1, count) for count in record.cluster)
    return LaunchInfo(
        **{name: getattr(record, name) for name in _ALWAYS},
        grid=grid if grid[0] else DEFAULT_GRID,
        ctas_per_sm=record.ctas_per_sm,
        cluster=(x, y, z),
        is_dependent=bool(record.is_dependent),
        tensor_maps=tuple(
            TensorMapInfo(each.tensor.decode(), each.rows, each.columns, each.swizzle_bytes)
            for each in record.tensor_maps
            if each.rows
        ),
        fields=fields,
    )


def _fields(content: bytes) -> tuple[ParamsField, ...]:
    """Of Fields, which has as many as the struct, and then where they end."""
    records = (FieldRecord * (len(content) // ctypes.sizeof(FieldRecord))).from_buffer_copy(content)
    return tuple(ParamsField(each.name.decode(), each.format.decode(), each.offset) for each in records)


def _constants(ptx: str, role: str) -> list[tuple[str, bytes]]:
    """The constants of a role and their bytes; PTX leaves out zeros at the end."""
    return [
        (name, bytes(map(int, numbers.split(","))).ljust(int(size), b"\0"))
        for found, name, size, numbers in _CONSTANT.findall(ptx)
        if found == role
    ]


def _record(content: bytes, kind: type[Struct]) -> Struct:
    if len(content) != ctypes.sizeof(kind):
        raise BuildError(
            f"the kernel's declaration has {len(content)} bytes, {kind.__name__} {ctypes.sizeof(kind)}: make "
            "common/compiler/declaration.py and common/cuda/launch.cuh agree, then build again"
        )
    return kind.from_buffer_copy(content)
