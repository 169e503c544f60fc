"""Clusters: where CTAs stand in them, each other's shared memory, their barrier, and races between them."""

import numpy as np
import pytest

from flashladder.common import emulator
from flashladder.common.emulator.errors import (
    DeadlockError,
    RaceError,
    SynchronisationError,
    UnsupportedInstructionError,
)

THREADS = 64


def run(code, cluster=(2, 1, 1), grid=(4, 1, 1), **options):
    """Executes code on every thread: `d` of every thread, (CTAs as the grid numbers them, threads)."""
    count = int(np.prod(grid))
    memory = emulator.GlobalMemory()
    out = memory.add("out", np.zeros(count * THREADS, np.uint32))
    text = f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out)
.explicitcluster
.reqnctapercluster {", ".join(map(str, cluster))}
{{
    .shared .align 16 .b8 buffer[{4 * THREADS}];
    .shared .align 8 .b64 bar;
    .reg .b32 tid, rank, cta, x, y, z, addr, there, d; .reg .b64 at, base; .reg .pred p, q;
    mov.u32 tid, %tid.x; mov.u32 rank, %cluster_ctarank; mov.u32 d, 0;
    mov.u32 cta, %ctaid.z; mov.u32 x, %nctaid.y; mov.u32 y, %ctaid.y; mad.lo.u32 cta, cta, x, y;
    mov.u32 x, %nctaid.x; mov.u32 y, %ctaid.x; mad.lo.u32 cta, cta, x, y;
    mov.u32 addr, buffer; mad.lo.u32 addr, tid, 4, addr;
    {code}
    ld.param.u64 base, [out]; mad.lo.u32 x, cta, {THREADS}, tid; cvt.u64.u32 at, x; mad.lo.u64 at, at, 4, base;
    st.global.b32 [at], d;
    ret;
}}
"""
    params = np.array([out], np.uint64).tobytes()
    emulator.run(text, params, grid, THREADS, 0, memory, entry="kernel", **options)
    return memory.read("out").view(np.uint32).reshape(count, THREADS)


BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
STORE = "mad.lo.u32 x, cta, 1000, tid; st.shared.b32 [addr], x;"
OTHER = "mov.u32 y, %cluster_nctarank; sub.u32 y, y, 1; sub.u32 y, y, rank; mapa.shared::cluster.u32 there, addr, y;"
LOAD = OTHER + "ld.shared::cluster.b32 d, [there];"


@pytest.mark.parametrize(("cluster", "grid"), [((2, 1, 1), (4, 1, 1)), ((4, 1, 1), (8, 1, 1)), ((2, 2, 1), (4, 4, 2))])
@pytest.mark.parametrize("chunk", [64, 5])
def test_ctas_read_each_others_memory(cluster, grid, chunk):
    """Each reads what the CTA of the opposite rank wrote."""
    found = run(STORE + BARRIER + LOAD + BARRIER, cluster, grid, chunk=chunk)
    cz, cy, cx = np.indices(grid[::-1]).reshape(3, -1)
    opposite = [each // n * n + n - 1 - each % n for each, n in zip((cx, cy, cz), cluster, strict=True)]
    of_cta = (opposite[2] * grid[1] + opposite[1]) * grid[0] + opposite[0]
    assert (found == 1000 * of_cta[:, None] + np.arange(THREADS)).all()


def test_where_a_cta_stands():
    code = """
        mov.u32 d, %cluster_ctaid.y; mad.lo.u32 d, d, 10, rank; mov.u32 x, %clusterid.x; mad.lo.u32 d, x, 100, d;
        mov.u32 x, %nclusterid.x; mad.lo.u32 d, x, 1000, d; mov.u32 x, %cluster_nctarank; mad.lo.u32 d, x, 10000, d;
    """
    found = run(code, (2, 2, 1), (6, 2, 1))
    x, y = np.arange(12) % 6, np.arange(12) // 6
    expected = 43000 + 100 * (x // 2) + 10 * y + 2 * y + x % 2
    assert (found[:, 0] == expected).all()


def test_generic_addresses_tell_the_rank_too():
    code = STORE + BARRIER + OTHER.replace("mapa.shared::cluster.u32 there, addr, y;", "") + """
        cvt.u64.u32 at, addr; cvta.shared.u64 at, at; mapa.u64 at, at, y; ld.b32 d, [at];
        getctarank.u64 x, at; mad.lo.u32 d, x, 100000, d;
    """ + BARRIER  # fmt: skip
    found = run(code)
    other = np.arange(4) ^ 1
    assert (found == 100000 * (other % 2)[:, None] + 1000 * other[:, None] + np.arange(THREADS)).all()


def test_a_race_between_ctas():
    both = r"warp 0 of CTA rank 1, lane 0 reads(.|\n)*warp 0 of CTA rank 0, lane 0 wrote it"
    with pytest.raises(RaceError, match=both):
        run("st.shared.b32 [addr], 0;" + BARRIER + STORE + LOAD + BARRIER)
    with pytest.raises(RaceError, match="no barrier orders the two"):
        run(STORE + BARRIER + LOAD + "st.shared.b32 [addr], 7;")


def test_only_lanes_that_wait_know_what_others_did():
    halves = "barrier.cluster.arrive; and.b32 x, tid, 1; setp.eq.u32 p, x, 0; @p barrier.cluster.wait;"
    others = "@!p barrier.cluster.wait;"
    run(STORE + halves + others + LOAD + BARRIER)
    with pytest.raises(RaceError, match="lane 1 reads"):
        run(STORE + halves + LOAD + others + BARRIER)


def test_a_relaxed_arrival_orders_what_a_fence_released():
    relaxed = BARRIER.replace("arrive", "arrive.relaxed")
    with pytest.raises(RaceError, match="no barrier orders the two"):
        run("st.shared.b32 [addr], 0;" + BARRIER + STORE + relaxed + LOAD + BARRIER)
    run(STORE + "fence.acq_rel.cluster;" + relaxed + LOAD + BARRIER)


MADE = (
    "setp.eq.u32 p, tid, 0; @p mbarrier.init.shared::cta.b64 [bar], 128; @p fence.mbarrier_init.release.cluster;"
    + BARRIER
)
ARRIVE = """
    mov.u32 x, bar; mov.u32 y, 0; mapa.shared::cluster.u32 there, x, y;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];
