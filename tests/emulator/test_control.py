"""Divergence, barriers, deadlocks, endless loops. Ways of every kind are in the programs of test_reference.py."""

import numpy as np
import pytest
from lanes import run_lanes

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.emulator.errors import ConvergenceError, DeadlockError, InstructionBudgetError
from flashladder.common.errors import EmulatorError
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

LANES = 32

JOIN_BEFORE_A_WAY = """
    setp.lt.u32 p, a, 11; @p bra aside; bra.uni join;
join: {together} ret;
aside: add.u32 x, x, 100; bra.uni join;
"""


@pytest.mark.parametrize(
    ("together", "expected"),
    [("shfl.sync.bfly.b32 d, x, 31, 31, -1; st.global.b32 [at], d;", lambda a: (31 - a) + 100 * (a > 20)),
     ("bar.sync 0; add.u32 d, x, 1; st.global.b32 [at], d;", lambda a: a + 1 + 100 * (a < 11))],
)  # fmt: skip
def test_lanes_wait_at_a_join_that_stands_before_one_of_the_ways_to_it(together, expected):
    a = np.arange(LANES, dtype=np.uint32)
    start = "mov.u32 x, a; ld.param.u64 at, [pointer_d]; mad.wide.u32 at, a, 4, at; mov.u32 d, 0;"
    outputs, report = run_lanes(
        start + JOIN_BEFORE_A_WAY.format(together=together), {"a": a}, {"d": "u4"},
        registers=".reg .pred p; .reg .b32 x; .reg .b64 at;",
    )  # fmt: skip
    assert (outputs["d"] == expected(a)).all()
    assert report.instructions[together.split()[0]] == 1


def test_each_block_that_a_warp_is_about_to_run_is_told():
    entered = []
    loop = "mov.u32 x, 0; again: add.u32 x, x, 1; setp.lt.u32 p, x, 3; @p bra again;"
    run_lanes(loop, registers=".reg .pred p; .reg .b32 x;", entering=entered.append)
    assert sorted(entered.count(block) for block in set(entered)) == [1, 1, 3]


def test_lanes_meet_in_a_kernel_that_goes_far_apart():
    """Rung 23 with a NaN among its scores: some lanes then leave a loop whose join the compiler puts before it."""
    version = catalog.find("23")
    problem = Problem(seqlen_q=64, seqlen_k=192, head_dim=96)
    tensors = make_inputs(problem)
    tensors.q[0, 3, 0, 5] = tensors.k[0, 70, 0, 5] = float("nan")
    on_emulator(translate(version, version.config_for(problem), "sm_80"), problem, tensors)
    seen = tensors.o[0, :, 0].isnan().all(dim=1)
    assert seen.all()  # every row sees the key that is NaN


def test_partial_last_warp():
    a = np.arange(40, dtype=np.uint32)
    outputs, report = run_lanes("bar.sync 0; add.u32 d, a, 1;", {"a": a}, {"d": "u4"}, num_threads=40)
    assert (outputs["d"] == a + 1).all()
    assert report.instructions["bar.sync"] == 2


