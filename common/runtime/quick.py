"""A call in C++: quick.cpp, which is compiled beside the program, and used from when it is there. Until then, and where
it cannot be compiled, calls go through Python (common/runtime/calls.py); they launch the same.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import astuple
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from flashladder.common.compiler import library
from flashladder.common.compiler.declaration import DEFAULT_GRID
from flashladder.common.emulator import tensor_map
from flashladder.common.errors import FlashLadderError, ToolchainError
from flashladder.common.problem.problem import SCALES
from flashladder.common.runtime.launch import ALIGNMENT, MAX_ROW_STRIDE, mapped
from flashladder.common.runtime.tuned import LONG_FROM

if TYPE_CHECKING:
    from flashladder.common.runtime.calls import ZeroedMemory
    from flashladder.common.runtime.gpu import LoadedKernel

SOURCE = Path(__file__).with_suffix(".cpp")
_TENSORS = ("q", "k", "v", "o")
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's
_preparing = threading.Lock()
EXCHANGE = "__dlpack_c_exchange_api__"

extension: ModuleType | None = None  # from when it is there
NOT_ASKED = "no call was made ready yet"
missing = NOT_ASKED  # why it is not there


class MapPlan(ctypes.Structure):
    """As quick.cpp has it."""

    _fields_ = [("tensor", ctypes.c_int), ("made", ctypes.c_ubyte * tensor_map.NUM_BYTES)]


class Plan(ctypes.Structure):
    """As quick.cpp has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("launch_kernel", "function")),
        *((name, ctypes.c_double) for name in ("min_scale", "max_scale")),
        *((name, ctypes.c_int64) for name in ("row_stride", "max_row_stride")),
        *((name, ctypes.py_object) for name in ("counter", "counters")),
        *((name, ctypes.c_int) for name in ("device_type", "device", "device_index")),
        *((name, ctypes.c_int) for name in ("gqa", "multiple_q", "multiple_k")),
        *((name, ctypes.c_int) for name in ("block_m", "num_threads", "shared_bytes", "most_ctas")),
        *((name, ctypes.c_int) for name in ("address_at", "strides_at", "dims_at", "num_maps")),
        ("maps", MapPlan * 4),
    ]


def new_o(q: torch.Tensor) -> torch.Tensor:
    """Memory for an output like q, contiguous."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """Memory for the log-sum-exp of each row of q, (batch, num_heads, seqlen_q)."""
    batch, seqlen_q, num_heads, _ = q.shape
    return q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)


def plan(
    kernel: LoadedKernel,
    device: torch.device,
    most_ctas: int,
    counters: ZeroedMemory | None,
    **limits: int,
) -> Plan | None:
    """What the extension is to know of a kernel on a device; None where it takes the way of Python.

    The limits are gqa, multiple_q, multiple_k and row_stride, of which 0 is any.
    """
    artifact, info, index = kernel.artifact, kernel.artifact.launch, number(device)
    if len(artifact.kernels) > 1 or info.grid != DEFAULT_GRID:
        return None
    launch_kernel, maps = kernel.launch_address(), _maps(kernel, device)
    if not launch_kernel or maps is None:
        return None
    return Plan(
        launch_kernel=launch_kernel,
        function=int(kernel.function(index, artifact.entry)),
        min_scale=SCALES[0],
        max_scale=SCALES[1],
        max_row_stride=MAX_ROW_STRIDE,
        counter=counters,
        counters=counters.of_stream if counters else None,
        device_type=_DEVICE_TYPES[device.type],
        device=device.index or 0,
        device_index=index,
        block_m=info.block_m,
        num_threads=info.num_threads,
        shared_bytes=info.shared_bytes,
        most_ctas=most_ctas,
        num_maps=len(maps),
        address_at=tensor_map.ADDRESS_AT,
        strides_at=tensor_map.STRIDES_AT,
        dims_at=tensor_map.DIMS_AT,
        maps=(MapPlan * 4)(*maps),
        **limits,
    )


def _maps(kernel: LoadedKernel, device: torch.device) -> list[MapPlan] | None:
    """The tensor maps of a kernel, for some tensor; None where this driver makes others than tensor_map.encode."""
    config, maps = kernel.artifact.config, []
    for each in kernel.artifact.launch.tensor_maps:
        somewhere = torch.empty(ALIGNMENT, dtype=torch.uint8, device=device).data_ptr()
        asked = mapped(each, somewhere, str(config.dtype), (2, 3, 4, int(config.head_dim)), (8, 16, 24))
        made = kernel.tensor_map(asked)
        if made != tensor_map.encode(*astuple(asked)):
            return None
        maps.append(MapPlan(_TENSORS.index(each.tensor), tuple(made)))
    return maps


def number(device: torch.device) -> int:
    """As tensors tell it: -1 is a CPU."""
    return -1 if device.index is None else device.index


def prepare() -> None:
    """Loads the extension if it is built; else has it built beside the program. Once."""
    global missing
    with _preparing:
        if missing != NOT_ASKED:
            return
        missing = "it is being compiled"
    if library.find_extension(SOURCE):
        load()
    else:
        threading.Thread(target=load, name="flashladder: quick.cpp", daemon=True).start()


def load() -> None:
    """Builds the extension, if need be, and has calls go through it from now on; `missing` says why not."""
    global extension, missing
    try:
        extension, missing = made(), ""
    except (FlashLadderError, OSError, ImportError) as error:
        missing = str(error).splitlines()[0]


def made() -> ModuleType:
    """The extension. ToolchainError, BuildError or ImportError where it cannot be made."""
    if not hasattr(torch.Tensor, EXCHANGE):
        raise ToolchainError(f"torch {torch.__version__} has no {EXCHANGE}, by which C++ reads tensors; torch 2.13 has")
    loader = ExtensionFileLoader("quick", str(library.build_extension(SOURCE)))
    module = module_from_spec(ModuleSpec(loader.name, loader, origin=loader.path))
    loader.exec_module(module)
    module.set_up(getattr(torch.Tensor, EXCHANGE), torch.Tensor, torch._C, new_o, new_lse, LONG_FROM)
    return module
