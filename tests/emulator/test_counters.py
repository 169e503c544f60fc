"""Counters on access patterns whose conflicts and sectors can be counted by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import run_lanes

from flashladder.common.emulator.execute.counters import shared_wavefronts

LANES = list(range(32))
REGISTERS = ".reg .b32 tid, addr, x, y, z, w; .reg .b64 at, wide;"
BUFFER = ".shared .align 16 .b8 buffer[16384];"


@pytest.mark.parametrize(
    ("size", "address", "expected"),
    [
        (4, lambda lane: 4 * lane, (1, 1, 32)),  # a word each
        (4, lambda lane: 0, (1, 1, 1)),  # one word for all
        (4, lambda lane: 4 * (lane // 2), (1, 1, 16)),
        (4, lambda lane: 8 * lane, (2, 1, 32)),
        (4, lambda lane: 128 * lane, (32, 1, 32)),  # a column of 32 words
        (4, lambda lane: 132 * lane, (1, 1, 32)),  # the same, padded
        (1, lambda lane: lane, (1, 1, 8)),
        (2, lambda lane: 2 * lane, (1, 1, 16)),
        (2, lambda lane: 128 * lane, (32, 1, 32)),
        (8, lambda lane: 8 * lane, (2, 2, 64)),  # two half-warps
        (8, lambda lane: 16 * lane, (4, 2, 64)),
        (16, lambda lane: 16 * lane, (4, 4, 128)),  # four quarter-warps
        (16, lambda lane: 256 * lane, (32, 4, 128)),  # rows of 256 bytes: 8-fold
        (16, lambda lane: 256 * lane + 16 * (lane % 8), (4, 4, 128)),  # ... swizzled
        (16, lambda lane: 0, (4, 4, 16)),
    ],
)
def test_shared_wavefronts(size, address, expected):
    assert shared_wavefronts([address(lane) for lane in LANES], LANES, size) == expected


@given(st.lists(st.integers(0, 4095), min_size=32, max_size=32), st.sampled_from([4, 8, 16]))
def test_wavefronts_lie_between_the_ideal_and_one_a_word(units, size):
    actual, ideal, words = shared_wavefronts([unit * size for unit in units], LANES, size)
    assert ideal == size // 4
    assert words <= 32 * actual
    assert ideal <= actual <= len(set(units)) * size // 4
    shifted = shared_wavefronts([unit * size + 128 for unit in units], LANES, size)
    assert shifted == (actual, ideal, words)


def test_inactive_lanes_need_no_pass():
    assert shared_wavefronts([0, 16, 32], [0, 1, 2], 16) == (1, 1, 12)
    assert shared_wavefronts([0, 16, 32], [0, 8, 31], 16) == (3, 3, 12)


def run_counted(code, **options):
    start = "mov.u32 tid, %tid.x; ld.param.u64 at, [pointer_d]; mov.u32 d, 0; mov.u32 x, 0;"
    options = {"declarations": BUFFER, "num_threads": 64, "grid": 3} | options
    _, report = run_lanes(start + code, {}, {"d": "u4"}, registers=REGISTERS, **options)
    return report


def traffic(lines, opcode):
    (line,) = (line for line in lines if line.opcode == opcode)
    return line


@pytest.mark.parametrize(("row", "units"), [(16, 4), (256, 32), (272, 4), (128, 32), (64, 16)])
def test_ldmatrix_conflicts(row, units):
    """8 rows a pass: 256 bytes from row to row is 8-fold, 16 more is free; 3 CTAs of 2 warps."""
    zero = "mov.u32 addr, buffer; mad.lo.u32 addr, tid, 256, addr; " + "".join(
        f"st.shared.v4.b32 [addr+{offset}], {{x, x, x, x}};" for offset in range(0, 256, 16)
    )
    code = f"""
        {zero} bar.sync 0; and.b32 y, tid, 31; mov.u32 addr, buffer; mad.lo.u32 addr, y, {row}, addr;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{x, y, z, w}}, [addr];
    """
    line = traffic(run_counted(code).shared, "ldmatrix.sync.aligned.m8n8.x4.shared.b16")
    assert (line.requests, line.units, line.ideal, line.bytes) == (6, 6 * units, 6 * 4, 6 * 512)
    assert line.ratio == units / 4


def test_totals_of_shared_memory():
    report = run_counted(
        "mov.u32 addr, buffer; mad.lo.u32 addr, tid, 8, addr; st.shared.b32 [addr], x; ld.shared.b32 y, [addr];"
    )
    assert report.shared_wavefronts == 6 * (2 + 2)
    assert report.shared_wavefronts_ideal == 6 * (1 + 1)
    assert report.bytes_written["shared"] == report.bytes_read["shared"] == 6 * 128


@pytest.mark.parametrize(
    ("stride", "size", "sectors", "ideal"),
    [(4, 4, 4, 4), (8, 4, 8, 4), (32, 4, 32, 4), (0, 4, 1, 4), (16, 16, 16, 16), (64, 16, 32, 16), (256, 16, 32, 16)],
)
def test_global_sectors(stride, size, sectors, ideal):
    """A load by every warp of 2 CTAs, 32-byte sectors counted once a request."""
    table = ".global .align 16 .b8 table[8192];"
    words = {4: ("b32", "y"), 16: ("v4.b32", "{x, y, z, w}")}[size]
    code = f"""
        mov.u64 at, table; and.b32 y, tid, 31; mul.wide.u32 wide, y, {stride}; add.u64 at, at, wide;
        ld.global.nc.{words[0]} {words[1]}, [at];
    """
    report = run_counted(code, grid=2, declarations=table)
    line = traffic(report.global_memory, f"ld.global.nc.{words[0]}")
    assert (line.requests, line.units, line.ideal, line.bytes) == (4, 4 * sectors, 4 * ideal, 4 * 32 * size)
    assert report.global_requests == 4 + 4  # and the store of the result
    assert report.global_sectors == 4 * sectors + 4 * 4


def test_lanes_that_take_no_part_are_not_counted():
    code = """
        .reg .pred p; setp.lt.u32 p, tid, 40;
        mul.wide.u32 wide, tid, 4; add.u64 at, at, wide;
        @p st.global.b32 [at], x;
    """
    report = run_counted(code, grid=1)
    line = traffic(report.global_memory, "st.global.b32")
    assert (line.requests, line.units, line.bytes) == (2 + 2, 4 + 1 + 8, (40 + 64) * 4)


def test_atomics_are_counted_where_a_lane_takes_part():
    """One sector for a lane alone; the second warp has none, and asks for nothing."""
    code = """
        .reg .pred p; setp.eq.u32 p, tid, 3; mov.u64 at, table; @p atom.global.inc.u32 y, [at], 99;
    """
    report = run_counted(code, grid=5, declarations=".global .align 16 .b8 table[32];")
    line = traffic(report.global_memory, "atom.global.inc.u32")
    assert (line.requests, line.units, line.ideal, line.bytes) == (5, 5, 5, 5 * 4)


def test_executed_instructions():
    """A loop of (CTA + 1) rounds in 3 CTAs of 2 warps, of which one warp leaves at once."""
    code = """
        .reg .pred p; setp.ge.u32 p, tid, 32; @p bra end; mov.u32 y, %ctaid.x;
    loop:
        popc.b32 z, y; setp.eq.u32 p, y, 0; sub.u32 y, y, 1; @!p bra loop;
    end:
    """
    report = run_counted(code)
    assert report.instructions["popc.b32"] == 1 + 2 + 3
    assert report.instructions["ret"] == 6
    assert report.instructions["bra"] == 6 + 6
    assert report.num_ctas == 3
    assert report.elapsed > 0


def test_chunks_do_not_change_the_counts():
    code = "mov.u32 addr, buffer; mad.lo.u32 addr, tid, 12, addr; st.shared.b32 [addr], x;"
    reports = [run_counted(code, grid=7, chunk=chunk) for chunk in (1, 3, 64)]
    for report in reports[1:]:
        assert (report.instructions, report.shared, report.global_memory) == (
            reports[0].instructions, reports[0].shared, reports[0].global_memory,
        )  # fmt: skip


def test_progress():
    seen = []
    run_counted("", grid=5, chunk=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_clock_counts_instructions():
    outputs, _ = run_lanes("mov.u32 d, %clock; add.u32 d, d, 0; mov.u64 e, %clock64;", {}, {"d": "u4", "e": "u8"})
    assert (outputs["d"] > 0).all()
    assert (outputs["e"] >= outputs["d"].astype(np.uint64)).all()
