"""What the host hands to the kernels of a rung, and how it launches them: arguments, grids, workspaces.

Tensors are (batch, seqlen, heads, head_dim) of one 16-bit type, or of an 8-bit one where the operation has it, with any
strides, as long as the last dimension is contiguous and every row starts at a multiple of 16 bytes; or of any other
shape, contiguous (LSE, of fp32; where packed sequences begin, of int32).

What a kernel's first argument consists of, the kernel declares: names, places and formats of its fields. The host fills
each by its name.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flashladder.common.compiler.declaration import STRIDES
from flashladder.common.emulator.tensor_map import TensorMap
from flashladder.common.errors import BuildError, UnsupportedProblemError
from flashladder.common.problem.rules import Expression

if TYPE_CHECKING:
    import torch

    from flashladder.common.compiler.artifact import DeclaredKernel, PtxModule
    from flashladder.common.compiler.declaration import LaunchInfo, TensorMapInfo, Workspace
    from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem

ELEMENT_BYTES = 2
ALIGNMENT = 16  # bytes: the width of one asynchronous copy
MAX_GRID_YZ = 65535  # CUDA's limit on the second and third grid dimension
MAX_TILES = 2**31 - 2**16  # of a persistent grid: each of its CTAs counts once more than there are, in 32 bits
MAX_CLUSTER = 16  # CTAs, on Hopper
MAX_ROW_STRIDE = 2**25 - 8  # elements, in multiples of 8; kernels compute row * stride in 32 bits within a tile
DIMENSIONS = 4  # of a tensor whose strides kernels are told
PROBLEMS_KEPT = 256  # of which it is remembered what they say of launches
SIZES = ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k")


class GridError(UnsupportedProblemError):
    """A grid is larger than CUDA takes: one of fewer sequences or heads may do."""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel."""

    entry: str
    params: bytes  # its first argument
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int
    tensor_maps: tuple[TensorMap, ...] = ()  # its last argument
    cluster: tuple[int, int, int] = (1, 1, 1)
    is_dependent: bool = False  # it may begin before the launch before it has ended


_expression = cache(Expression)  # read once: each call in a model is a new problem


class Launcher:
    """How the kernels of a module are launched: what does not depend on the problem is done once.

    Raises BuildError where a kernel declares what no GPU runs.
    """

    def __init__(self, module: PtxModule) -> None:
        self._version, config = module.version, module.config
        self._row_stride = config.row_stride if "row_stride" in config.fields else None
        self._kernels = [_Kernel(module, kernel, number) for number, kernel in enumerate(module.kernels)]
        self._known = lru_cache(PROBLEMS_KEPT)(self._told)
        self.workspaces = [SizedWorkspace(each, constants(module, module.launch)) for each in module.workspaces]

    def launches(
        self, problem: Problem, tensors: Tensors, num_sms: int, addresses: Mapping[str, int] | None = None
    ) -> list[KernelLaunch]:
        """Those of a run on these tensors, in order; a kernel whose grid is empty has none.

        `addresses` gives the tensors other addresses than their own (the emulator's), by name. One left out is null.
        Raises UnsupportedProblemError for a tensor that no kernel takes, or that is not the problem's; GridError where
        a grid is larger than CUDA allows; BuildError where a kernel takes what the operation does not have.
        """
        told = self._known(problem, num_sms)
        check(problem, tensors.by_name)
        self._check_row_stride(tensors)
        values = _values(tensors, problem, addresses)
        each = zip(self._kernels, told, strict=True)
        return [kernel.launch(problem, values, numbers) for kernel, numbers in each if all(numbers.grid)]

    def workspace_bytes(self, problem: Problem) -> list[int]:
        """How large the workspaces are for a problem."""
        sizes = sizes_of(problem)
        return [workspace.num_bytes(sizes) for workspace in self.workspaces]

    def _told(self, problem: Problem, num_sms: int) -> list[_Told]:
        """What does not depend on where tensors lie."""
        return [kernel.told(problem, num_sms) for kernel in self._kernels]

    def _check_row_stride(self, tensors: Tensors) -> None:
        """A kernel compiled for one row stride would be silently wrong on tensors with another."""
        if self._row_stride is None:
            return
        for name, tensor in tensors.by_name.items():
            if tensor.dim() == DIMENSIONS and (stride := tensor.stride(1)) != self._row_stride:
                raise UnsupportedProblemError(
                    f"{name} has rows {stride} elements apart; {self._version} was compiled for "
                    f"row_stride={self._row_stride}: configure it with row_stride={stride}"
                )


class _Told(NamedTuple):
    """What of a kernel's launch a problem says: its grid, and numbers by their names."""

    grid: tuple[int, int, int]
    numbers: Mapping[str, float]


