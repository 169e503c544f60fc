"""mbarriers: phases, counts, waits; what PTX leaves undefined is an error; deadlocks say what is missing."""

import re

import numpy as np
import pytest
from lanes import run_lanes

from flashladder.common.emulator.errors import DeadlockError, RaceError, SynchronisationError

DECLARATIONS = ".shared .align 16 .b8 buffer[1024]; .shared .align 8 .b64 bar; .shared .align 8 .b64 other;"
REGISTERS = ".reg .b32 tid, warp, addr, x, y, n; .reg .pred p, q, r; .reg .b64 state;"
START = "mov.u32 tid, %tid.x; shr.u32 warp, tid, 5; mov.u32 addr, buffer; mad.lo.u32 addr, tid, 4, addr; mov.u32 d, 0;"
LEADER = "setp.eq.u32 p, tid, 0;"


def initialised(count):
    return f"{START}{LEADER} st.shared.b32 [addr], 0; @p mbarrier.init.shared::cta.b64 [bar], {count}; bar.sync 0;"


def waits(parity=0, name="LOOP", barrier="bar", kind="try_wait"):
    return f"{name}: mbarrier.{kind}.parity.shared::cta.b64 q, [{barrier}], {parity}; @!q bra {name};"


ARRIVE = "mbarrier.arrive.shared::cta.b64 state, [bar];"


def run(code, num_threads=64, grid=3, **options):
    outputs, _ = run_lanes(
        code, {}, {"d": "u4"}, registers=REGISTERS, declarations=DECLARATIONS, num_threads=num_threads, grid=grid,
        **options,
    )  # fmt: skip
    return outputs["d"].reshape(grid, num_threads)


EXCHANGE = "xor.b32 x, tid, 32; mov.u32 addr, buffer; mad.lo.u32 addr, x, 4, addr; ld.shared.b32 d, [addr];"


@pytest.mark.parametrize("kind", ["try_wait", "test_wait"])
def test_two_warps_meet(kind):
    """All arrive and wait, in a loop as inline assembly has it."""
    found = run(initialised(64) + "st.shared.b32 [addr], tid;" + ARRIVE + waits(kind=kind) + EXCHANGE)
    assert (found == np.arange(64) ^ 32).all()


@pytest.mark.parametrize(
    "wait",
    [
        "LOOP: mbarrier.try_wait.shared::cta.b64 q, [bar], state; @!q bra LOOP;",
        "LOOP: mbarrier.try_wait.b64 q, [addr64], state, 1000; @!q bra LOOP;",  # generic address, a time limit
        "LOOP: mbarrier.try_wait.acquire.cta.shared.b64 q, [bar], state; @q bra DONE; bra LOOP; DONE:",
        "LOOP: mbarrier.test_wait.shared.b64 q, [bar], state; @!q nanosleep.u32 20; @!q bra LOOP;",
    ],
)
def test_forms_of_a_wait(wait):
    generic = "mov.u32 x, bar; cvt.u64.u32 addr64, x; cvta.shared.u64 addr64, addr64;"
    code = initialised(64) + "st.shared.b32 [addr], tid;" + ARRIVE + generic + wait + EXCHANGE
    outputs, _ = run_lanes(
        code, {}, {"d": "u4"}, registers=REGISTERS + ".reg .b64 addr64;", declarations=DECLARATIONS, num_threads=64
    )
    assert (outputs["d"] == np.arange(64) ^ 32).all()


def test_phases_follow_each_other():
    """Five phases; in each, a warp hands its number on to the other."""
    code = (
        initialised(64)
        + "mov.u32 n, 0; mov.u32 d, tid; NEXT: st.shared.b32 [addr], d;"
        + ARRIVE
        + "and.b32 y, n, 1; LOOP: mbarrier.try_wait.parity.shared::cta.b64 q, [bar], y; @!q bra LOOP;"
        + EXCHANGE
        + "bar.sync 0; mov.u32 addr, buffer; mad.lo.u32 addr, tid, 4, addr;"
        + "add.u32 n, n, 1; setp.lt.u32 r, n, 5; @r bra NEXT;"
    )
    assert (run(code) == np.arange(64) ^ 32).all()


