"""What plan.h is told of a rung that stands ready on a device: all of its launches that does not depend on tensors.

A plan is for problems of a kind, whatever their sizes: which dimensions of tensors are which sizes, the operation shows
by the shapes that it gives to two problems. Or it is for one problem, whose sizes may follow any rule. A kernel's
fields have their places from the kernel's declaration. Where a launch needs more than the plan can say, there is none.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch

from flashladder.common.catalog import Version
from flashladder.common.compiler.artifact import RungKernel
from flashladder.common.compiler.declaration import STRIDES, ParamsField, TensorMapInfo
from flashladder.common.emulator import tensor_map
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.buffers import OUTPUT, UPDATED, Tensor
from flashladder.common.problem.problem import LSE, SCALES, Problem
from flashladder.common.runtime import gpu
from flashladder.common.runtime.launch import (
    ALIGNMENT,
    MAX_ROW_STRIDE,
    MAX_TILES,
    SIZES,
    SizedWorkspace,
    arithmetic,
    constants,
    mapped,
    packed_mapped,
    persistent,
    sizes_of,
)
from flashladder.common.runtime.workspaces import Lend, OfOneSize, Scratch, ZeroedOfAnySize

MAX = {"tensors": 16, "kernels": 4, "fields": 48, "maps": 4, "workspaces": 6}  # as plan.h has them
MAX_SIZES, MAX_PARAMS, MAX_DIMENSIONS = 8, 512, 4
ATTRIBUTE_BYTES = 72  # of a CUlaunchAttribute
SCALE = "softmax_scale"  # which is said at each call
DLPACK_DEVICES = {"cpu": 1, "cuda": 2}
DLPACK_DTYPES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32)}
DLPACK_DTYPES |= {torch.float8_e4m3fn: (10, 8)}
_PROBES = ((11, 221, 13, 1009, 2003), (7, 323, 19, 1511, 2503))  # SIZES, of which none is another, nor usual


class TensorPlan(ctypes.Structure):
    """As plan.h has it, like those below."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("dtype_code", "dtype_bits", "ndim")),
        *((name, ctypes.c_int) for name in ("is_output", "is_updated", "may_be_left_out")),
        ("shape", ctypes.c_int64 * MAX_DIMENSIONS),
    ]


class FieldPlan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("kind", "at", "number")]


class MapPlan(ctypes.Structure):
    _fields_ = [("tensor", ctypes.c_int), ("made", ctypes.c_ubyte * tensor_map.NUM_BYTES)]


class KernelPlan(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("function", "attributes")),
        *((name, ctypes.c_int64 * 3) for name in ("grid", "divisors")),
        ("cluster", ctypes.c_int * 3),
        *((name, ctypes.c_int) for name in ("num_threads", "shared_bytes", "most_ctas")),
        *((name, ctypes.c_int) for name in ("num_attributes", "num_fields", "num_maps")),
        ("fields", FieldPlan * MAX["fields"]),
        ("maps", MapPlan * MAX["maps"]),
    ]


class WorkspacePlan(ctypes.Structure):
    _fields_ = [(name, ctypes.py_object) for name in ("lend", "of_stream")]