class _Kernel:
    """One of them."""

    def __init__(self, module: PtxModule, kernel: DeclaredKernel, number: int) -> None:
        self._entry, self._declared = kernel.entry, kernel.launch
        self._what = f"{kernel.entry} of {module.version}"
        if (size := math.prod(kernel.launch.cluster)) > MAX_CLUSTER:
            raise BuildError(f"{self._what} wants clusters of {size} CTAs; a GPU has at most {MAX_CLUSTER} in one")
        if kernel.launch.is_dependent and not number:
            raise BuildError(f"{self._what} depends on the kernel before it; it is the rung's first one")
        self._layout = layout(kernel.launch)
        tiles = f"({', '.join(kernel.launch.grid)})"
        self._grid = arithmetic(tiles, f"grid of {kernel.entry}", constants(module, kernel.launch))

    def told(self, problem: Problem, num_sms: int) -> _Told:
        strided = (name for name, tensor in problem.tensors.items() if len(tensor.shape) == DIMENSIONS)
        of_tensors = {*problem.tensors, *(f"{name}_stride" for name in strided)}
        grid = self._grid_for(problem, num_sms)
        names = [field.name for field in self._declared.fields if field.name not in of_tensors]
        return _Told(grid, {name: self._number(problem, name) for name in names})

    def launch(self, problem: Problem, values: Mapping[str, Any], told: _Told) -> KernelLaunch:
        declared = self._declared
        return KernelLaunch(
            self._entry,
            self._params(problem, {**values, **told.numbers}),
            told.grid,
            declared.num_threads,
            declared.shared_bytes,
            _mapped(declared, problem, values) if declared.tensor_maps else (),
            declared.cluster,
            declared.is_dependent,
        )

    def _params(self, problem: Problem, values: Mapping[str, Any]) -> bytes:
        given: list[Any] = []
        for field in self._declared.fields:
            value = values[field.name]
            given.extend(value) if field.format == STRIDES else given.append(value)
        try:
            return self._layout.pack(*given)
        except struct.error as error:
            raise UnsupportedProblemError(
                f"{problem.name} does not fit the argument of {self._what}: {error}"
            ) from None

    def _number(self, problem: Problem, name: str) -> float:
        try:
            value = problem.asked.argument(problem, name)
        except AttributeError:
            value = None
        if not isinstance(value, (int, float)):
            raise BuildError(
                f"{self._what} takes {name}, which is no tensor of the operation {problem.operation}, nor the strides "
                "of one with four dimensions, nor a number that it knows: correct the kernel's struct, and build again"
            )
        return value

    def _grid_for(self, problem: Problem, num_sms: int) -> tuple[int, int, int]:
        x, y, z = map(int, self._grid.value(sizes_of(problem)))
        if self._declared.ctas_per_sm:
            if (tiles := x * y * z) > MAX_TILES:
                raise GridError(
                    f"batch={problem.batch} with num_heads={problem.num_heads} are up to {tiles} tiles: a CTA that "
                    f"goes from tile to tile counts up to {MAX_TILES}"
                )
            x, y, z = persistent(tiles, self._declared, num_sms), 1, 1
        for axis, count, text in (("y", y, self._declared.grid[1]), ("z", z, self._declared.grid[2])):
            if count > MAX_GRID_YZ:
                raise GridError(f"{text}={count} along {axis}: a launch takes at most {MAX_GRID_YZ}")
        if any(count % ctas for count, ctas in zip((x, y, z), self._declared.cluster, strict=True)):
            grid, cluster = (" x ".join(map(str, counts)) for counts in ((x, y, z), self._declared.cluster))
            raise UnsupportedProblemError(
                f"the grid of {self._what} is {grid} CTAs for {problem.name}: not a multiple of its clusters, {cluster}"
            )
        return x, y, z


class SizedWorkspace:
    """A workspace, and how large it is for a problem."""

    def __init__(self, workspace: Workspace, known: Mapping[str, object]) -> None:
        self.zeroed, self._element_bytes = workspace.zeroed, workspace.element_bytes
        self._count = arithmetic(workspace.count, f"size of the workspace {workspace.name}", known)
        self.names = self._count.names  # of the sizes that decide

    def num_bytes(self, sizes: Mapping[str, object]) -> int:
        return max(1, int(self._count.value(sizes))) * self._element_bytes


class _Arithmetic:
    """A declaration's arithmetic over a problem's sizes, in which constants are known."""

    def __init__(self, expression: Expression, known: Mapping[str, object]) -> None:
        self._expression, self._known = expression, known
        self.names = tuple(expression.names - known.keys())
        self._function = expression.function(self.names, known)

    def value(self, sizes: Mapping[str, object]) -> Any:
        """What it comes to; ConfigError where it reads what is neither a size nor a constant."""
        try:
            return self._function(*(sizes[name] for name in self.names))
        except KeyError:
            return self._expression.value({**self._known, **sizes})


def arithmetic(text: str, what: str, known: Mapping[str, object]) -> _Arithmetic:
    """That of a declaration; errors say what it is of."""
    return _Arithmetic(_expression(text, what), known)


def layout(launch: LaunchInfo) -> struct.Struct:
    """The first argument of a kernel, as it is declared."""
    formats, end = ["="], 0
    for field in launch.fields:
        one = struct.Struct(f"={format_of(field.format)}")
        formats.append(f"{field.offset - end}x{format_of(field.format)}")
        end = field.offset + one.size
    return struct.Struct("".join(formats) + f"{launch.params_bytes - end}x")


