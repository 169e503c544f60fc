"""Bulk copies and TMA: tiles of tensors against a plain statement of PTX's rules, groups, and wrong copies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import emulator
from flashladder.common.emulator.errors import DeadlockError, EmulatorError, MemoryAccessError
from flashladder.common.run import tensor_map

NUMPY = {"uint8": "u1", "bf16": "u2", "fp16": "f2", "fp32": "f4", "int32": "i4", "uint64": "u8"}
SHARED_BYTES = 1 << 16
BARRIER = 0  # where the mbarrier lies in shared memory, and the tile
TILE = 1024


class Run:
    """One kernel of a few PTX statements on tensors in global memory; `tensor` has a map in the kernel's parameters."""

    def __init__(self, grid=1, num_threads=32):
        self.grid, self.num_threads = grid, num_threads
        self.memory = emulator.GlobalMemory()

    def __call__(self, code, maps=(), pointers=(), **options):
        text = f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 shared[];
.visible .entry kernel(.param .align 64 .b8 maps[{128 * max(len(maps), 1)}], .param .align 8 .b8 pointers[64])
{{
    .reg .pred p, q, done; .reg .b32 tid, cta, bar, tile, at, n, v<4>; .reg .b64 map, wide, p<4>; .reg .s32 c<5>;
    mov.u32 tid, %tid.x; mov.u32 cta, %ctaid.x; mov.u32 bar, shared; add.u32 tile, bar, {TILE};
    mov.b64 map, maps; cvta.param.u64 map, map; setp.eq.u32 p, tid, 0;
    {"".join(f"ld.param.u64 p{n}, [pointers+{8 * n}];" for n in range(len(pointers)))}
    @p mbarrier.init.shared::cta.b64 [bar], 1; @p fence.mbarrier_init.release.cluster; bar.sync 0;
    {code}
    ret;
}}"""
        params = (
            b"".join(maps).ljust(128, b"\0") + np.array([*pointers, *[0] * (8 - len(pointers))], np.uint64).tobytes()
        )
        options = {"entry": "kernel", **options}
        return emulator.run(text, params, (self.grid, 1, 1), self.num_threads, SHARED_BYTES, self.memory, **options)


def wait(parity=0):
    return f"{{ again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], {parity}; @!done bra again; }}"


def expect(num_bytes):
    return f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {num_bytes};"


def load(rank, at="tile", coordinates=None, hint=""):
    names = ", ".join(coordinates or [f"c{n}" for n in range(rank)])
    return (
        f"@p cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{hint} "
        f"[{at}], [map, {{{names}}}], [bar]{', wide' if hint else ''};"
    )


def store(rank, reduction="", at="tile", coordinates=None):
    names = ", ".join(coordinates or [f"c{n}" for n in range(rank)])
    kind = f"reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduction}" if reduction else (
        f"async.bulk.tensor.{rank}d.global.shared::cta"
    )  # fmt: skip
    return f"@p cp.{kind}.tile.bulk_group [map, {{{names}}}], [{at}];"


COMMIT, DRAINED, READ = (f"@p cp.async.bulk.{end};" for end in ("commit_group", "wait_group 0", "wait_group.read 0"))
DUMP = """
    { .reg .b32 from, left; .reg .b64 to; .reg .pred more;
    mad.lo.u32 from, tid, 16, tile; mul.wide.u32 to, tid, 16; add.u64 to, to, p0; mov.u32 left, %0;
    loop: ld.shared.v4.b32 {v0, v1, v2, v3}, [from]; st.global.v4.b32 [to], {v0, v1, v2, v3};
    add.u32 from, from, 512; add.u64 to, to, 512; sub.u32 left, left, 512; setp.gt.s32 more, left, 0; @more bra loop; }
