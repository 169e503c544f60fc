"""Exchanges within a warp, and the masks of the lanes that take part."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import run_lanes

from flashladder.common.emulator.errors import ConvergenceError

LANES = 32


def shuffled(mode, values, lane_operands, clamp):
    """shfl.sync as the PTX ISA's pseudocode has it."""
    results, inside = [], []
    for lane in range(32):
        operand, bound, segment = lane_operands[lane] & 31, clamp & 31, clamp >> 8 & 31
        highest = (lane & segment) | (bound & ~segment)
        lowest = lane & segment
        source = {
            "up": lane - operand,
            "down": lane + operand,
            "bfly": lane ^ operand,
            "idx": lowest | (operand & ~segment & 31),
        }[mode]
        valid = source >= highest if mode == "up" else source <= highest
        results.append(values[source if valid else lane])
        inside.append(valid)
    return results, inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_shuffle(mode, data):
    width = data.draw(st.sampled_from([32, 16, 8, 4]), label="width")
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    values = np.random.default_rng(0).integers(0, 1 << 32, LANES, np.uint32)
    if data.draw(st.booleans(), label="alike"):
        lanes = [data.draw(st.integers(0, 31))] * 32
    else:
        lanes = data.draw(st.lists(st.integers(0, 31), min_size=32, max_size=32))
    code = f"shfl.sync.{mode}.b32 d|p, a, b, {clamp}, -1;"
    outputs, _ = run_lanes(code, {"a": values, "b": np.array(lanes, np.uint32)}, {"d": "u4", "p": "?"})
    results, inside = shuffled(mode, values.tolist(), lanes, clamp)
    assert outputs["d"].tolist() == results
    assert outputs["p"].tolist() == inside


def test_votes_and_reductions():
    a = np.random.default_rng(1).integers(0, 1 << 32, LANES, np.uint32)
    members = 0x0000FFFF
    code = """
        setp.lt.u32 p, a, 0x80000000;
        mov.u32 lane, %laneid; setp.ge.u32 q, lane, 16; @q bra upper;
        vote.sync.ballot.b32 d, p, 0xffff; vote.sync.any.pred s, p, 0xffff; vote.sync.all.pred u, p, 0xffff;
        redux.sync.add.u32 e, a, 0xffff; redux.sync.max.s32 f, a, 0xffff; activemask.b32 g;
        bra.uni end;
    upper:
        vote.sync.ballot.b32 d, p, 0xffff0000; vote.sync.any.pred s, p, 0xffff0000; vote.sync.all.pred u, p, 0xffff0000;
        redux.sync.add.u32 e, a, 0xffff0000; redux.sync.max.s32 f, a, 0xffff0000; activemask.b32 g;
    end:
    """
    outputs, _ = run_lanes(
        code, {"a": a}, {"d": "u4", "e": "u4", "f": "u4", "g": "u4", "s": "?", "u": "?"},
        registers=".reg .pred p, q; .reg .b32 lane;",
    )  # fmt: skip
    for half, mask in ((slice(0, 16), members), (slice(16, 32), members << 16)):
        small = a[half] < 0x80000000
        ballot = sum(int(bit) << (n + half.start) for n, bit in enumerate(small))
        assert (outputs["d"][half] == ballot).all()
        assert (outputs["s"][half] == small.any()).all()
        assert (outputs["u"][half] == small.all()).all()
        assert (outputs["e"][half] == a[half].sum(dtype=np.uint32)).all()
        assert (outputs["f"][half] == a[half].view(np.int32).max().view(np.uint32)).all()
        assert (outputs["g"][half] == mask).all()