class Plan(ctypes.Structure):
    """What fast_path.cpp is handed: it reads the memory, and keeps the object meanwhile."""

    _fields_ = [
        ("launch_kernel", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("min_scale", "max_scale")),
        *((name, ctypes.c_int64) for name in ("row_stride", "max_row_stride")),
        *((name, ctypes.c_int) for name in ("device_type", "device", "device_index")),
        *((name, ctypes.c_int) for name in ("address_at", "strides_at", "dims_at", "packed")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_heads_k")),
        ("gqa", ctypes.c_int),
        *((name, ctypes.c_int) for name in ("num_tensors", "num_sizes", "num_kernels", "num_workspaces")),
        ("multiples", ctypes.c_int64 * MAX_SIZES),
        ("tensors", TensorPlan * MAX["tensors"]),
        ("kernels", KernelPlan * MAX["kernels"]),
        ("workspaces", WorkspacePlan * MAX["workspaces"]),
    ]


class _CannotSay(Exception):
    """A launch needs what a plan has no place for."""


def plan(
    rung: Version,
    kernel: gpu.LoadedKernel,
    lenders: Sequence[Lend],
    problem: Problem,
    device: torch.device,
    alone: bool = False,
) -> Plan | None:
    """That of a rung for problems of a kind on a device, which is current; None where there can be none.

    With `alone` it is that of the problem, which the rung takes.
    """
    try:
        return _plan(rung, kernel, lenders, _Alone(problem) if alone else _Dimensions(problem), device)
    except (_CannotSay, UnsupportedProblemError):
        return None


def index_of(device: torch.device) -> int:
    """As tensors tell it: -1 is a CPU."""
    return -1 if device.index is None else device.index


def _plan(
    rung: Version, kernel: gpu.LoadedKernel, lenders: Sequence[Lend], shapes: _Sizes, device: torch.device
) -> Plan:
    config = kernel.artifact.config
    every = (_kernel(kernel, each, shapes, device) for each in kernel.artifact.kernels)
    kernels = [each for each in every if all(each[0].grid)]
    workspaces = [_workspace(*each, shapes) for each in zip(kernel.launcher.workspaces, lenders, strict=True)]
    tensors = [_tensor(name, shapes.problem, shape) for name, shape in shapes.shapes.items()]
    if not (launch_kernel := kernel.launch_address()):
        raise _CannotSay
    multiples = {"seqlen_q": rung.supports.seqlen_q, "seqlen_k": rung.supports.seqlen_k}
    tiles = {name: 1 if tile == "any" else int(getattr(config, tile)) for name, tile in multiples.items()}
    made = Plan(
        launch_kernel=launch_kernel,
        min_scale=SCALES[0],
        max_scale=SCALES[1],
        row_stride=config.row_stride if "row_stride" in config.fields else 0,
        max_row_stride=MAX_ROW_STRIDE,
        device_type=DLPACK_DEVICES[device.type],
        device=device.index or 0,
        device_index=index_of(device),
        address_at=tensor_map.ADDRESS_AT,
        strides_at=tensor_map.STRIDES_AT,
        dims_at=tensor_map.DIMS_AT,
        packed=shapes.problem.packed,
        num_heads=shapes.number("num_heads"),
        num_heads_k=shapes.number("num_heads_k" if shapes.tell("num_heads_k") else "num_heads"),
        gqa=rung.supports.gqa,
        num_tensors=len(tensors),
        num_sizes=len(SIZES),
        num_kernels=len(kernels),
        num_workspaces=len(workspaces),
        multiples=(ctypes.c_int64 * MAX_SIZES)(*(tiles.get(name, 1) for name in SIZES)),
        tensors=_array(TensorPlan, tensors, "tensors"),
        kernels=_array(KernelPlan, [each for each, _ in kernels], "kernels"),
        workspaces=_array(WorkspacePlan, workspaces, "workspaces"),
    )
    made.kept = kernels, workspaces  # what it points to
    return made


class _Sizes:
    """Of problems and their tensors, as a plan's numbers: each itself, or from -1 downwards one of SIZES."""

    shapes: dict[str, tuple[int, ...]]

    def __init__(self, problem: Problem) -> None:
        self.problem, self.asked = problem, problem.asked

    def tell(self, name: str) -> bool:
        """Whether something tells a size."""
        raise NotImplementedError

    def number(self, name: str) -> int:
        """A whole number that kernels are told, or a grid reads."""
        raise NotImplementedError

    def axis(self, text: str, known: Mapping[str, object]) -> tuple[int, int]:
        """Of a grid's arithmetic: a number, and by what it is divided."""
        raise NotImplementedError

    def num_bytes(self, workspace: SizedWorkspace) -> Callable[[tuple[int, ...]], int]:
        """How large a workspace is where SIZES are the given ones."""
        raise NotImplementedError


class _Alone(_Sizes):
    """Of one problem: all are known."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.shapes = {name: tensor.shape for name, tensor in problem.tensors.items()}

    def tell(self, name: str) -> bool:
        return name in SIZES

    def number(self, name: str) -> int:
        number = self.asked.argument(self.problem, name)
        if type(number) is not int or not 0 <= number < 2**31:
            raise _CannotSay
        return number

    def axis(self, text: str, known: Mapping[str, object]) -> tuple[int, int]:
        return int(arithmetic(text, "grid", known).value(sizes_of(self.problem))), 1

    def num_bytes(self, workspace: SizedWorkspace) -> Callable[[tuple[int, ...]], int]:
        num_bytes = workspace.num_bytes(sizes_of(self.problem))
        return lambda sizes: num_bytes


class _Dimensions(_Sizes):
    """Of problems of a kind: tensors tell SIZES."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        with_sizes: list[dict[str, Any]] = [dict(zip(SIZES, sizes, strict=True)) for sizes in _PROBES]
        self.probes = [replace(problem, **sizes, layout="bshd") for sizes in with_sizes]
        if any(tuple(getattr(probe, name) for name in SIZES) not in _PROBES for probe in self.probes):
            raise _CannotSay  # other fields decide on sizes
        one, other = (probe.tensors for probe in self.probes)
        self.shapes = {name: tuple(map(self._dimension, one[name].shape, other[name].shape)) for name in one}
        always = [shape for name, shape in self.shapes.items() if not _may_be_left_out(name, one[name])]
        self.told = {number for shape in always for number in shape if number < 0}

    def _dimension(self, one: int, other: int) -> int:
        for number, sizes in enumerate(zip(*_PROBES, strict=True)):
            if sizes == (one, other):
                return -1 - number
        if one != other:
            raise _CannotSay
        return one

    def tell(self, name: str) -> bool:
        return name in SIZES and -1 - SIZES.index(name) in self.told

    def number(self, name: str) -> int:
        if not self.tell(name) or any(self.asked.argument(each, name) != getattr(each, name) for each in self.probes):
            raise _CannotSay
        return -1 - SIZES.index(name)

    def axis(self, text: str, known: Mapping[str, object]) -> tuple[int, int]:
        if not (found := re.fullmatch(r"cdiv\((\w+), (\w+)\)|(\w+)", text)):
            raise _CannotSay

        def value(word: str) -> int:
            number = int(word) if word.isdigit() else known.get(word)
            return number if type(number) is int else self.number(word)

        number, divisor = value(found[1] or found[3]), value(found[2] or "1")
        if divisor < 1:
            raise _CannotSay
        return number, divisor

    def num_bytes(self, workspace: SizedWorkspace) -> Callable[[tuple[int, ...]], int]:
        fixed = {"head_dim": self.problem.head_dim}
        for name in set(workspace.names) - fixed.keys():
            self.number(name)
        return lambda sizes: workspace.num_bytes({**fixed, **dict(zip(SIZES, sizes, strict=True))})


def _array(kind: type[ctypes.Structure], items: Sequence[ctypes.Structure], name: str) -> ctypes.Array[Any]:
    if len(items) > MAX[name]:
        raise _CannotSay
    return (kind * MAX[name])(*items)


def _may_be_left_out(name: str, tensor: Tensor) -> bool:
    """Kernels take null for a log-sum-exp, also for problems that ask for it."""
    return tensor.optional or (name == LSE and tensor.role == OUTPUT)


def _tensor(name: str, problem: Problem, shape: tuple[int, ...]) -> TensorPlan:
    asked = problem.tensors[name]
    if len(shape) > MAX_DIMENSIONS or asked.dtype not in DLPACK_DTYPES:
        raise _CannotSay
    dimensions = (ctypes.c_int64 * MAX_DIMENSIONS)(*shape)
    said = asked.role == OUTPUT, asked.role == UPDATED, _may_be_left_out(name, asked)
    return TensorPlan(*DLPACK_DTYPES[asked.dtype], len(shape), *said, dimensions)


def _kernel(
    loaded: gpu.LoadedKernel, kernel: RungKernel, shapes: _Sizes, device: torch.device
) -> tuple[KernelPlan, object]:
    """That of a kernel, and what it points to."""
    launch, known = kernel.launch, constants(loaded.artifact, kernel.launch)
    if launch.params_bytes > MAX_PARAMS:
        raise _CannotSay
    attributes = loaded.attributes(launch.cluster, launch.is_dependent)
    packed = b"".join(ctypes.string_at(each.getPtr(), ATTRIBUTE_BYTES) for each in attributes)
    kept = ctypes.create_string_buffer(packed, len(packed))
    axes = [shapes.axis(text, known) for text in launch.grid]
    made = KernelPlan(
        function=int(loaded.function(index_of(device), kernel.entry)),
        attributes=ctypes.addressof(kept),
        grid=tuple(number for number, _ in axes),
        divisors=tuple(divisor for _, divisor in axes),
        cluster=tuple(launch.cluster),
        num_threads=launch.num_threads,
        shared_bytes=launch.shared_bytes,
        most_ctas=persistent(MAX_TILES, launch, gpu.num_sms()) if launch.ctas_per_sm else 0,
        num_attributes=len(attributes),
        num_fields=len(launch.fields),
        num_maps=len(launch.tensor_maps),
        fields=_array(FieldPlan, [_field(each, shapes) for each in launch.fields], "fields"),
        maps=_array(MapPlan, [_map(loaded, each, shapes, device) for each in launch.tensor_maps], "maps"),
    )
    return made, kept


def _field(field: ParamsField, shapes: _Sizes) -> FieldPlan:
    names, tensor = list(shapes.shapes), field.name.removesuffix("_stride")
    if field.format == "Q" and field.name in names:
        return FieldPlan(ord("A"), field.offset, names.index(field.name))
    if field.format == STRIDES and len(shapes.shapes.get(tensor, ())) == MAX_DIMENSIONS:
        return FieldPlan(ord("s"), field.offset, names.index(tensor))
    if field.format == "f" and field.name == SCALE:
        return FieldPlan(ord("f"), field.offset, 0)
    if field.format == "f" and isinstance(shapes, _Alone):
        number = shapes.asked.argument(shapes.problem, field.name)
        return FieldPlan(ord("F"), field.offset, *struct.unpack("i", struct.pack("f", number)))
    if field.format not in ("i", "q"):
        raise _CannotSay
    return FieldPlan(ord(field.format), field.offset, shapes.number(field.name))


def _map(loaded: gpu.LoadedKernel, declared: TensorMapInfo, shapes: _Sizes, device: torch.device) -> MapPlan:
    """A tensor map, of some tensor; a driver that makes others than tensor_map.encode makes them all."""
    somewhere = torch.empty(ALIGNMENT, dtype=torch.uint8, device=device).data_ptr()
    shape = (2, 3, 4, shapes.shapes[declared.tensor][-1])
    kind = packed_mapped if shapes.problem.packed else mapped
    wanted = kind(declared, somewhere, shapes.problem.dtype, shape, (8, 16, 24))
    made = loaded.tensor_map(wanted)
    if made != tensor_map.encode(*astuple(wanted)):
        raise _CannotSay
    return MapPlan(list(shapes.shapes).index(declared.tensor), tuple(made))


def _workspace(workspace: SizedWorkspace, lend: Lend, shapes: _Sizes) -> WorkspacePlan:
    if isinstance(lend, OfOneSize):
        return WorkspacePlan(lend, lend.of_stream)
    num_bytes = shapes.num_bytes(workspace)
    if isinstance(lend, (Scratch, ZeroedOfAnySize)) and isinstance(shapes, _Alone):
        return _workspace(workspace, lend.of_size(num_bytes(())), shapes)

    def lent(stream: int, sizes: tuple[int, ...]) -> torch.Tensor | int:
        return lend(stream, num_bytes(sizes))

    return WorkspacePlan(lent, None)