def format_of(declared: str) -> str:
    """A field's format for Python's struct."""
    return "3q" if declared == STRIDES else declared


def persistent(tiles: int, launch: LaunchInfo, num_sms: int) -> int:
    """CTAs of a persistent grid: whole clusters, and no more of them than there are tiles or room."""
    size = math.prod(launch.cluster)
    return max(1, min(tiles, launch.ctas_per_sm * num_sms) // size) * size


def constants(module: PtxModule, launch: LaunchInfo) -> dict[str, object]:
    """What a declaration's arithmetic may read beside sizes: the configuration, the kernel's tile."""
    return {**module.config.as_dict(), "block_m": launch.block_m, "block_n": launch.block_n}


def sizes_of(problem: Problem) -> dict[str, object]:
    """What a declaration's arithmetic may read of a problem."""
    sizes = {name: getattr(problem, name) for name in (*SIZES, "head_dim", "head_dim_v")}
    return sizes | {name: problem.asked.argument(problem, name) for name in problem.asked.sizes}


def _values(tensors: Tensors, problem: Problem, addresses: Mapping[str, int] | None) -> dict[str, Any]:
    """What kernels are told of tensors: addresses, and strides of those with four dimensions."""
    values: dict[str, Any] = {}
    for name, declared in problem.tensors.items():
        if (tensor := tensors.by_name.get(name)) is None:
            values |= {name: 0, f"{name}_stride": (0, 0, 0)}
            continue
        values[name] = address = tensor.data_ptr() if addresses is None else addresses[name]
        if not (address or tensor.is_meta) and tensor.numel():
            raise UnsupportedProblemError(f"{name} has no memory: its storage holds none of its elements")
        if len(declared.shape) == DIMENSIONS:
            values[f"{name}_stride"] = tensor.stride()[:3]
            if address % ALIGNMENT:
                raise UnsupportedProblemError(
                    f"{name} starts at address {address:#x}; kernels need a multiple of {ALIGNMENT} bytes"
                )
    return values


def _mapped(launch: LaunchInfo, problem: Problem, values: Mapping[str, Any]) -> tuple[TensorMap, ...]:
    """The tensors that a kernel moves by TMA, in boxes of one head's rows."""
    kind, declared = packed_mapped if problem.packed else mapped, problem.tensors
    return tuple(
        kind(each, values[each.tensor], problem.dtype, declared[each.tensor].shape, values[f"{each.tensor}_stride"])
        for each in launch.tensor_maps
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


def as_kernels_read(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A problem's tensors, those inputs copied whose strides or addresses are not as kernels take them.

    Raises UnsupportedProblemError unless kernels take them then, and they are the problem's.
    """
    inputs = (name for name in problem.inputs if not problem.tensors[name].stays)
    found = {**tensors, **{name: _aligned(tensors[name]) for name in inputs}}
    check(problem, found)
    return found


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != DIMENSIONS:
        return tensor
    steps = [step if size > 1 else 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True)][:3]
    places = tensor.data_ptr(), *(step * tensor.element_size() for step in steps)
    is_read = tensor.stride(3) == 1 and steps[1] <= MAX_ROW_STRIDE and not any(place % ALIGNMENT for place in places)
    return tensor if is_read else tensor.new_empty(tensor.shape).copy_(tensor)


def check(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises UnsupportedProblemError unless kernels take the tensors, and they are the problem's."""
    devices = {}
    for name, declared in problem.tensors.items():
        if (tensor := tensors.get(name)) is None:
            continue
        if not _is_plain(tensor, declared.shape, declared.dtype):
            _check_one(name, tensor, declared.shape, declared.dtype)
        devices[name] = tensor.device
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UnsupportedProblemError(f"{given}; kernels take one device")


def _is_plain(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor is as most are; what is not may still do."""
    if tensor.shape != shape or tensor.dtype is not dtype:
        return False
    if len(shape) != DIMENSIONS:
        return tensor.is_contiguous()
    of_batch, of_row, of_head, of_column = tensor.stride()
    steps = (of_batch | of_row | of_head) * dtype.itemsize
    return of_column == 1 and steps % ALIGNMENT == 0 and of_row <= MAX_ROW_STRIDE


def _check_one(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if len(shape) == DIMENSIONS:
        _check_layout(name, tensor, dtype)
    elif not tensor.is_contiguous():
        raise UnsupportedProblemError(f"{name} has strides {tensor.stride()}; kernels take it contiguous")
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        raise UnsupportedProblemError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}; with the other tensors it is {shape} {dtype}"
        )


def _check_layout(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 4:
        raise UnsupportedProblemError(
            f"{name} has shape {tuple(tensor.shape)}; kernels take (batch, seqlen, heads, head_dim)"
        )
    if tensor.numel() == 0:
        raise UnsupportedProblemError(f"{name} has shape {tuple(tensor.shape)}; every dimension must be at least 1")
    if tensor.dtype != dtype and str(tensor.dtype) not in ("torch.bfloat16", "torch.float16"):
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
