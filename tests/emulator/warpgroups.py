"""Runs a few lines of PTX on warpgroups whose shared memory holds an image; and wgmma as PTX's tables state it."""

import numpy as np
from lanes import run_lanes

WINDOW = 1024  # where shared memory starts; its variables are aligned from there on

# Elements of 8 and 16 bits: their bytes, and those of 16 bytes.
SIZES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}


def run_warpgroup(code, image, inputs=None, outputs=None, *, registers="", num_threads=128, grid=1, **options):
    """Executes `code` on every thread after shared memory has been filled with the bytes of `image` from `tile` on.

    Args:
        image: bytes, a multiple of 8 a thread.
        code, inputs, outputs, registers, options: as for run_lanes.
    """
    image = np.frombuffer(bytes(image), np.uint64).reshape(-1, num_threads)
    words = {f"image{j}": np.tile(row, grid) for j, row in enumerate(image)}
    fill = "mov.u32 at_image, %tid.x; mov.u32 tile_at, tile; mad.lo.u32 at_image, at_image, 8, tile_at;" + "".join(
        f"st.shared.b64 [at_image+{8 * num_threads * j}], image{j};" for j in range(len(image))
    )
    return run_lanes(
        fill + "fence.proxy.async.shared::cta; bar.sync 0;" + code,
        {**words, **(inputs or {})},
        outputs,
        registers=".reg .b32 at_image, tile_at;" + registers,
        declarations=f".shared .align 1024 .b8 tile[{image.size * 8}];",
        num_threads=num_threads,
        grid=grid,
        **options,
    )


def to_number(bits, type):
    """The value of an element, f8."""
    if type == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if type == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    exponent_bits = {"e4m3": 4, "e5m2": 5}[type]
    fraction_bits = 7 - exponent_bits
    exponent = (bits.astype(int) >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = (bits.astype(int) & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    return np.where(bits.astype(int) >> 7, -value, value)


def small_integers(random, shape, type):
    """Bits of integers from -2 to 2."""
    values = random.integers(-2, 3, shape)
    if type == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if type == "f16":
        return values.astype(np.float16).view(np.uint16)
    table = np.array([to_number(np.array(bits), type) for bits in range(256)])
    codes = np.array([int(np.flatnonzero(table == value)[0]) for value in range(-2, 3)])
    return codes[values + 2].astype(np.uint8)


def crd(shape, index):
    """The coordinates of an index in a CuTe shape, the first mode fastest."""
    found = []
    for extent in shape:
        found.append(index % extent)
        index //= extent
    return found


def canonical_offset(row, depth, *, size, swizzle, transposed, leading, stride):
    """The byte offset of an element in the canonical layouts of PTX ISA 9.7.15.5.1.2.1.3, before the swizzle: element
    `row` along m or n, `depth` along k; T elements are 16 bytes."""
    t, big = 16 // size, 1 << 20
    wide = max(swizzle, 16) // 16
    if transposed and swizzle:  # ((T, w, m), (8, k)) : ((1, T, LBO), (wT, SBO))
        shapes, strides = ((t, wide, big), (8, big)), ((size, 16, leading), (16 * wide, stride))
    elif transposed:  # ((T, 1, m), (8, k)) : ((1, T, SBO), (1T, LBO))
        shapes, strides = ((t, 1, big), (8, big)), ((size, 16, stride), (16, leading))
    elif swizzle:  # ((8, m), (T, 2k)) : ((wT, SBO), (1, T))
        shapes, strides = ((8, big), (t, big)), ((16 * wide, stride), (size, 16))
    else:  # ((8, m), (T, 2k)) : ((1T, SBO), (1, LBO))
        shapes, strides = ((8, big), (t, big)), ((16, stride), (size, leading))
    return sum(
        c * step
        for index, shape, steps in zip((row, depth), shapes, strides, strict=True)
        for c, step in zip(crd(shape, index), steps, strict=True)
    )


def swizzle_address(address, swizzle):
    """Swizzle<B, 4, 3> of CuTe on a byte address."""
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    return address ^ (((address >> 7) & ((1 << bits) - 1)) << 4)


def descriptor(start, *, swizzle, leading, stride, phase=0):
    """PTX ISA, "Matrix Descriptor Format"."""
    encode = lambda x: (x & 0x3FFFF) >> 4  # noqa: E731
    code = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return encode(start) | encode(leading) << 16 | encode(stride) << 32 | phase << 49 | code << 62


def accumulator_place(warp, lane, number):
    """Row and column of value `number` of D in a lane (PTX ISA, 9.7.15.5.1.1.1, figure of D)."""
    row = 16 * warp + lane // 4 + 8 * (number // 2 % 2)
    return row, 8 * (number // 4) + 2 * (lane % 4) + number % 2


def fragment_place(warp, lane, number, size):
    """Row and column of element `number` of A in a lane, of 16 bits (figure of A for k16) or 8 (for k32)."""
    each = 4 // size  # elements of a register
    register, within = divmod(number, each)
    row = 16 * warp + lane // 4 + 8 * (register % 2)
    return row, each * (lane % 4) + within + 4 * each * (register // 2)
