"""What the host hands to a kernel: a mirror of AttentionParams in common/cuda/params.cuh, and the grid.

Tensors are (batch, seqlen, heads, head_dim) of one 16-bit type with any strides, as long as the last dimension is
contiguous and every row starts at a multiple of 16 bytes. LSE is (batch, heads, seqlen_q), fp32, contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashladder.common.errors import BuildError, UnsupportedProblemError

if TYPE_CHECKING:
    import torch

    from flashladder.common.build import LaunchInfo

ALIGNMENT = 16  # bytes: the width of one asynchronous copy
MAX_GRID_YZ = 65535  # CUDA's limit on the second and third grid dimension
MAX_ROW_STRIDE = 2**25 - 8  # elements: kernels count the bytes of the 32 rows that one step of a copy takes in 32 bits


class TensorStride(ctypes.Structure):
    """Strides in elements."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("batch", "row", "head")]


class AttentionParams(ctypes.Structure):
    """The one kernel argument; params.cuh declares it for the device."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((f"{name}_stride", TensorStride) for name in ("q", "k", "v", "o")),
        *((name, ctypes.c_int) for name in ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k")),
        ("softmax_scale", ctypes.c_float),
    ]


def attention_params(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
    addresses: Mapping[str, int] | None = None,
) -> bytes:
    """The packed AttentionParams of these tensors.

    `addresses` gives the tensors other addresses than their own (the emulator's), by the names q, k, v, o, lse.
    Raises UnsupportedProblemError for a tensor that no kernel takes.
    """
    tensors = {"q": q, "k": k, "v": v, "o": o}
    for name, tensor in tensors.items():
        _check_layout(name, tensor)
    check_shapes(q, k, v, o, lse)
    if addresses is None:
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        addresses |= {"lse": 0 if lse is None else lse.data_ptr()}
    for name in tensors:
        if (address := addresses[name]) % ALIGNMENT:
            raise UnsupportedProblemError(
                f"{name} starts at address {address:#x}; kernels need a multiple of {ALIGNMENT} bytes"
            )
    batch, seqlen_q, num_heads, _ = q.shape
    params = AttentionParams(
        **{name: addresses.get(name) or None for name in ("q", "k", "v", "o", "lse")},
        **{f"{name}_stride": _stride(tensor) for name, tensor in tensors.items()},
        batch=batch,
        num_heads=num_heads,
        num_heads_k=k.shape[2],
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        softmax_scale=softmax_scale,
    )
    return bytes(params)


def grid(launch: LaunchInfo, params: bytes) -> tuple[int, int, int]:
    """The grid (blocks of queries, heads, batch) of a kernel for packed `params`.

    Raises BuildError where the kernel was compiled against another AttentionParams, UnsupportedProblemError where
    the grid is larger than CUDA allows.
    """
    if not launch.params_bytes == len(params) == ctypes.sizeof(AttentionParams):
        raise BuildError(
            f"the kernel takes {launch.params_bytes} bytes of AttentionParams, the host packs {len(params)}: "
            "make common/run/launch.py and common/cuda/params.cuh agree, then build again"
        )
    fields = AttentionParams.from_buffer_copy(params)
    for name in ("num_heads", "batch"):
        if getattr(fields, name) > MAX_GRID_YZ:
            raise UnsupportedProblemError(f"{name}={getattr(fields, name)}: a launch takes at most {MAX_GRID_YZ}")
    return -(-fields.seqlen_q // launch.block_m), fields.num_heads, fields.batch


def _stride(tensor: torch.Tensor) -> TensorStride:
    batch, row, head, _ = tensor.stride()
    return TensorStride(batch=batch, row=row, head=head)


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


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Raises UnsupportedProblemError unless the tensors fit each other: shapes, dtypes and devices."""
    tensors = {"q": q, "k": k, "v": v, "o": o}
    if len({(tensor.dtype, tensor.device) for tensor in tensors.values()}) > 1:
        given = ", ".join(f"{name} {tensor.dtype} on {tensor.device}" for name, tensor in tensors.items())
        raise UnsupportedProblemError(f"{given}; kernels take one dtype on one device")
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_k = k.shape[1:3]
    expected = {
        "k": (batch, seqlen_k, num_heads_k, head_dim),
        "v": (batch, seqlen_k, num_heads_k, head_dim),
        "o": (batch, seqlen_q, num_heads, head_dim),
    }
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise UnsupportedProblemError(
                f"{name} has shape {tuple(tensors[name].shape)}; with this q and k it is {shape}"
            )
    if num_heads % num_heads_k:
        raise UnsupportedProblemError(f"{num_heads} query heads do not share {num_heads_k} key heads evenly")
    if lse is None:
        return
    wanted = (batch, num_heads, seqlen_q)
    if tuple(lse.shape) != wanted or str(lse.dtype) != "torch.float32" or not lse.is_contiguous():
        raise UnsupportedProblemError(
            f"lse is {tuple(lse.shape)} {lse.dtype} with strides {lse.stride()}; kernels write a contiguous {wanted} "
            "torch.float32"
        )
    if lse.device != q.device:
        raise UnsupportedProblemError(f"lse is on {lse.device}, q on {q.device}; kernels take one device")