"""


def coordinates(values):
    return "".join(f"mov.b32 c{n}, {value};" for n, value in enumerate(values))


class Tensor:
    """A tensor of any strides, with a map: `array` has dimension 0 last, as numpy does."""

    def __init__(self, run, name, dtype, dims, box, swizzle, *, pads=None, readonly=True, seed=0, values=None):
        self.dtype, self.box, self.swizzle = np.dtype(NUMPY[dtype]), box, swizzle
        strides, size = [], self.dtype.itemsize
        extent = dims[0] * size
        for dim, pad in zip(dims[1:], pads or [0] * (len(dims) - 1), strict=True):
            stride = -(-extent // 16) * 16 + 16 * pad
            strides.append(stride)
            extent = stride * dim
        raw = np.random.default_rng(seed).integers(0, 256, -(-extent // 16) * 16 + 16, np.uint8)
        if values is not None:
            raw.view(self.dtype)[:] = values(raw.view(self.dtype).shape)
        self.name, self.run = name, run
        self.address = run.memory.add(name, raw, readonly=readonly)
        self.map = tensor_map.encode(self.address, dtype, dims, strides, box, swizzle)
        self.dims, self.strides, self.raw = dims, (size, *strides), raw

    def view(self, raw):
        return np.lib.stride_tricks.as_strided(raw.view(self.dtype), self.dims[::-1], self.strides[::-1])

    def read(self):
        """The tensor as it is now."""
        return self.view(self.run.memory.read(self.name))

    def box_bytes(self):
        return int(np.prod(self.box)) * self.dtype.itemsize

    def indices(self, first):
        """Every element of the box that begins at `first`, dimension 0 fastest: its place in the tensor, or None."""
        for index in np.ndindex(*self.box[::-1]):
            place = tuple(f + i for f, i in zip(first[::-1], index, strict=True))
            yield place if all(0 <= p < d for p, d in zip(place, self.dims[::-1], strict=True)) else None

    def offsets(self):
        """Where each element of a box lies in shared memory from the tile's beginning, which is a multiple of 1024."""
        size, row = self.dtype.itemsize, self.box[0] * self.dtype.itemsize
        pitch = max(row, self.swizzle)
        for number in range(int(np.prod(self.box))):
            outer, inner = divmod(number, self.box[0])
            byte = outer * pitch + inner * size
            chunk, line = byte >> 4 & 7, byte >> 7
            mask = {0: 0, 32: 1, 64: 3, 128: 7}[
                self.swizzle
            ]  # PTX ISA 5.5.7: the tables of 16-byte chunks in lines of 128
            yield (line << 7) + ((chunk ^ (line & mask)) << 4) + byte % 16