def test_a_shuffle_that_names_absent_lanes():
    a = np.arange(LANES, dtype=np.uint32)
    code = "mov.u32 d, 0; setp.lt.u32 p, a, 20; @p bra end; shfl.sync.bfly.b32 d, a, 1, 31, -1; end:"
    with pytest.raises(
        ConvergenceError, match=r"lanes \[0, 1, .*19\] should take part.*\n.*CTA \(0, 0, 0\), warp 0, .*`shfl"
    ):
        run_lanes(code, {"a": a}, {"d": "u4"}, registers=".reg .pred p;")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("shfl.sync.idx.b32 d, a, 20, 31, 0xffff;", r"reads one that its mask does not name.*\n.*lane 0, .*`@p shfl"),
        ("shfl.sync.down.b32 d, a, 1, 31, 0xffff;", r"reads one that its mask does not name.*\n.*lane 15, "),
        ("shfl.sync.idx.b32 d, a, 3, 31, 0xfffe;", r"its mask 0xfffe does not name it\n.*lane 0, "),
        ("vote.sync.any.pred q, q, 0x0ff0;", r"its mask 0xff0 does not name it\n.*lane 0, "),
        ("bar.warp.sync 0x7fff;", r"its mask 0x7fff does not name it\n.*lane 15, "),
    ],
)
def test_masks_that_do_not_fit_their_lanes(code, reason):
    """What PTX calls undefined, of lanes 0 to 15."""
    a = np.arange(LANES, dtype=np.uint32)
    start = "mov.u32 d, 0; setp.lt.u32 p, a, 16; mov.pred q, p; @p "
    with pytest.raises(ConvergenceError, match=reason):
        run_lanes(start + code, {"a": a}, {"d": "u4"}, registers=".reg .pred p, q;")


def test_groups_of_lanes_with_masks_of_their_own():
    """One instruction, executed for four groups of eight lanes at a time, as __reduce_add_sync of tiles is."""
    a = np.random.default_rng(2).integers(0, 1 << 32, LANES, np.uint32)
    code = """
        mov.u32 lane, %laneid; and.b32 lane, lane, 24; mov.u32 mask, 0xff; shl.b32 mask, mask, lane;
        setp.lt.u32 p, a, 0x80000000; redux.sync.max.u32 d, a, mask; vote.sync.ballot.b32 e, p, mask;
        shfl.sync.bfly.b32 f, a, 7, 31, mask;
    """
    outputs, _ = run_lanes(
        code, {"a": a}, {"d": "u4", "e": "u4", "f": "u4"}, registers=".reg .b32 lane, mask; .reg .pred p;"
    )
    groups = a.reshape(4, 8)
    assert (outputs["d"].reshape(4, 8) == groups.max(axis=1, keepdims=True)).all()
    assert (outputs["f"].reshape(4, 8) == groups[:, ::-1]).all()
    for n, group in enumerate(groups):
        ballot = sum(int(small) << 8 * n + bit for bit, small in enumerate(group < 0x80000000))
        assert (outputs["e"].reshape(4, 8)[n] == ballot).all()


def test_lanes_that_have_left_are_no_members():
    """Neither those that left nor those that a warp never had: PTX counts non-exited threads only."""
    a = np.arange(40, dtype=np.uint32)
    code = """
        ld.param.u64 at, [pointer_d]; mad.wide.u32 at, a, 4, at; mov.u32 d, 0; st.global.b32 [at], d;
        setp.gt.u32 p, a, 35; @p exit;
        redux.sync.add.u32 d, a, -1; st.global.b32 [at], d; {more} ret;
    """

    def run(more):
        registers = ".reg .pred p; .reg .b64 at;"
        return run_lanes(code.format(more=more), {"a": a}, {"d": "u4"}, registers=registers, num_threads=40)

    outputs, _ = run("")
    assert outputs["d"].tolist() == [sum(range(32))] * 32 + [sum(range(32, 36))] * 4 + [0] * 4
    with pytest.raises(ConvergenceError, match=r"reads one .* or that has left\n.*warp 1, lane 0, "):
        run("shfl.sync.idx.b32 d, d, 5, 31, -1;")