def test_the_phase_before_the_first_counts_as_over():
    """A producer begins with parity 1: nothing has to be freed yet."""
    assert (run(initialised(1) + waits(parity=1)) == 0).all()


def test_bytes_are_awaited_as_well():
    """A phase ends when nothing is pending and no bytes are to come, in whatever order they come."""
    code = initialised(1) + LEADER + "@!p bra WAIT;"
    first = code + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 48;"
    complete = "mbarrier.complete_tx.shared::cta.b64 [bar], {};"
    run(first + complete.format(16) + complete.format(32) + "WAIT:" + waits())
    run(
        code
        + complete.format(16)
        + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16;"
        + ARRIVE
        + "WAIT:"
        + waits()
    )
    with pytest.raises(DeadlockError, match=r"phase 0: 0 of 1 arrivals pending, 32 bytes to come"):
        run(first + complete.format(16) + "WAIT:" + waits())
    with pytest.raises(DeadlockError, match=r"phase 0: 0 of 1 arrivals pending, -16 bytes to come"):
        run(first + complete.format(64) + "WAIT:" + waits())


def test_counts_of_an_arrival():
    run(initialised(10) + "@p mbarrier.arrive.shared::cta.b64 state, [bar], 10;" + waits())
    with pytest.raises(DeadlockError, match="3 of 10 arrivals pending"):
        run(initialised(10) + "@p mbarrier.arrive.shared::cta.b64 state, [bar], 7;" + waits())


def test_what_an_arrival_returns():
    """The pending arrivals before it, lane by lane."""
    code = initialised(100) + "mbarrier.arrive.noComplete.shared::cta.b64 state, [bar], 1;"
    found = run(code + "mbarrier.pending_count.b64 d, state;", num_threads=32, grid=2)
    assert (found == 100 - np.arange(32)).all()


def test_a_dropped_arrival_is_not_awaited_again():
    """Warp 1 drops out: later phases await warp 0 alone."""
    code = (
        initialised(64)
        + "setp.eq.u32 r, warp, 1; @r mbarrier.arrive_drop.shared::cta.b64 _, [bar]; @r bra END;"
        + ARRIVE + waits(0, "A") + ARRIVE + waits(1, "B") + "mov.u32 d, 7; END:"
    )  # fmt: skip
    assert (run(code)[:, :32] == 7).all()


def test_ctas_in_different_phases():
    """CTA c has gone through c + 1 phases."""
    code = (
        initialised(64)
        + "mov.u32 n, 0; mov.u32 x, %ctaid.x; NEXT:"
        + ARRIVE
        + "and.b32 y, n, 1; LOOP: mbarrier.try_wait.parity.shared::cta.b64 q, [bar], y; @!q bra LOOP;"
        + "bar.sync 0; add.u32 n, n, 1; setp.le.u32 r, n, x; @r bra NEXT; mov.u32 d, n;"
    )
    assert (run(code, grid=4) == np.arange(1, 5)[:, None]).all()


def test_a_test_may_say_no():
    """Warp 0 tests once, before warp 1 can have arrived, which waits for it; then it waits as usual."""
    code = (
        initialised(32)
        + "setp.eq.u32 p, warp, 0; @!p bra SECOND;"
        + "mbarrier.test_wait.parity.shared::cta.b64 q, [bar], 0; selp.u32 d, 1, 2, q; bar.sync 1, 64;"
        + waits()
        + "bra.uni END; SECOND: bar.sync 1, 64;"
        + ARRIVE
        + "END:"
    )
    found = run(code)
    assert (found[:, :32] == 2).all()