def test_special_registers():
    names = ["tid.x", "ntid.x", "ctaid.x", "nctaid.x", "laneid", "warpid", "tid.y", "lanemask_lt"]
    outputs = {f"d{n}": "u4" for n in range(len(names))}
    code = "".join(f"mov.u32 d{n}, %{name};" for n, name in enumerate(names))
    found, _ = run_lanes(code, {}, outputs, num_threads=64, grid=2)
    thread = np.tile(np.arange(64), 2)
    lane = thread % 32
    expected = [thread, 64, np.repeat([0, 1], 64), 2, lane, thread // 32, 0, (1 << lane) - 1]
    for n, values in enumerate(expected):
        assert (found[f"d{n}"] == values).all(), names[n]


# -- barriers

EXCHANGE = """
    mov.u32 tid, %tid.x; mov.u32 addr, buffer; mad.lo.u32 addr, tid, 4, addr; st.shared.b32 [addr], a;
    {barrier}
    mov.u32 other, %ntid.x; sub.u32 other, other, tid; sub.u32 other, other, 1;
    mov.u32 addr, buffer; mad.lo.u32 addr, other, 4, addr; ld.shared.b32 d, [addr];
"""
EXCHANGE_REGISTERS = ".reg .b32 tid, addr, other; .reg .pred p, q;"
BUFFER = ".shared .align 16 .b8 buffer[1024];"


@pytest.mark.parametrize(
    "barrier", ["bar.sync 0;", "barrier.sync 3;", "barrier.sync.aligned 1, 128;", "bar.sync 2, 128;"]
)
def test_barrier(barrier):
    a = np.arange(256, dtype=np.uint32)
    outputs, _ = run_lanes(
        EXCHANGE.format(barrier=barrier), {"a": a}, {"d": "u4"}, registers=EXCHANGE_REGISTERS, declarations=BUFFER,
        num_threads=128, grid=2,
    )  # fmt: skip
    assert (outputs["d"].reshape(2, 128) == a.reshape(2, 128)[:, ::-1]).all()


def test_a_barrier_for_some_warps_and_one_to_arrive_at():
    """Warps 0 and 1 meet at barrier 1; warp 2 only arrives at barrier 2, at which warp 3 waits for its data."""
    code = """
        mov.u32 tid, %tid.x; shr.u32 warp, tid, 5; mov.u32 addr, buffer; mad.lo.u32 addr, tid, 4, addr;
        mov.u32 d, 0; setp.ge.u32 p, warp, 2; @p bra pair2;
        st.shared.b32 [addr], a; bar.sync 1, 64; xor.b32 other, tid, 32; bra.uni read;
    pair2:
        setp.eq.u32 q, warp, 3; @q bra consumer;
        st.shared.b32 [addr], a; bar.arrive 2, 64; bra.uni end;
    consumer:
        bar.sync 2, 64; sub.u32 other, tid, 32;
    read:
        mov.u32 addr, buffer; mad.lo.u32 addr, other, 4, addr; ld.shared.b32 d, [addr];
    end:
    """
    a = np.arange(1000, 1128, dtype=np.uint32)
    outputs, _ = run_lanes(
        code,
        {"a": a},
        {"d": "u4"},
        registers=EXCHANGE_REGISTERS + ".reg .b32 warp;",
        declarations=BUFFER,
        num_threads=128,
    )
    expected = np.concatenate([a[32:64], a[:32], np.zeros(32, np.uint32), a[64:96]])
    assert (outputs["d"] == expected).all()


def test_ctas_with_different_numbers_of_barriers():
    """CTA c passes c + 1 barriers, in each of which the threads hand their values on by one warp."""
    code = """
        mov.u32 n, %ctaid.x; mov.u32 tid, %tid.x; mov.b32 d, a;
    loop:
        mov.u32 addr, buffer; mad.lo.u32 addr, tid, 4, addr; st.shared.b32 [addr], d;
        bar.sync 0;
        add.u32 other, tid, 32; and.b32 other, other, 127;
        mov.u32 addr, buffer; mad.lo.u32 addr, other, 4, addr; ld.shared.b32 d, [addr];
        bar.sync 0;
        setp.eq.u32 p, n, 0; sub.u32 n, n, 1; @!p bra loop;
    """
    a = np.arange(640, dtype=np.uint32)
    outputs, _ = run_lanes(
        code, {"a": a}, {"d": "u4"}, registers=EXCHANGE_REGISTERS + ".reg .b32 n;", declarations=BUFFER,
        num_threads=128, grid=5,
    )  # fmt: skip
    for cta, (values, found) in enumerate(zip(a.reshape(5, 128), outputs["d"].reshape(5, 128), strict=True)):
        assert (found == np.roll(values, -32 * (cta + 1))).all()


def run_warps(code, num_threads=64, **options):
    return run_lanes(
        f"mov.u32 tid, %tid.x; shr.u32 warp, tid, 5; {code} mov.u32 d, 0;", {}, {"d": "u4"},
        registers=".reg .b32 tid, warp; .reg .pred p;", num_threads=num_threads, **options,
    )  # fmt: skip


def test_deadlock_of_a_warp_that_left():
    with pytest.raises(DeadlockError) as error:
        run_warps("setp.eq.u32 p, warp, 0; @p exit; bar.sync 0;", num_threads=96)
    first, *warps = str(error.value).splitlines()
    assert first == "deadlock in CTA (0, 0, 0):"
    assert warps[0] == "  warp 0 has left"
    assert "warp 1 waits at barrier 0 (64 of 96 threads), at PTX line" in warps[1]
    assert "`bar.sync 0`" in warps[2]


def test_deadlock_at_different_barriers():
    with pytest.raises(
        DeadlockError, match=r"warp 0 waits at barrier 1 \(32 of 64.*\n.*warp 1 waits at barrier 2 \(32 of 64"
    ):
        run_warps("setp.eq.u32 p, warp, 0; @p bar.sync 1; @!p bar.sync 2;")


def test_barrier_in_divergent_code():
    with pytest.raises(ConvergenceError, match=r"a barrier.*lanes \[8, .*\n.*CTA \(0, 0, 0\), warp 0.*`bar\.sync 0`"):
        run_warps("setp.ge.u32 p, tid, 8; @p bra end; bar.sync 0; end:", num_threads=32)


def test_endless_loop():
    with pytest.raises(InstructionBudgetError, match=r"more than 1,000 instructions.*\n.*warp 0, at PTX line"):
        run_warps("loop: add.u32 tid, tid, 1; bra loop;", max_instructions=1000)


def test_trap():
    with pytest.raises(EmulatorError, match=r"trap\n  CTA \(0, 0, 0\), warp 1, lane 3"):
        run_warps("setp.ne.u32 p, tid, 35; @p bra end; trap; end:")
