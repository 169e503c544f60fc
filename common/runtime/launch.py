"""What the host hands to the kernels of a rung, and how it launches them: arguments, grids, workspaces.

Tensors are (batch, seqlen, heads, head_dim) of one 16-bit type with any strides, as long as the last dimension is
contiguous and every row starts at a multiple of 16 bytes; or of any other shape, contiguous (LSE, of fp32; where packed
sequences begin, of int32).
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from flashladder.common.emulator.tensor_map import TensorMap
from flashladder.common.errors import BuildError, UnsupportedProblemError
from flashladder.common.problem.rules import Expression

if TYPE_CHECKING:
    import torch

    from flashladder.common.compiler import LaunchInfo, PtxModule
    from flashladder.common.compiler.declaration import TensorMapInfo, Workspace
    from flashladder.common.problem.inputs import Tensors
    from flashladder.common.problem.problem import Problem

ELEMENT_BYTES = 2
ALIGNMENT = 16  # bytes: the width of one asynchronous copy
MAX_GRID_YZ = 65535  # CUDA's limit on the second and third grid dimension
MAX_TILES = 2**31 - 2**16  # of a persistent grid: each of its CTAs counts once more than there are, in 32 bits
ALL_KEYS = 2**30  # a window without an end on that side
MAX_ROW_STRIDE = 2**25 - 8  # elements, in multiples of 8; kernels compute row * stride in 32 bits within a tile
SIZES = ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k")


class TensorStride(ctypes.Structure):
    """Strides in elements."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("batch", "row", "head")]


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel."""

    entry: str
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int
    tensor_maps: tuple[TensorMap, ...] = ()  # its last argument


_BOUNDS = (("window_left", ctypes.c_int), ("window_right", ctypes.c_int), ("softcap", ctypes.c_float))  # bounds.cuh
_LAST = "alibi_slopes"  # alibi.cuh: behind all others


@cache
def params_type(
    tensors: tuple[str, ...], strided: tuple[str, ...], sizes: tuple[str, ...] = SIZES, bounded: bool = False
) -> type[ctypes.Structure]:
    """The first argument of the kernels of an operation: its tensors, strides of those with four dimensions, sizes; and
    where distances or scores are bounded, how."""
    fields = [
        *((name, ctypes.c_void_p) for name in tensors if name != _LAST),
        *((f"{name}_stride", TensorStride) for name in strided),
        *((name, ctypes.c_int) for name in sizes),
        ("softmax_scale", ctypes.c_float),
        *(_BOUNDS if bounded else ()),
        *([(_LAST, ctypes.c_void_p)] if _LAST in tensors else []),
    ]
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


_expression = cache(Expression)  # read once: each call in a model is a new problem
AttentionParams = params_type(("q", "k", "v", "o", "lse"), ("q", "k", "v", "o"))  # as params.cuh has it


def pack(problem: Problem, tensors: Tensors, addresses: Mapping[str, int] | None = None) -> bytes:
    """The first argument of a rung's kernels for these tensors.

    `addresses` gives the tensors other addresses than their own (the emulator's), by name. What is left out is null.
    Raises UnsupportedProblemError for a tensor that no kernel takes, or that is not the problem's.
    """
    shapes = problem.asked.shapes(problem)
    _check(problem, tensors, shapes)
    if addresses is None:
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.by_name.items()}
    strided = _strided(shapes)
    for name in strided:
        if (address := addresses[name]) % ALIGNMENT:
            raise UnsupportedProblemError(
                f"{name} starts at address {address:#x}; kernels need a multiple of {ALIGNMENT} bytes"
            )
    kind = _params_type(problem, shapes)
    params = kind(
        **{name: addresses.get(name) for name in shapes},
        **{f"{name}_stride": _stride(tensors.by_name[name]) for name in strided},
        **{name: getattr(problem, name) for name in (*SIZES, *problem.asked.sizes)},
        softmax_scale=problem.softmax_scale,
        **(_bounds(problem) if _is_bounded(problem) else {}),
    )
    return bytes(params)


def _params_type(problem: Problem, shapes: Mapping[str, tuple[int, ...]]) -> type[ctypes.Structure]:
    sizes = (*SIZES, *problem.asked.sizes)
    return params_type(tuple(shapes), _strided(shapes), sizes, _is_bounded(problem))


def _is_bounded(problem: Problem) -> bool:
    return problem.window or problem.softcap > 0


def _bounds(problem: Problem) -> dict[str, float]:
    window = {name: getattr(problem, name) for name in ("window_left", "window_right")}
    within = {name: ALL_KEYS if keys is None else min(keys, ALL_KEYS) for name, keys in window.items()}
    return {**within, "softcap": problem.softcap}


def _strided(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The tensors whose strides kernels are told: those with four dimensions."""
    return tuple(name for name, shape in shapes.items() if len(shape) == 4)


def launches(module: PtxModule, problem: Problem, params: bytes, num_sms: int) -> list[KernelLaunch]:
    """The launches of a run, in order.

    Raises BuildError where a kernel was compiled against other parameters or declares what cannot be run yet,
    UnsupportedProblemError where a grid is larger than CUDA allows.
    """
    return [
        KernelLaunch(
            kernel.entry,
            _grid(module, kernel.entry, kernel.launch, problem, params, num_sms),
            kernel.launch.num_threads,
            kernel.launch.shared_bytes,
            _mapped(kernel.launch, problem, params),
        )
        for kernel in module.kernels
    ]


def workspace_bytes(module: PtxModule, problem: Problem, workspace: Workspace) -> int:
    """How large a workspace is for a problem."""
    return sized(workspace, count_of(workspace).value(_names(module, module.launch, problem)))


def sized(workspace: Workspace, count: int) -> int:
    """Bytes of a workspace of so many elements."""
    return max(1, int(count)) * workspace.element_bytes


def count_of(workspace: Workspace) -> Expression:
    """The elements of a workspace."""
    return _expression(workspace.count, f"size of the workspace {workspace.name}")


def grid_of(entry: str, launch: LaunchInfo) -> Expression:
    """The tiles of a kernel along x, y and z."""
    return _expression(f"({', '.join(launch.grid)})", f"grid of {entry}")


def by_sizes(expression: Expression, module: PtxModule, launch: LaunchInfo) -> Callable[..., Any]:
    """A declaration's arithmetic as a function of SIZES."""
    return expression.function(SIZES, _constants(module, launch))


def check_runnable(module: PtxModule, entry: str, launch: LaunchInfo, params_bytes: int) -> None:
    """Raises BuildError where a kernel was compiled against other parameters, or declares what cannot be run yet."""
    what = f"{entry} of {module.version}"
    if launch.params_bytes != params_bytes:
        raise BuildError(
            f"{what} takes {launch.params_bytes} bytes of parameters, the host packs {params_bytes} for the operation "
            f"{module.operation}: make the kernel's struct and common/runtime/launch.py agree, then build again"
        )
    if launch.cluster != (1, 1, 1):
        shape = " x ".join(map(str, launch.cluster))
        raise BuildError(f"{what} wants clusters of {shape} CTAs, which neither the launch nor the emulator has yet")


def _grid(
    module: PtxModule, entry: str, launch: LaunchInfo, problem: Problem, params: bytes, num_sms: int
) -> tuple[int, int, int]:
    check_runnable(module, entry, launch, len(params))
    x, y, z = map(int, grid_of(entry, launch).value(_names(module, launch, problem)))
    if launch.ctas_per_sm:
        if (tiles := x * y * z) > MAX_TILES:
            raise UnsupportedProblemError(
                f"batch={problem.batch} with num_heads={problem.num_heads} are up to {tiles} tiles: a CTA that goes "
                f"from tile to tile counts up to {MAX_TILES}"
            )
        return min(tiles, launch.ctas_per_sm * num_sms), 1, 1
    for axis, count, text in (("y", y, launch.grid[1]), ("z", z, launch.grid[2])):
        if count > MAX_GRID_YZ:
            raise UnsupportedProblemError(f"{text}={count} along {axis}: a launch takes at most {MAX_GRID_YZ}")
    return x, y, z


def _mapped(launch: LaunchInfo, problem: Problem, params: bytes) -> tuple[TensorMap, ...]:
    """The tensors that a kernel moves by TMA, in boxes of one head's rows."""
    if not launch.tensor_maps:
        return ()
    shapes = problem.asked.shapes(problem)
    given = _params_type(problem, shapes).from_buffer_copy(params)
    strides = (getattr(given, f"{each.tensor}_stride") for each in launch.tensor_maps)
    kind = packed_mapped if problem.packed else mapped
    return tuple(
        kind(each, getattr(given, each.tensor), problem.dtype, shapes[each.tensor], (of.batch, of.row, of.head))
        for each, of in zip(launch.tensor_maps, strides, strict=True)
    )


def mapped(
    declared: TensorMapInfo, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
) -> TensorMap:
    """A tensor as TMA is to know it, given its shape and, in elements, the strides of batch, rows and heads: as
    (head_dim, seqlen, heads, batch).

    Where there is one only, torch's stride means nothing, and TMA may refuse it.
    """
    (batch, seqlen, heads, head_dim), (of_batch, of_row, of_head) = shape, strides
    counted = ((seqlen, of_row), (heads, of_head), (batch, of_batch))
    return TensorMap(
        address,
        dtype,
        (head_dim, seqlen, heads, batch),
        tuple(ELEMENT_BYTES * elements if count > 1 else ALIGNMENT for count, elements in counted),
        (declared.columns, declared.rows, 1, 1),
        declared.swizzle_bytes,
    )


def packed_mapped(
    declared: TensorMapInfo, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
) -> TensorMap:
    """The same of packed sequences: as (head_dim, rows, heads, ends), so that TMA stops at the end of a sequence.

    Of a sequence that ends before row `end` of the tensor, the last row is the map's last one at the coordinate `end`:
    a row on either of both is the same step in memory, and the map begins as many rows before the tensor as that has.
    """
    rows = shape[1]
    plain = mapped(declared, address, dtype, shape, strides)
    of_row, of_head, _ = plain.strides
    head_dim, _, heads, _ = plain.dims
    begin = (address - rows * of_row) % 2**64
    return dataclasses.replace(
        plain, address=begin, dims=(head_dim, rows, heads, rows + 1), strides=(of_row, of_head, of_row)
    )


def _names(module: PtxModule, launch: LaunchInfo, problem: Problem) -> dict[str, object]:
    """What a declaration's arithmetic may read: the configuration, the problem's sizes, the kernel's tile."""
    sizes = {name: getattr(problem, name) for name in (*SIZES, *problem.asked.sizes, "head_dim")}
    return {**_constants(module, launch), **sizes}


def _constants(module: PtxModule, launch: LaunchInfo) -> dict[str, object]:
    return {**module.config.as_dict(), "block_m": launch.block_m, "block_n": launch.block_n}


def _stride(tensor: torch.Tensor) -> TensorStride:
    batch, row, head, _ = tensor.stride()
    return TensorStride(batch=batch, row=row, head=head)


def check(problem: Problem, tensors: Tensors) -> None:
    """Raises UnsupportedProblemError unless kernels take the tensors, and they are the problem's."""
    _check(problem, tensors, problem.asked.shapes(problem))


def _check(problem: Problem, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    devices = {}
    for name, shape in shapes.items():
        if name not in tensors.by_name:
            continue
        tensor = tensors.by_name[name]
        dtype = problem.asked.dtype(problem, name)
        if len(shape) == 4:
            _check_layout(name, tensor)
        elif not tensor.is_contiguous():
            raise UnsupportedProblemError(f"{name} has strides {tensor.stride()}; kernels take it contiguous")
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise UnsupportedProblemError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}; with the other tensors it is {shape} {dtype}"
            )
        devices[name] = tensor.device
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UnsupportedProblemError(f"{given}; kernels take one device")