WRONG = {
    "uninitialised": (START + ARRIVE, "no mbarrier is initialised at shared memory offset 1024"),
    "invalidated": (
        initialised(64) + "@p mbarrier.inval.shared::cta.b64 [bar]; bar.sync 0;" + ARRIVE,
        "no mbarrier is initialised",
    ),
    "made twice": (initialised(1) + "@p mbarrier.init.shared::cta.b64 [bar], 1;", "there is one already"),
    "made by many": (START + "mbarrier.init.shared::cta.b64 [bar], 64;", "mbarrier.init by several lanes at once"),
    "count 0": (START + LEADER + "@p mbarrier.init.shared::cta.b64 [bar], 0;", "a count out of 1"),
    "too many": (initialised(63) + ARRIVE, "more arrivals at once than are pending"),
    "overrun": (initialised(32) + ARRIVE, "nobody has yet seen the end of the last phase"),
    "bytes": (
        initialised(1) + "@p mbarrier.expect_tx.shared::cta.b64 [bar], 1048576;", "more than 2\\^20 - 1 bytes"
    ),
    "parity": (initialised(1) + waits(parity=2), "a parity other than 0 and 1"),
    "completes": (
        initialised(1) + "@p mbarrier.arrive.noComplete.shared::cta.b64 state, [bar], 1;", "ended the phase"
    ),
    "misaligned": (START + LEADER + "@p mbarrier.init.shared::cta.b64 [bar+4], 1;", "misaligned"),
    "ordinary": (initialised(1) + "ld.shared.b32 d, [bar];", "touched as ordinary memory: .* offset 1024"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_an_error_at_its_line(name):
    code, message = WRONG[name]
    with pytest.raises(SynchronisationError, match=message) as error:
        run(code)
    assert re.search(r"CTA \(0, 0, 0\),.*\n?  warp|CTA \(0, 0, 0\), warp \d", str(error.value))
    assert "at PTX line" in str(error.value)


def test_an_invalidated_one_may_be_made_again():
    code = (
        initialised(64) + ARRIVE + waits() + "bar.sync 0; @p mbarrier.inval.shared::cta.b64 [bar];"
        "@p mbarrier.init.shared::cta.b64 [bar], 64; bar.sync 0;" + ARRIVE + waits(0, "AGAIN")
    )
    run(code)
    with pytest.raises(RaceError, match="an mbarrier is invalidated while others may use it"):
        run(code.replace("bar.sync 0; @p mbarrier.inval", "@p mbarrier.inval"))


def test_a_deadlock_names_every_waiting_warp():
    """Warp 0 awaits phase 1 of a barrier in phase 0; warp 1 a second barrier, which lacks an arrival and bytes."""
    code = (
        initialised(1) + "@p mbarrier.init.shared::cta.b64 [other], 2; bar.sync 0;"
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [other], 128; setp.eq.u32 p, warp, 0; @!p bra SECOND;"
        + waits(0, "A")
        + "SECOND:"
        + waits(0, "B", "other")
    )
    with pytest.raises(DeadlockError) as error:
        run(code)
    first, *warps = str(error.value).splitlines()
    assert first == "deadlock in CTA (0, 0, 0):"
    assert len(warps) == 2
    assert "warp 0 waits at the end of phase 0 of the mbarrier at shared memory offset 1024" in warps[0]
    assert "(phase 0: 1 of 1 arrivals pending, 0 bytes to come), initialised at PTX line" in warps[0]
    assert "warp 1 waits at the end of phase 0 of the mbarrier at shared memory offset 1032" in warps[1]
    assert "(phase 0: 1 of 2 arrivals pending, 128 bytes to come)" in warps[1]
    assert all("`mbarrier.try_wait.parity.shared::cta.b64 q, [" in each for each in warps)


# -- what an mbarrier orders

STORE, FAR = "st.shared.b32 [addr], tid;", EXCHANGE
RACES = {
    "no wait": (initialised(64) + STORE + ARRIVE + FAR, "no barrier orders the two"),
    "too early": (initialised(64) + ARRIVE + STORE + waits() + FAR, "no barrier orders the two"),
    "relaxed by one lane": (
        # lane 0 of each warp arrives for all: the others' stores are not released
        initialised(2) + STORE + "and.b32 x, tid, 31; setp.eq.u32 r, x, 0; @r mbarrier.arrive.shared::cta.b64 _, [bar];"
        + waits() + FAR,
        "another lane of that warp has arrived at a barrier, but not this one",
    ),
    "no barrier after init": (initialised(64).replace("bar.sync 0;", "") + ARRIVE, "no barrier orders the init"),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_a_race(name):
    code, message = RACES[name]
    with pytest.raises(RaceError, match=message):
        run(code, num_threads=64)


def test_a_leader_may_arrive_after_syncwarp():
    code = RACES["relaxed by one lane"][0].replace("and.b32 x, tid, 31;", "bar.warp.sync -1; and.b32 x, tid, 31;")
    assert (run(code) == np.arange(64) ^ 32).all()


def test_what_one_lane_has_waited_for_the_others_may_not_read():
    one = "and.b32 x, tid, 31; setp.ne.u32 r, x, 0; @r bra JOIN;" + waits() + "JOIN:"
    code = initialised(64) + STORE + ARRIVE + one
    with pytest.raises(RaceError, match="another lane of this warp has waited for it, but not this one"):
        run(code + FAR)
    run(code + "bar.warp.sync -1;" + FAR)


# -- elect.sync, setmaxnreg, named barriers


@pytest.mark.parametrize(("mask", "leader"), [("0xffffffff", 0), ("0xfff0", 4)])
def test_one_lane_is_elected(mask, leader):
    lanes = np.arange(32)
    code = f"{START} shl.b32 x, 1, tid; and.b32 x, x, {mask}; setp.ne.u32 p, x, 0; @!p bra END;"
    found = run(code + f"elect.sync y|q, {mask}; selp.u32 d, 100, 0, q; add.u32 d, d, y; END:", num_threads=32)
    named = int(mask, 16) >> lanes & 1
    assert (found == named * (leader + 100 * (lanes == leader))).all()


def run_registers(code, num_threads=384):
    """A kernel with bounds on its threads, one warpgroup of which goes its own way."""
    text = f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel()
.maxntid {num_threads}, 1, 1
.minnctapersm 1
{{
    .reg .b32 tid, group, warp; .reg .pred p, q;
    mov.u32 tid, %tid.x; shr.u32 group, tid, 7; shr.u32 warp, tid, 5; setp.eq.u32 p, group, 2;
    {code}
    ret;
}}
"""
    from flashladder.common import emulator

    emulator.run(text, b"", (2, 1, 1), num_threads, 0, emulator.GlobalMemory(), entry="kernel")


MOVED = (
    "@p bra PRODUCER; setmaxnreg.inc.sync.aligned.u32 240; bra.uni END;"
    "PRODUCER: setmaxnreg.dec.sync.aligned.u32 24; END:"
)


def test_registers_move_between_warpgroups():
    """168 a thread at launch: the producer gives 144, each consumer takes 72."""
    run_registers(MOVED)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("PRODUCER: setmaxnreg.dec.sync.aligned.u32 24;", "PRODUCER:", DeadlockError,
         "setmaxnreg for 2304 registers more .the pool has 0."),
        ("u32 24;", "u32 32;", DeadlockError, "setmaxnreg for 2304 registers more .the pool has 1280."),
        ("u32 24;", "u32 20;", SynchronisationError, "takes a multiple of 8 from 24 to 256, at PTX line"),
        ("dec.sync.aligned.u32 24", "dec.sync.aligned.u32 176", SynchronisationError, "the warp owns 168 registers"),
        ("@p bra PRODUCER;", "setp.eq.u32 p, warp, 11; @p bra PRODUCER;", SynchronisationError,
         "warp 8 of the same warpgroup executed another one"),
        ("@p bra PRODUCER;", "@p bra PRODUCER; setp.eq.u32 q, warp, 0; @q bra END;", SynchronisationError,
         "warp 0 of the warpgroup did not execute it"),
    ],
)  # fmt: skip
def test_wrong_moves_of_registers(old, new, error, message):
    assert old in MOVED
    with pytest.raises(error, match=message):
        run_registers(MOVED.replace(old, new))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("setp.eq.u32 p, warp, 0; @p bar.sync 1, 64; @!p bar.sync 1, 96;", "64 threads are awaited there already"),
        ("bar.sync 1, 40;", "a barrier for 40 threads, which are no whole warps"),
        ("setp.eq.u32 p, warp, 0; @p bar.arrive 1, 96; @p bar.arrive 1, 96;", "the warp has arrived there before"),
    ],
)  # fmt: skip
def test_wrong_use_of_a_named_barrier(code, message):
    with pytest.raises(SynchronisationError, match=message):
        run(START + code, num_threads=96)


def test_the_answer_of_a_wait_has_to_be_looked_at():
    """try_wait may come back before the phase is over."""
    with pytest.raises(SynchronisationError, match="nobody looks at whether the phase is over"):
        run(initialised(64) + ARRIVE + "mbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;")
