"""Runs a few lines of PTX on warpgroups whose shared memory holds an image; and wgmma as PTX's tables state it."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
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
        declarations=".extern .shared .align 1024 .b8 tile[];",
        shared_bytes=image.size * 8,
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
        index = index // extent
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


THREADS, ROWS = 128, 64
THREAD = np.arange(THREADS)
FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)


class Operand:
    """A matrix (extent x depth) somewhere in an image of shared memory, and its descriptor."""

    def __init__(self, random, type, extent, swizzle, transposed, at, *, pad=0):
        self.type, size = type, SIZES[type]
        depth, wide = 32 // size, max(swizzle, 16) // 16
        block = 128 * wide + pad  # from one swizzled block of 8 rows to the next
        if swizzle:
            strides = {"stride": block, "leading": block * (depth // 8) if transposed else 16}
        elif transposed:
            strides = {"stride": block * (depth // 8), "leading": block}
        else:
            strides = {"stride": block * 2, "leading": block}
        self.values = small_integers(random, (extent, depth), type)
        phase = (at >> 7) % (8 * wide // 8) if swizzle else 0
        self.descriptor = descriptor(at, swizzle=swizzle, phase=phase, **strides)
        layout = {"size": size, "swizzle": swizzle, "transposed": transposed, **strides}
        rows, depths = np.ogrid[:extent, :depth]
        self.places = at + swizzle_address(canonical_offset(rows, depths, **layout), swizzle)
        self.end = int(self.places.max()) + size

    def put(self, image):
        for byte in range(SIZES[self.type]):
            image[self.places - WINDOW + byte] = self.values >> 8 * byte & 0xFF

    @property
    def numbers(self):
        return to_number(self.values, self.type)


def registers_of_d(n, result="f32", name="d"):
    return [f"{name}{i}" for i in range(n // (2 if result == "f32" else 4))]


def opcode(n, type_a="bf16", type_b=None, result="f32"):
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // SIZES[type_a]}.{result}.{type_a}.{type_b or type_a}"


def braced(names):
    return "{" + ", ".join(names) + "}"


def clear(names):
    return "".join(f"mov.b32 {name}, 0;" for name in names)


def matrix_of(outputs, n, result="f32"):
    """D (64, n) of its registers."""
    found = np.full((ROWS, n), np.nan)
    for number in range(n // 2):
        if result == "f32":
            values = outputs[f"d{number}"]
        else:
            values = outputs[f"d{number // 2}"].view(np.float16)[number % 2 :: 2]
        found[accumulator_place(THREAD // 32, THREAD % 32, number)] = values
    return found


def aligned(offset, to=1024):
    return -(-offset // to) * to


def image_of(*operands):
    image = np.full(aligned(max(each.end for each in operands) - WINDOW), 0xFF, np.uint8)
    for each in operands:
        each.put(image)
    return image


LAYOUTS = [(swizzle, transposed) for swizzle in (0, 32, 64, 128) for transposed in (False, True)]
TYPES = [("bf16", "bf16"), ("f16", "f16"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e4m3", "e4m3"), ("e5m2", "e5m2")]


@dataclass
class ProductProgram:
    """One wgmma, whose D registers are the outputs; and D as it should be, (64, n)."""

    code: str
    image: np.ndarray
    inputs: dict
    n: int
    depth: int
    result: str
    expected: np.ndarray

    def run(self, **options):
        """The outputs by name, and the report."""
        kinds = dict.fromkeys(registers_of_d(self.n, self.result), "f4" if self.result == "f32" else "u4")
        return run_warpgroup(self.code, self.image, self.inputs, kinds, **options)


@st.composite
def products(draw, max_n=256):
    """D = +-A B (+ D) for every swizzle, major and type; the swizzle's pattern begins `shift` bytes behind a multiple
    of 1024, which the base offset tells."""
    random = np.random.default_rng(draw(st.integers(0, 1000), label="seed"))
    types = draw(st.sampled_from(TYPES), label="types")
    (swizzle_a, trans_a), (swizzle_b, trans_b) = draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 2), label="layouts")
    n = draw(st.sampled_from([n for n in (8, 16, 24, 64, 136, 256) if n <= max_n]), label="n")
    scales = draw(st.tuples(*[st.sampled_from([1, -1])] * 2), label="scales")
    adds, pad = draw(st.booleans(), label="adds"), draw(st.sampled_from([0, 1024]), label="pad")
    shift = 128 * draw(st.integers(0, 7), label="shift")
    eight = SIZES[types[0]] == 1
    if eight:
        trans_a = trans_b = False
    if trans_b and swizzle_b and n % (swizzle_b // 2):
        swizzle_b = 0
    result = "f32" if types[0] == "bf16" else draw(st.sampled_from(["f32", "f16"]), label="result")
    a = Operand(random, types[0], ROWS, swizzle_a, trans_a, WINDOW + shift, pad=pad)
    b = Operand(random, types[1], n, swizzle_b, trans_b, aligned(a.end) + shift, pad=pad)
    old = random.integers(-3, 4, (ROWS, n)).astype(float)
    inputs = {"desc_a": np.full(THREADS, a.descriptor, np.uint64), "desc_b": np.full(THREADS, b.descriptor, np.uint64)}
    for number in range(n // 2):
        values = old[accumulator_place(THREAD // 32, THREAD % 32, number)]
        if result == "f32":
            inputs[f"c{number}"] = values.astype(np.float32)
        else:
            pair = inputs.setdefault(f"c{number // 2}", np.zeros(THREADS, np.uint32))
            pair |= values.astype(np.float16).view(np.uint16).astype(np.uint32) << (16 * (number % 2))
    names = registers_of_d(n, result)
    constants = ", ".join(map(str, (*scales, *(() if eight else (int(trans_a), int(trans_b))))))
    code = f"""
        {"".join(f"mov.b32 {d}, c{i};" for i, d in enumerate(names))} {FENCE}
        {opcode(n, *types, result)} {braced(names)}, desc_a, desc_b, {int(adds)}, {constants}; {COMMIT} {WAIT}"""
    expected = scales[0] * scales[1] * a.numbers @ b.numbers.T + (old if adds else 0)
    return ProductProgram(code, image_of(a, b), inputs, n, 32 // SIZES[types[0]], result, expected)


def product_of_registers(type, n=64, seed=3):
    """D = A B with A in registers and B in 128-byte swizzled rows, of 16-bit types transposed."""
    random, size = np.random.default_rng(seed), SIZES[type]
    b = Operand(random, type, n, 128, size == 2, WINDOW)
    a = small_integers(random, (ROWS, 32 // size), type)
    names, inputs = registers_of_d(n), {"desc_b": np.full(THREADS, b.descriptor, np.uint64)}
    for register in range(4):
        words = np.zeros(THREADS, np.uint32)
        for thread in range(THREADS):
            for within in range(4 // size):
                place = fragment_place(thread // 32, thread % 32, register * (4 // size) + within, size)
                words[thread] |= np.uint32(int(a[place]) << 8 * size * within)
        inputs[f"a{register}"] = words
    code = f"""{clear(names)} {FENCE} {opcode(n, type)} {braced(names)}, {{a0, a1, a2, a3}}, desc_b, 1,
               1, 1{", 1" if size == 2 else ""}; {COMMIT} {WAIT}"""
    return ProductProgram(code, image_of(b), inputs, n, 32 // size, "f32", to_number(a, type) @ b.numbers.T)