def _check_layout(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 4:
        raise UnsupportedProblemError(
            f"{name} has shape {tuple(tensor.shape)}; kernels take (batch, seqlen, heads, head_dim)"
        )
    if tensor.numel() == 0:
        raise UnsupportedProblemError(f"{name} has shape {tuple(tensor.shape)}; every dimension must be at least 1")
    if str(tensor.dtype) not in ("torch.bfloat16", "torch.float16"):
        raise UnsupportedProblemError(f"{name} is {tensor.dtype}; kernels take torch.bfloat16 or torch.float16")
    if tensor.stride(3) != 1:
        raise UnsupportedProblemError(
            f"{name} has strides {tensor.stride()}; kernels need the last dimension contiguous (stride 1)"
        )
    elements = ALIGNMENT // tensor.element_size()
    if any(stride % elements for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if size > 1):
        raise UnsupportedProblemError(
            f"{name} has strides {tensor.stride()}; kernels need multiples of {elements} elements ({ALIGNMENT} bytes)"
        )
    if tensor.shape[1] > 1 and tensor.stride(1) > MAX_ROW_STRIDE:
        raise UnsupportedProblemError(
            f"{name} has rows {tensor.stride(1)} elements apart; kernels take at most {MAX_ROW_STRIDE}"
        )
