"""Bulk copies and TMA: tiles of tensors against a plain statement of PTX's rules, groups, and wrong copies."""

import numpy as np
import pytest
from bulk_programs import (
    COMMIT,
    DRAINED,
    DUMP,
    IOTA,
    NUMPY,
    READ,
    SHARED_BYTES,
    Run,
    Tensor,
    coordinates,
    expect,
    load,
    store,
    tiles,
    wait,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common.emulator import TMA, tensor_map
from flashladder.common.emulator.errors import DeadlockError, EmulatorError, MemoryAccessError, RaceError


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
    report = run(code, [tensor.map], [out], lazy_copies=lazy, race=False)
    check_traffic(report, tensor, first)
    found, source = run.memory.read("out"), tensor.view(tensor.raw)
    for offset, place in zip(tensor.offsets(), tensor.indices(first), strict=True):
        expected = source[place] if place else np.zeros((), tensor.dtype)
        assert found[offset : offset + tensor.dtype.itemsize].tobytes() == expected.tobytes()


def check_traffic(report, tensor, first):
    """Shared memory holds the whole box, global memory what lies inside of the tensor, in sectors of 32 bytes."""
    (shared,), (moved,) = (
        [line for line in lines if line.mover == TMA] for lines in (report.shared, report.global_memory)
    )
    size, box_bytes = tensor.dtype.itemsize, tensor.box_bytes()
    inside = [place for place in tensor.indices(first) if place]
    assert (shared.requests, shared.units, shared.bytes) == (1, -(-box_bytes // 128), box_bytes)
    assert (moved.requests, moved.bytes) == (1, size * len(inside))
    assert moved.ideal <= moved.units <= len(inside)
    assert report.wavefronts_of(TMA) == shared.units


@settings(max_examples=60, deadline=None)
@given(drawn=tiles(stored=True), lazy=st.booleans())
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
    check_traffic(run(code, [tensor.map], lazy_copies=lazy), tensor, first)
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


def test_subnormals_are_kept_by_a_tile_and_flushed_by_plain_bytes():
    """As an H200 does for a map of fp32, and PTX says of cp.reduce.async.bulk.add.f32."""
    run = Run()
    tensor = Tensor(run, "tensor", "fp32", (32, 4), (32, 4), 0, readonly=False, values=lambda shape: np.zeros(shape))
    p0 = run.memory.add("plain", np.zeros(128, np.float32))
    plain = "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [p0], [tile], 512;"
    code = IOTA.replace("%0", "512") + coordinates((0, 0)) + store(2, "add") + plain + COMMIT + DRAINED
    run(code, [tensor.map], [p0])
    assert (tensor.read().reshape(-1).view(np.uint32) == np.arange(128)).all()
    assert (run.memory.read("plain") == 0).all()


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


@pytest.mark.parametrize("dims", [(64, 30), (60, 32), (61, 29)])
def test_ctas_load_tiles_across_the_edge(dims):
    """Of the last of four CTAs some rows lie outside, and of all of them some columns."""
    run = Run(grid=4)
    tensor = Tensor(run, "tensor", "bf16", dims, (64, 8), 0, seed=3)
    out = run.memory.add("out", np.zeros(4096, np.uint8))
    code = f"""mov.b32 c0, 0; mul.lo.u32 n, cta, 8; mov.b32 c1, n; mul.wide.u32 wide, cta, 1024; add.u64 p0, p0, wide;
        {expect(1024)} {load(2)} {wait()} {DUMP.replace("%0", "1024")}"""
    run(code, [tensor.map], [out])
    expected = np.zeros((32, 64), np.uint16)
    expected[: dims[1], : dims[0]] = tensor.view(tensor.raw)
    assert (run.memory.read("out").view(np.uint16).reshape(32, 64) == expected).all()


CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


@pytest.mark.parametrize("lazy", [True, False])
def test_multicast_to_the_ctas_of_a_cluster(lazy):
    """Each of two CTAs brings half of a tile to both; the mbarrier of each counts the bytes of both halves."""
    run = Run(grid=4, cluster=2)
    tensor = Tensor(run, "tensor", "bf16", (64, 16), (64, 4), 0, values=lambda shape: np.arange(np.prod(shape)))
    out = run.memory.add("out", np.zeros(4096, np.uint8))
    multicast = load(2, at="at").replace("bytes [", "bytes.multicast::cluster [").replace("[bar];", "[bar], both;")
    code = f""".reg .b16 both; .reg .b32 rank; mov.b16 both, 3; mov.u32 rank, %cluster_ctarank; {CLUSTER_SYNC}
        mov.b32 c0, 0; mul.lo.u32 n, cta, 4; mov.b32 c1, n; mad.lo.u32 at, rank, 512, tile;
        mul.wide.u32 wide, cta, 1024; add.u64 p0, p0, wide;
        {expect(1024)} {multicast} {wait()} {DUMP.replace("%0", "1024")} {CLUSTER_SYNC}"""
    run(code, [tensor.map], [out], lazy_copies=lazy)
    found = run.memory.read("out").view(np.uint16).reshape(4, 512)
    for cta in range(4):
        assert (found[cta] == np.arange(512) + 512 * (cta // 2)).all()


def test_a_copy_to_another_cta_of_the_cluster():
    """CTA 0 brings a tile to CTA 1, which waits for it at its own mbarrier."""
    run = Run(grid=2, cluster=2)
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0, values=lambda shape: np.arange(np.prod(shape)))
    out = run.memory.add("out", np.zeros(1024, np.uint8))
    code = f""".reg .b32 rank, there, far; mov.u32 rank, %cluster_ctarank; {CLUSTER_SYNC} {coordinates((0, 0))}
        setp.eq.u32 q, rank, 1; and.pred p, p, q; @q bra receive;
        mapa.shared::cluster.u32 there, tile, 1; mapa.shared::cluster.u32 far, bar, 1; setp.eq.u32 p, tid, 0;
        {load(2, at="there").replace("[bar]", "[far]")} bra over;
        receive: {expect(1024)} {wait()} {DUMP.replace("%0", "1024")}
        over: {CLUSTER_SYNC}"""
    run(code, [tensor.map], [out])
    assert (run.memory.read("out").view(np.uint16) == np.arange(512)).all()


def test_a_copy_in_a_cluster_waits_for_an_earlier_grid():
    """One thread of the cluster has to wait for what may still write the tensor, before a barrier of all."""
    run = Run(grid=2, cluster=2)
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0)
    code = CLUSTER_SYNC + coordinates((0, 0)) + expect(1024) + load(2) + wait() + CLUSTER_SYNC
    one_waits = "setp.eq.u32 q, cta, 1; @q griddepcontrol.wait;"
    run(one_waits + code, [tensor.map], prior={"tensor": "before"})
    with pytest.raises(RaceError, match="before, before which kernel may begin, may still write it"):
        run(code, [tensor.map], prior={"tensor": "before"})


@pytest.mark.parametrize(("ctas", "bar"), [(0, "bar"), (4, "bar")])
def test_wrong_multicasts(ctas, bar):
    run = Run(grid=2, cluster=2)
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0)
    multicast = load(2).replace("bytes [", "bytes.multicast::cluster [").replace("[bar];", "[bar], mask;")
    code = f".reg .b16 mask; mov.b16 mask, {ctas}; {CLUSTER_SYNC} {coordinates((0, 0))} {expect(1024)} {multicast}"
    with pytest.raises(MemoryAccessError, match=rf"to the CTAs {ctas:#x} of a cluster of 2"):
        run(code, [tensor.map])


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
        ("cvt.u64.u32 map, tile; cvta.shared.u64 map, map;" + load(2), MemoryAccessError,
         "a tensor map in shared memory.*lane 0.*cp.async.bulk"),
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


def test_a_tile_that_begins_within_16_bytes():
    """PTX ISA, 5.5.3.1: the address of a box is a multiple of 16; an H200 faults at others."""
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0)
    with pytest.raises(MemoryAccessError, match=r"do not begin at a multiple of 16 bytes\n.*warp 0, lane 0"):
        run(coordinates((-1, 0)) + expect(1024) + load(2) + wait(), [tensor.map])


@pytest.mark.parametrize("first", [(-8, 0), (0, -1)])
@pytest.mark.parametrize("function", ["", "add"])
def test_a_stored_tile_that_begins_before_its_tensor(first, function):
    """Illegal to an H200; a load may begin there."""
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (64, 8), (64, 8), 0, readonly=False)
    with pytest.raises(MemoryAccessError, match=r"begins before its tensor: an H200 has no such one\n.*warp 0, lane 0"):
        run(coordinates(first) + store(2, function) + COMMIT + DRAINED, [tensor.map])
    run(coordinates(first) + expect(1024) + load(2) + wait(), [tensor.map])


def test_a_stored_tile_that_is_cut_within_16_bytes():
    run = Run()
    tensor = Tensor(run, "tensor", "bf16", (60, 8), (64, 8), 0, readonly=False)
    with pytest.raises(MemoryAccessError, match=r"edge cuts within 16 bytes\n.*warp 0, lane 0"):
        run(IOTA.replace("%0", "1024") + coordinates((0, 0)) + store(2) + COMMIT + DRAINED, [tensor.map])


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
