"""The masks of the lanes that take part in an exchange within a warp. What comes of it, test_reference.py compares."""

import numpy as np
import pytest
from lanes import run_lanes

from flashladder.common.emulator.errors import ConvergenceError

LANES = 32


def test_the_active_lanes():
    code = """
        mov.u32 lane, %laneid; setp.ge.u32 q, lane, 16; @q bra upper; activemask.b32 d; bra.uni end;
    upper: activemask.b32 d;
    end:
    """
    outputs, _ = run_lanes(code, {}, {"d": "u4"}, registers=".reg .pred q; .reg .b32 lane;")
    assert outputs["d"].tolist() == [0xFFFF] * 16 + [0xFFFF0000] * 16


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


def test_a_reduction_after_another_cta_has_left():
    """The emulator executes a warp of several CTAs at a time."""
    a = np.arange(2 * LANES, dtype=np.uint32)
    code = "setp.lt.u32 p, a, 32; @p exit; redux.sync.max.u32 d, a, -1;"
    outputs, _ = run_lanes(code, {"a": a}, {"d": "u4"}, registers=".reg .pred p;", grid=2)
    assert (outputs["d"][LANES:] == 63).all()
