"""Tensor maps (CUtensorMap) without a driver: the 128 bytes by which TMA knows a tensor in global memory.

Tiled mode, 1 to 5 dimensions, element strides of one, no interleaving, zero fill (PTX ISA, 5.5 "Tensors"; CUDA driver
API, cuTensorMapEncodeTiled). Dimension 0 is the contiguous one.

The object is opaque by contract. Where its fields lie shows in the code that ptxas makes of PTX's tensormap.replace,
which sets one field each; the L2 promotion, the bytes of a box and its alignment in shared memory, which no such
instruction sets, show in maps that a driver made. tests/emulator/test_tensor_map.py holds this file against both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashladder.common.errors import UnsupportedProblemError

NUM_BYTES = 128
ALIGNMENT = 64  # bytes, of a map itself, among the parameters of a kernel
TENSOR_ALIGNMENT = 16  # of the tensor's address and of its strides
MAX_RANK = 5
MAX_DIM, MAX_STRIDE, MAX_BOX = 1 << 32, 1 << 40, 256

# Element types: the code in the map (tensormap.replace's .elemtype, not the driver's enumeration), bytes.
DTYPES = {
    "uint8": (0, 1), "uint16": (1, 2), "uint32": (2, 4), "int32": (3, 4), "uint64": (4, 8), "int64": (5, 8),
    "fp16": (6, 2), "fp32": (7, 4), "fp64": (9, 8), "bf16": (10, 2),
}  # fmt: skip
SWIZZLES = (0, 32, 64, 128)  # bytes; the index is the code in the map
L2_PROMOTIONS = (0, 64, 128, 256)  # bytes, likewise


@dataclass(frozen=True)
class _BitField:
    """Bits `first`, `first` + 1, ... of the map, which hold a number less `bias`, shifted right by `shift`."""

    first: int
    width: int
    bias: int = 0
    shift: int = 0

    def put(self, value: int) -> int:
        """The value in its place among the map's 1024 bits."""
        return ((value - self.bias) >> self.shift & (1 << self.width) - 1) << self.first

    def get(self, bits: int) -> int:
        """The inverse of put."""
        return ((bits >> self.first & (1 << self.width) - 1) << self.shift) + self.bias


