"""A call in C++: quick.cpp, which is compiled beside the program, and used from when it is there. Until then, and where
there is no C++ compiler, calls go through Python (common/run/calls.py); they launch the same.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flashladder.common.build import library
from flashladder.common.build.artifact import Artifact
from flashladder.common.build.declaration import DEFAULT_GRID
from flashladder.common.errors import FlashLadderError
from flashladder.common.problem import SCALES
from flashladder.common.run.launch import MAX_ROW_STRIDE

if TYPE_CHECKING:
    from flashladder.common.run.gpu import LoadedKernel

SOURCE = Path(__file__).with_suffix(".cpp")
_TENSORS = ("q", "k", "v", "o")
_preparing = threading.Lock()

launch: Callable[..., int] | None = None  # torch's operator, from when it is there; 0 where it launched
NOT_ASKED = "no call was made ready yet"
missing = NOT_ASKED  # why it is not there


class MapPlan(ctypes.Structure):
    """As quick.cpp has it."""

    _fields_ = [(name, ctypes.c_int) for name in ("tensor", "columns", "rows", "swizzle")]


class Plan(ctypes.Structure):
    """As quick.cpp has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("launch_kernel", "encode_tiled", "function")),
        *((name, ctypes.c_double) for name in ("min_scale", "max_scale")),
        *((name, ctypes.c_int64) for name in ("row_stride", "max_row_stride")),
        *((name, ctypes.c_int) for name in ("device", "gqa", "multiple_q", "multiple_k")),
        *((name, ctypes.c_int) for name in ("block_m", "num_threads", "shared_bytes", "most_ctas")),
        *((name, ctypes.c_int) for name in ("num_maps", "map_type", "l2_promotion")),
        ("maps", MapPlan * 4),
    ]


def plan(kernel: LoadedKernel, device: int, most_ctas: int, **limits: int) -> Plan | None:
    """What the operator is to know of a kernel on a device; None where it takes the way of Python.

    The limits are gqa, multiple_q, multiple_k and row_stride, of which 0 is any.
    """
    artifact, info = kernel.artifact, kernel.artifact.launch
    if len(artifact.kernels) > 1 or info.grid != DEFAULT_GRID or not _has_a_counter_at_most(artifact):
        return None
    launch_kernel, encode_tiled = kernel.entry_points()
    if not launch_kernel or (info.tensor_maps and not encode_tiled):
        return None
    map_type, promotion, swizzles = kernel.map_codes(str(artifact.config.dtype))
    maps = [
        MapPlan(_TENSORS.index(each.tensor), each.columns, each.rows, int(swizzles[each.swizzle_bytes]))
        for each in info.tensor_maps
    ]
    return Plan(
        launch_kernel=launch_kernel,
        encode_tiled=encode_tiled,
        function=int(kernel.function(device, artifact.entry)),
        min_scale=SCALES[0],
        max_scale=SCALES[1],
        max_row_stride=MAX_ROW_STRIDE,
        device=device,
        block_m=info.block_m,
        num_threads=info.num_threads,
        shared_bytes=info.shared_bytes,
        most_ctas=most_ctas,
        num_maps=len(maps),
        map_type=int(map_type),
        l2_promotion=int(promotion),
        maps=(MapPlan * 4)(*maps),
        **limits,
    )


def _has_a_counter_at_most(artifact: Artifact) -> bool:
    return all(workspace.zeroed for workspace in artifact.workspaces) and len(artifact.workspaces) <= 1


def prepare() -> None:
    """Loads the operator if it is built; else has it built beside the program. Once."""
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
    """Builds the operator, if need be, and has calls go through it from now on; `missing` says why not."""
    global launch, missing
    try:
        torch.ops.load_library(library.build_extension(SOURCE))
        launch, missing = torch.ops.flashladder.launch.default, ""
    except (FlashLadderError, OSError) as error:
        missing = str(error).splitlines()[0]