"""
WAIT = "LOOP: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [bar], 0; @!q bra LOOP;"


def test_all_arrive_at_the_first_ctas_mbarrier():
    """Rank 0 alone waits, and reads what rank 1 wrote."""
    code = MADE + STORE + ARRIVE + "setp.ne.u32 p, rank, 0; @p bra END;" + WAIT + LOAD + "END:" + BARRIER
    found = run(code)
    assert (found[::2] == 1000 * np.array([1, 3])[:, None] + np.arange(THREADS)).all()
    with pytest.raises(DeadlockError, match="64 of 128 arrivals pending"):
        run(code.replace("mbarrier.arrive.release", "setp.eq.u32 q, rank, 0; @q mbarrier.arrive.release"))


def test_an_arrival_of_the_scope_of_the_cta_releases_nothing_to_others():
    code = MADE + STORE + ARRIVE.replace("release.cluster", "release.cta") + "setp.ne.u32 p, rank, 0; @p bra END;"
    with pytest.raises(RaceError, match="but with the scope of its own CTA"):
        run("st.shared.b32 [addr], 0;" + code + WAIT + LOAD + "END:" + BARRIER)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("barrier.cluster.wait;", SynchronisationError, "barrier.cluster.wait without an arrival"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", SynchronisationError, "a second arrival"),
        ("setp.eq.u32 p, rank, 0; @p barrier.cluster.arrive; @p barrier.cluster.wait; @!p bar.sync 1, 96;",
         DeadlockError, "barrier.cluster .arrived, by rank: 64, 0 threads."),
        (MADE + ARRIVE + WAIT.replace("shared::cta.b64 q, [bar]", "b64 q, [at]").replace(
            "LOOP:", "cvt.u64.u32 at, there; add.u64 at, at, 0x10000000; LOOP:", 1),
         SynchronisationError, "a wait for an mbarrier of another CTA"),
        (OTHER + "st.shared.b32 [addr], 0;" + BARRIER + "atom.shared::cluster.add.u32 d, [there], 1;",
         UnsupportedInstructionError, "atomic operations on another CTA's shared memory"),
        (OTHER.replace("sub.u32 y, y, rank;", "mov.u32 y, 5;") + "ld.shared::cluster.b32 d, [there];",
         SynchronisationError, "an address of rank 5 in a cluster of 2 CTAs"),
    ],
)  # fmt: skip
def test_wrong_use(code, error, message):
    with pytest.raises(error, match=message):
        run(code)


def test_a_grid_consists_of_clusters():
    with pytest.raises(UnsupportedInstructionError, match=r"a grid of .3, 1, 1. CTAs in clusters of .2, 1, 1."):
        run("", grid=(3, 1, 1))