_ADDRESS = _BitField(0, 64)
_RANK = _BitField(68, 3, bias=1)
_DTYPE = _BitField(71, 4)
_SWIZZLE = _BitField(77, 2)
_L2_PROMOTION = _BitField(81, 2)
_STRIDES = tuple(
    (_BitField(96 + 32 * n, 32, shift=4), _BitField(224 + 4 * n, 4, shift=36)) for n in range(MAX_RANK - 1)
)
_DIMS = tuple(_BitField(256 + 32 * n, 32, bias=1) for n in range(MAX_RANK))
_BOX = tuple(_BitField(440 + 8 * n, 8, bias=1) for n in range(MAX_RANK))
_BOX_BYTES = _BitField(512, 32)
_SHARED_ALIGNMENT = _BitField(576, 32)  # after so many bytes the swizzle's pattern repeats
# Where a map holds what differs from tensor to tensor, for a writer of words of 32 bits: the address, in two; strides
# below 2^36 in units of 16 bytes, that of dimension 1 first; dimensions less one, from dimension 0 on.
ADDRESS_AT, STRIDES_AT, DIMS_AT = (field.first // 8 for field in (_ADDRESS, _STRIDES[0][0], _DIMS[0]))
# What must be zero in a map of this kind: interleaving, NaN fill, tf32, element strides.
_OTHERS = (_BitField(75, 2), _BitField(79, 2), _BitField(416, 3 * MAX_RANK))


@dataclass(frozen=True)
class TensorMap:
    """What a map says.

    `strides` are bytes from one index to the next along dimensions 1, 2, ...; `box` is the tile that one copy moves, in
    elements; `swizzle_bytes` is 0, 32, 64 or 128.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int

    @property
    def element_bytes(self) -> int:
        """The size of an element."""
        return DTYPES[self.dtype][1]


def encode(
    address: int,
    dtype: str,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    swizzle_bytes: int,
    l2_promotion_bytes: int = 128,
) -> bytes:
    """The 128 bytes that cuTensorMapEncodeTiled makes of these.

    Args:
        address: of the tensor in global memory.
        dtype: a key of DTYPES.
        dims: elements along each dimension, the contiguous one first.
        strides_bytes: of dimensions 1, 2, ...: one less than dims.
        box: elements of a tile along each dimension.
        swizzle_bytes: the span within which 16-byte chunks are swizzled; 0: not at all.
        l2_promotion_bytes: what a miss fetches into L2; 0: no more than asked.

    Raises:
        UnsupportedProblemError: TMA cannot take such a tensor, or such a tile of it.
    """
    asked = TensorMap(address, dtype, tuple(dims), tuple(strides_bytes), tuple(box), swizzle_bytes)
    _check(asked, l2_promotion_bytes)
    bits = _ADDRESS.put(address) | _RANK.put(len(asked.dims)) | _DTYPE.put(DTYPES[dtype][0])
    bits |= _SWIZZLE.put(SWIZZLES.index(swizzle_bytes))
    bits |= _L2_PROMOTION.put(L2_PROMOTIONS.index(l2_promotion_bytes))
    bits |= _BOX_BYTES.put(math.prod(asked.box) * asked.element_bytes)
    bits |= _SHARED_ALIGNMENT.put(8 * swizzle_bytes or 16)
    for stride, parts in zip(asked.strides, _STRIDES, strict=False):
        for part in parts:
            bits |= part.put(stride)
    for fields, values in ((_DIMS, asked.dims), (_BOX, asked.box)):
        for field, value in zip(fields, values, strict=False):
            bits |= field.put(value)
    return bits.to_bytes(NUM_BYTES, "little")


def at(made: bytes, address: int) -> bytes:
    """A map that differs from another in its tensor's address alone."""
    return made[:ADDRESS_AT] + address.to_bytes(8, "little") + made[ADDRESS_AT + 8 :]


def decode(data: bytes) -> TensorMap:
    """What a map says, whoever made it.

    Raises:
        UnsupportedProblemError: these are not the bytes of a tiled map as `encode` makes them.
    """
    bits = int.from_bytes(data, "little")
    rank, code = _RANK.get(bits), _DTYPE.get(bits)
    dtype = next((name for name, (own, _) in DTYPES.items() if own == code), None)
    if len(data) != NUM_BYTES or rank > MAX_RANK or dtype is None or any(field.get(bits) for field in _OTHERS):
        raise UnsupportedProblemError(
            f"not a tensor map of the tiled kind with element strides of 1 and zero fill: {data.hex(' ', 4)}"
        )
    found = TensorMap(
        address=_ADDRESS.get(bits),
        dtype=dtype,
        dims=tuple(field.get(bits) for field in _DIMS[:rank]),
        strides=tuple(sum(part.get(bits) for part in parts) for parts in _STRIDES[: rank - 1]),
        box=tuple(field.get(bits) for field in _BOX[:rank]),
        swizzle_bytes=SWIZZLES[_SWIZZLE.get(bits)],
    )
    _check(found)
    return found


def _check(asked: TensorMap, l2_promotion_bytes: int = 0) -> None:
    """Raises unless the driver would take it (cuTensorMapEncodeTiled, "requirements")."""
    if asked.dtype not in DTYPES:
        raise UnsupportedProblemError(f"a tensor map of {asked.dtype} elements; there are {', '.join(DTYPES)}")
    rank, size = len(asked.dims), asked.element_bytes
    inner = asked.box[0] * size if asked.box else 0
    wrong = {
        f"1 to {MAX_RANK} dimensions, not {rank}": not 1 <= rank <= MAX_RANK,
        f"{rank - 1} strides and a box of {rank}, not {len(asked.strides)} and {len(asked.box)}": (
            (len(asked.strides), len(asked.box)) != (rank - 1, rank)
        ),
        f"an address at a multiple of {TENSOR_ALIGNMENT} bytes, not {asked.address:#x}": (
            asked.address % TENSOR_ALIGNMENT
        ),
        f"dimensions of 1 to 2^32, not {asked.dims}": any(not 0 < dim <= MAX_DIM for dim in asked.dims),
        f"strides in multiples of {TENSOR_ALIGNMENT} bytes below 2^40, not {asked.strides}": any(
            stride % TENSOR_ALIGNMENT or not 0 <= stride < MAX_STRIDE for stride in asked.strides
        ),
        f"a box of 1 to {MAX_BOX} each way, not {asked.box}": any(not 0 < n <= MAX_BOX for n in asked.box),
        f"a swizzle of {SWIZZLES} bytes, not {asked.swizzle_bytes}": asked.swizzle_bytes not in SWIZZLES,
        f"an L2 promotion of {L2_PROMOTIONS} bytes, not {l2_promotion_bytes}": l2_promotion_bytes not in L2_PROMOTIONS,
        f"rows of a box in multiples of 16 bytes, not {inner}": inner % 16,
        f"rows of a box within the swizzle's {asked.swizzle_bytes} bytes, not {inner}": (
            asked.swizzle_bytes and inner > asked.swizzle_bytes
        ),
    }
    for wanted, is_wrong in wrong.items():
        if is_wrong:
            raise UnsupportedProblemError(f"a tensor map takes {wanted}")