@st.composite
def tiles(draw, dtypes=tuple(NUMPY), max_elements=600):
    """dtype, dims, box, swizzle, pads, and where a box begins: inside, across an edge, or outside."""
    dtype = draw(st.sampled_from(dtypes))
    size = np.dtype(NUMPY[dtype]).itemsize
    rank = draw(st.integers(1, 5))
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    row = 16 * draw(st.integers(1, (swizzle or 64) // 16))
    box = [row // size]
    for _ in range(rank - 1):
        box.append(draw(st.integers(1, max(1, min(9, max_elements // int(np.prod(box)))))))
    dims = [draw(st.integers(max(1, b - 3), b + 9)) for b in box]
    pads = [draw(st.integers(0, 2)) for _ in dims[1:]]
    first = [draw(st.integers(-b - 1, d + 1)) for b, d in zip(box, dims, strict=True)]
    return dtype, tuple(dims), tuple(box), swizzle, pads, tuple(first)


@settings(max_examples=80, deadline=None)
@given(drawn=tiles(), lazy=st.booleans())
def test_loaded_tiles(drawn, lazy):
    """Element for element; what lies outside of the tensor is zero, and all bytes of the box are counted."""
    dtype, dims, box, swizzle, pads, first = drawn
    run = Run()
    tensor = Tensor(run, "tensor", dtype, dims, box, swizzle, pads=pads)
    length = -(-(max(tensor.offsets()) + 16) // 512) * 512
    out = run.memory.add("out", np.zeros(length, np.uint8))
    dump = DUMP.replace("%0", str(length))
    code = coordinates(first) + expect(tensor.box_bytes()) + load(len(dims)) + wait() + dump
    run(code, [tensor.map], [out], lazy_copies=lazy, race=False)
    found, source = run.memory.read("out"), tensor.view(tensor.raw)
    for offset, place in zip(tensor.offsets(), tensor.indices(first), strict=True):
        expected = source[place] if place else np.zeros((), tensor.dtype)
        assert found[offset : offset + tensor.dtype.itemsize].tobytes() == expected.tobytes()


IOTA = """
    { .reg .b32 to, left, value; .reg .pred more; mad.lo.u32 to, tid, 4, tile; mov.u32 left, %0; mov.u32 value, tid;
    loop: st.shared.b32 [to], value; add.u32 to, to, 128; add.u32 value, value, 32; sub.u32 left, left, 128;
    setp.gt.s32 more, left, 0; @more bra loop; }
    fence.proxy.async.shared::cta; bar.sync 0;
"""


@settings(max_examples=60, deadline=None)
@given(drawn=tiles(), lazy=st.booleans())
def test_stored_tiles(drawn, lazy):
    """Only what lies inside the tensor is written."""
    dtype, dims, box, swizzle, pads, first = drawn
    run = Run()
    tensor = Tensor(run, "tensor", dtype, dims, box, swizzle, pads=pads, readonly=False)
    length = -(-(max(tensor.offsets()) + 16) // 128) * 128
    shared = np.arange(length // 4, dtype=np.uint32).view(np.uint8)
    expected = tensor.raw.copy()
    target = tensor.view(expected)
    for offset, place in zip(tensor.offsets(), tensor.indices(first), strict=True):
        if place:
            target[place] = shared[offset : offset + tensor.dtype.itemsize].view(tensor.dtype)[0]
    code = IOTA.replace("%0", str(length)) + coordinates(first) + store(len(dims)) + COMMIT + DRAINED
    run(code, [tensor.map], lazy_copies=lazy)
    assert (run.memory.read("tensor") == expected).all()


@pytest.mark.parametrize(
    ("dtype", "function", "combined"),
    [
        ("int32", "add", np.add), ("int32", "min", np.minimum), ("int32", "max", np.maximum),
        ("int32", "xor", np.bitwise_xor), ("fp16", "add", np.add), ("fp32", "add", np.add),
    ],
)  # fmt: skip
def test_reduced_tiles_of_several_ctas(dtype, function, combined):
    """Each of three CTAs adds the same box."""
    run, code = Run(grid=3), np.dtype(NUMPY[dtype])
    dims, box = (32, 6), (16, 4)
    tensor = Tensor(
        run, "tensor", dtype, dims, box, 0, readonly=False, values=lambda shape: np.arange(np.prod(shape)) % 50
    )
    length = tensor.box_bytes()
    value = np.full(1, 3, code)
    word = int(np.tile(value, 4 // code.itemsize).view(np.uint32)[0])
    fill = f"mov.u32 v0, {word};" + "".join(
        f"mad.lo.u32 at, tid, 4, tile; st.shared.b32 [at+{n}], v0;" for n in range(0, length, 128)
    )
    fill += "fence.proxy.async.shared::cta; bar.sync 0;"
    run(fill + coordinates((16, 3)) + store(2, function) + COMMIT + DRAINED, [tensor.map])
    expected = tensor.view(tensor.raw.copy())
    for _ in range(3):
        expected[3:6, 16:32] = combined(expected[3:6, 16:32], value[0])
    assert (tensor.read() == expected).all()


def test_plain_bytes_both_ways_and_added():
    """global -> shared -> global, and added to what is there."""
    run = Run(grid=2)
    source = np.arange(2 * 64, dtype=np.float32)
    p0, p1 = run.memory.add("in", source, readonly=True), run.memory.add("copied", np.zeros_like(source))
    p2 = run.memory.add("sum", np.ones(64, np.float32))
    own = "mul.wide.u32 wide, cta, 256; add.u64 p0, p0, wide; add.u64 p1, p1, wide;"
    code = f"""{own} {expect(256)}
        @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [p0], 256, [bar]; {wait()}
        @p cp.async.bulk.global.shared::cta.bulk_group [p1], [tile], 256;
        @p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [p2], [tile], 256; {COMMIT} {DRAINED}"""
    report = run(code, (), [p0, p1, p2])
    assert (run.memory.read("copied").view(np.float32) == source).all()
    assert (run.memory.read("sum").view(np.float32) == 1 + source[:64] + source[64:]).all()
    assert report.bytes_read["global"] >= 512


def test_hints_and_prefetches_change_nothing():
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 128)
    out = run.memory.add("out", np.zeros(1024, np.uint8))
    code = f"""createpolicy.fractional.L2::evict_first.b64 wide, 1.0; prefetch.tensormap [map]; {coordinates((0, 0))}
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile [map, {{c0, c1}}];
        {expect(1024)} {load(2, hint=".L2::cache_hint")} {wait()} {DUMP.replace("%0", "1024")}"""
    run(code, [tensor.map], [out])
    found = run.memory.read("out").view(np.uint16)
    assert sorted(found) == sorted(tensor.view(tensor.raw).reshape(-1))


def test_a_copy_lands_as_late_or_as_early_as_it_may():
    """Without a wait nothing is there yet; or everything is, where copies land at once."""
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0, values=lambda shape: np.arange(np.prod(shape)))
    out = run.memory.add("out", np.zeros(1024, np.uint8))
    code = coordinates((0, 0)) + expect(1024) + load(2) + "bar.sync 0;" + DUMP.replace("%0", "1024")
    run(code, [tensor.map], [out], race=False)
    assert (run.memory.read("out") == 0xFF).all()
    run(code, [tensor.map], [out], race=False, lazy_copies=False)
    assert (run.memory.read("out").view(np.uint16) == np.arange(512)).all()


@pytest.mark.parametrize(
    ("end", "stored"),
    [
        (COMMIT + READ, "iota"),  # the source has been read when the tile is cleared
        (COMMIT + DRAINED, "iota"),
        (COMMIT, "zero"),
        (DRAINED, "zero"),  # not committed: in no group that is waited for
    ],
)
def test_the_source_of_a_store_is_read_as_late_as_it_may(end, stored):
    run = Run()
    tensor = Tensor(run, "tensor", "int32", (32, 4), (32, 4), 0, readonly=False)
    clear = "".join(f"mad.lo.u32 at, tid, 4, tile; st.shared.b32 [at+{n}], 0;" for n in range(0, 512, 128))
    code = IOTA.replace("%0", "512") + coordinates((0, 0)) + store(2) + end + "bar.sync 0;" + clear
    run(code, [tensor.map], race=False)
    expected = np.arange(128) if stored == "iota" else np.zeros(128)
    assert (tensor.read().reshape(-1) == expected).all()


def test_a_bulk_wait_covers_the_groups_of_its_own_thread():
    """Lane 1 waits for what lane 0 has committed: it proves nothing."""
    run = Run()
    tensor = Tensor(run, "tensor", "int32", (32, 4), (32, 4), 0, readonly=False)
    clear = "".join(f"mad.lo.u32 at, tid, 4, tile; st.shared.b32 [at+{n}], 0;" for n in range(0, 512, 128))
    other = "setp.eq.u32 q, tid, 1; @q cp.async.bulk.wait_group 0;"
    code = IOTA.replace("%0", "512") + coordinates((0, 0)) + store(2) + COMMIT + other + "bar.sync 0;" + clear
    run(code, [tensor.map], race=False)
    assert (tensor.read() == 0).all()


def test_ctas_load_tiles_of_their_own():
    run = Run(grid=4)
    tensor = Tensor(run, "tensor", "bf16", (64, 32), (64, 8), 0, values=lambda shape: np.arange(np.prod(shape)))
    out = run.memory.add("out", np.zeros(4096, np.uint8))
    code = f"""mov.b32 c0, 0; mul.lo.u32 n, cta, 8; mov.b32 c1, n; mul.wide.u32 wide, cta, 1024; add.u64 p0, p0, wide;
        {expect(1024)} {load(2)} {wait()} {DUMP.replace("%0", "1024")}"""
    run(code, [tensor.map], [out])
    assert (run.memory.read("out").view(np.uint16) == np.arange(2048)).all()


def test_a_map_in_global_memory():
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0, values=lambda shape: np.arange(np.prod(shape)))
    out = run.memory.add("out", np.zeros(1024, np.uint8))
    at = run.memory.add("map", np.frombuffer(tensor.map, np.uint8))
    code = "mov.b64 map, p1;" + coordinates((0, 0)) + expect(1024) + load(2) + wait() + DUMP.replace("%0", "1024")
    run(code, [], [out, at])
    assert (run.memory.read("out").view(np.uint16) == np.arange(512)).all()


# -- what is wrong


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (expect(1024) + "add.u32 tile, tile, 64;" + load(2) + wait(), MemoryAccessError, "not at a multiple of 128"),
        (f"add.u32 tile, tile, {SHARED_BYTES - 1536};" + expect(1024) + load(2), MemoryAccessError, "out of bounds"),
        (expect(1024) + "add.u64 map, map, 16;" + load(2) + wait(), MemoryAccessError, "tensor map.*multiple of 64"),
        (expect(1024) + "add.u64 map, map, 128;" + load(2) + wait(), MemoryAccessError, "not a tensor map"),
        (expect(1024) + load(3) + wait(), MemoryAccessError, "3 coordinates in a tensor of 2"),
        (expect(1040) + load(2) + wait(), DeadlockError, "16 bytes to come"),
        (expect(1024) + wait(), DeadlockError, "1024 bytes to come"),
        ("add.u32 bar, bar, 8;" + load(2), EmulatorError, "no mbarrier is initialised"),
        ("@p cp.async.bulk.global.shared::cta.bulk_group [p0], [tile], 24;", MemoryAccessError, "of 24 bytes"),
        ("@p cp.async.bulk.global.shared::cta.bulk_group [p0], [tile], 2048;", MemoryAccessError, "bounds.*tensor out"),
    ],
)  # fmt: skip
def test_wrong_copies(code, error, message):
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0)
    out = run.memory.add("out", np.zeros(1024, np.uint8))
    with pytest.raises(error, match=f"(?s){message}"):
        run(coordinates((0, 0, 0)) + code, [tensor.map, bytes([255] * 128)], [out], race=False)


def test_a_map_of_more_than_the_tensor():
    """A map may promise more rows than there are: the first that is missing is named."""
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0)
    larger = tensor_map.encode(tensor.address, "bf16", (64, 100), (128,), (64, 8), 0)
    with pytest.raises(MemoryAccessError, match=r"tensor tensor, byte offset \d+ of \d+\n.*warp 0, lane 0"):
        run(coordinates((0, 60)) + expect(1024) + load(2) + wait(), [larger])


def test_a_guard_that_nobody_passes():
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0)
    run("setp.eq.u32 p, tid, 99;" + coordinates((0, 0)) + load(2) + store(2) + COMMIT + DRAINED, [tensor.map])
