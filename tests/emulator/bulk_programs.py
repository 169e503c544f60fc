"""Programs of bulk copies and TMA, and a plain statement of what tiles are (PTX ISA, 5.5)."""

import numpy as np
from hypothesis import strategies as st
from lanes import Emulated

from flashladder.common.emulator import tensor_map

NUMPY = {"uint8": "u1", "bf16": "u2", "fp16": "f2", "fp32": "f4", "int32": "i4", "uint64": "u8"}
SHARED_BYTES = 1 << 16
BARRIER = 0  # where the mbarrier lies in shared memory, and the tile
TILE = 1024


class Run:
    """A kernel of a few PTX statements on tensors in global memory, whose maps lie in the kernel's parameters."""

    def __init__(self, grid=1, num_threads=32, cluster=1, machine=None):
        self.grid, self.num_threads = grid, num_threads
        self.directive = f".explicitcluster .reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""
        self.memory = machine or Emulated()

    def __call__(self, code, maps=(), pointers=(), **options):
        text = f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 shared[];
.visible .entry kernel(.param .align 64 .b8 maps[{128 * max(len(maps), 1)}], .param .align 8 .b8 pointers[64])
{self.directive}
{{
    .reg .pred p, q, done; .reg .b32 tid, cta, bar, tile, at, n, v<4>; .reg .b64 map, wide, p<4>; .reg .s32 c<5>;
    mov.u32 tid, %tid.x; mov.u32 cta, %ctaid.x; mov.u32 bar, shared; add.u32 tile, bar, {TILE};
    mov.b64 map, maps; cvta.param.u64 map, map; setp.eq.u32 p, tid, 0;
    {"".join(f"ld.param.u64 p{n}, [pointers+{8 * n}];" for n in range(len(pointers)))}
    @p mbarrier.init.shared::cta.b64 [bar], 1; @p fence.mbarrier_init.release.cluster; bar.sync 0;
    {code}
    ret;
}}"""
        packed = np.array([*pointers, *[0] * (8 - len(pointers))], np.uint64).tobytes()
        params = b"".join(maps).ljust(128, b"\0") + packed
        return self.memory.run(text, params, self.grid, self.num_threads, SHARED_BYTES, **options)


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


# Fills the tile with 0, 1, 2, ..., a word each; and puts it into global memory at p0.
IOTA = """
    { .reg .b32 to, left, value; .reg .pred more; mad.lo.u32 to, tid, 4, tile; mov.u32 left, %0; mov.u32 value, tid;
    loop: st.shared.b32 [to], value; add.u32 to, to, 128; add.u32 value, value, 32; sub.u32 left, left, 128;
    setp.gt.s32 more, left, 0; @more bra loop; }
    fence.proxy.async.shared::cta; bar.sync 0;
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
def tiles(draw, dtypes=tuple(NUMPY), max_elements=600, stored=False):
    """dtype, dims, box, swizzle, pads, and where a box begins: inside, across an edge, or outside, its rows at a
    multiple of 16 bytes. Of tiles that are `stored` the tensor's rows end at one too, and none begins before it."""
    dtype = draw(st.sampled_from(dtypes))
    size = np.dtype(NUMPY[dtype]).itemsize
    rank = draw(st.integers(1, 5))
    swizzle = draw(st.sampled_from([0, 32, 64, 128])) if rank > 1 else 0  # the driver makes no other of one dimension
    row = 16 * draw(st.integers(1, (swizzle or 64) // 16))
    box = [row // size]
    for _ in range(rank - 1):
        box.append(draw(st.integers(1, max(1, min(9, max_elements // int(np.prod(box)))))))
    dims = [draw(st.integers(max(1, b - 3), b + 9)) for b in box]
    pads = [draw(st.integers(0, 2)) for _ in dims[1:]]
    chunk = 16 // size  # elements
    if stored:
        dims[0] = -(-dims[0] // chunk) * chunk
    first = [draw(st.integers(0 if stored else -b - 1, d + 1)) for b, d in zip(box, dims, strict=True)]
    first[0] = first[0] // chunk * chunk
    return dtype, tuple(dims), tuple(box), swizzle, pads, tuple(first)
