"""cp.async: sizes, zero fill, commit groups of each thread, and that a copy lands at its wait and not before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import run_lanes

from flashladder.common.emulator.errors import MemoryAccessError, RaceError

LANES, SLOTS = 32, 4
SOURCE = np.arange(1000, 1000 + 4 * LANES * SLOTS, dtype=np.uint32)
DECLARATIONS = f"""
    .shared .align 16 .b8 buffer[{16 * LANES * SLOTS}];
    .global .align 16 .b32 source[{len(SOURCE)}] = {{{", ".join(map(str, SOURCE))}}};
"""
REGISTERS = ".reg .b32 tid, to, n; .reg .b64 from, wide; .reg .pred p;"
# Lane l's 16 bytes of slot 0; slot s lies 512 s further on, in both memories.
START = """
    mov.u32 tid, %tid.x; mov.u32 to, buffer; mad.lo.u32 to, tid, 16, to;
    mov.u64 from, source; mul.wide.u32 wide, tid, 16; add.u64 from, from, wide;
"""
OUTPUTS = {f"d{i}": "u4" for i in range(4)}
READ = "bar.warp.sync -1; ld.shared.v4.b32 {d0, d1, d2, d3}, [to];"
EXPECTED = SOURCE[: 4 * LANES].reshape(LANES, 4)


def run_copies(code, inputs=None, **options):
    """The 16 bytes that each lane reads at the end as 4 words, (32, 4)."""
    outputs, report = run_lanes(
        START + code, inputs, OUTPUTS, registers=REGISTERS, declarations=DECLARATIONS, **options
    )  # fmt: skip
    return np.stack([outputs[f"d{i}"] for i in range(4)], axis=1), report


def copy(slot=0, size=16, extra="", kind="cg"):
    return f"cp.async.{kind}.shared.global [to+{512 * slot}], [from+{512 * slot}], {size}{extra};"


COMMIT, LAND = "cp.async.commit_group;", "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize("wait", [LAND, "cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_all;"])
def test_copy_lands(wait):
    found, report = run_copies(copy() + wait + READ)
    assert (found == EXPECTED).all()
    assert report.bytes_read["global"] == 512
    assert report.bytes_written["shared"] == 512


def test_hints_change_nothing():
    code = """
        createpolicy.fractional.L2::evict_first.b64 wide, 1.0;
        cp.async.cg.shared.global.L2::cache_hint.L2::128B [to], [from], 16, wide;
    """
    assert (run_copies(code + LAND + READ)[0] == EXPECTED).all()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_smaller_copies_side_by_side(size):
    copies = "".join(
        f"cp.async.ca.shared.global [to+{offset}], [from+{offset}], {size};" for offset in range(0, 16, size)
    )
    assert (run_copies(copies + LAND + READ)[0] == EXPECTED).all()


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(0, 16), min_size=LANES, max_size=LANES))
def test_bytes_beyond_the_source_size_become_zero(sizes):
    found, _ = run_copies(copy(extra=", n_in") + LAND + READ, {"n_in": np.array(sizes, np.uint32)})
    expected = EXPECTED.copy().view(np.uint8).reshape(LANES, 16)
    for lane, size in enumerate(sizes):
        expected[lane, size:] = 0
    assert (found.view(np.uint8).reshape(LANES, 16) == expected).all()


def test_nothing_is_read_where_the_source_size_is_zero():
    """Lanes 20 and up point nowhere."""
    code = "setp.ge.u32 p, tid, 20; selp.b32 n, 0, 16, p; @p mov.u64 from, 64;"
    found, report = run_copies(code + copy(extra=", n") + LAND + READ)
    assert (found == np.where(np.arange(LANES)[:, None] < 20, EXPECTED, 0)).all()
    assert report.bytes_read["global"] == 20 * 16
    with pytest.raises(MemoryAccessError, match=r"16-byte read out of bounds.*\n.*lane 20"):
        run_copies(code + copy() + LAND + READ)


def test_ignored_source():
    found, _ = run_copies("setp.lt.u32 p, tid, 7;" + copy(extra=", p") + LAND + READ)
    assert (found == np.where(np.arange(LANES)[:, None] < 7, 0, EXPECTED)).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_wait_group_counts_commit_groups(data):
    """Copies into four slots in any groups: wait_group N lands all but the last N groups, and nothing else."""
    code, group, groups = [], 0, {}
    for slot in range(SLOTS):
        code.append(copy(slot))
        groups[slot] = group
        commits = data.draw(st.integers(0, 2), label=f"commits after {slot}")
        code += [COMMIT] * commits
        group += commits
    allowed = data.draw(st.integers(0, 3), label="allowed")
    slot = data.draw(st.integers(0, SLOTS - 1), label="slot")
    code.append(f"cp.async.wait_group {allowed}; add.u32 to, to, {512 * slot};" + READ)
    if groups[slot] < group - allowed:
        assert (run_copies("".join(code))[0] == SOURCE.reshape(SLOTS, LANES, 4)[slot]).all()
    else:
        with pytest.raises(RaceError, match="copy in flight"):
            run_copies("".join(code))
        assert (run_copies("".join(code), race=False)[0] == 0xFFFFFFFF).all()  # as it was, NaN
        assert (run_copies("".join(code), race=False, lazy_copies=False)[0] != 0xFFFFFFFF).all()


def test_each_thread_has_its_own_groups():
    """Odd lanes commit an empty group more: wait_group 1 lands the copies of odd lanes alone."""
    code = "and.b32 n, tid, 1; setp.eq.u32 p, n, 1;" + copy() + COMMIT + f"@p {COMMIT}" + "cp.async.wait_group 1;"
    found, _ = run_copies(code + READ, race=False)
    odd = np.arange(LANES)[:, None] % 2 == 1
    assert (found == np.where(odd, EXPECTED, 0xFFFFFFFF)).all()
    with pytest.raises(RaceError, match=r"warp 0, lane 0 reads.*\n  warp 0, lane 0 issued the copy"):
        run_copies(code + READ)


def test_a_wait_of_some_lanes_lands_their_copies():
    code = "setp.lt.u32 p, tid, 8;" + copy() + COMMIT + "@p cp.async.wait_group 0;"
    found, _ = run_copies(code + READ, race=False)
    assert (found == np.where(np.arange(LANES)[:, None] < 8, EXPECTED, 0xFFFFFFFF)).all()


def test_two_copies_in_flight_to_one_place():
    with pytest.raises(RaceError, match=r"copy in flight.*\n.*issues a copy to it.*\n.*issued the copy"):
        run_copies(copy() + COMMIT + copy() + LAND + READ)


def test_a_store_to_the_target_of_a_copy():
    with pytest.raises(RaceError, match=r"copy in flight.*\n.*writes.*\n.*issued the copy"):
        run_copies(copy() + "st.shared.b32 [to], tid;" + LAND + READ)


def test_a_copy_that_nobody_waits_for():
    """It is no fault by itself: the kernel may end with copies in flight."""
    code = copy() + LAND + READ + copy(1) + COMMIT
    assert (run_copies(code)[0] == EXPECTED).all()


def test_misaligned_copy():
    with pytest.raises(
        MemoryAccessError, match=r"16-byte access to shared memory misaligned: offset 4\n.*lane 0.*`cp\.async"
    ):
        run_copies("add.u32 to, to, 4;" + copy() + LAND + READ)
