"""The race detector against the definition, with agents: random programs of stores, copies in and out, proxy fences and
mbarriers, and every pair of conflicting accesses looked at."""

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from lanes import run_lanes

from flashladder.common.emulator.errors import RaceError

NUM_WARPS = 3
ALL = frozenset(range(32 * NUM_WARPS))
MOST_STEPS = 10


def lanes_of(warp):
    return frozenset(range(32 * warp, 32 * warp + 32))


words = st.integers(0, 1)
threads = st.sampled_from([0, 1, 33, 70])
# Who does it: one thread, or a whole warp (-1 - warp).
someone = st.one_of(threads, threads, st.integers(-NUM_WARPS, -1))
steps = st.one_of(
    st.tuples(st.sampled_from(["load", "store", "store"]), words, threads),
    st.tuples(st.sampled_from(["copy_in", "copy_out"]), words, threads),
    st.tuples(st.just("wait_read"), st.just(0), threads),
    st.tuples(st.sampled_from(["fence", "signal"]), st.just(0), someone),
    st.tuples(st.sampled_from(["observe", "observe"]), st.integers(0, MOST_STEPS), someone),  # a signal, or a copy in
    st.tuples(st.just("sync_warp"), st.just(0), st.integers(-NUM_WARPS, -1)),
    st.tuples(st.just("barrier"), st.just(0), st.just(0)),
)


def members_of(who):
    return frozenset([who]) if who >= 0 else lanes_of(-1 - who)


def announcements(program):
    """The steps at whose barriers one can wait."""
    return [number for number, (kind, _, _) in enumerate(program) if kind in ("signal", "copy_in")]


def code_of(number, step, program):
    """PTX of one step. Words are 128 bytes apart; a step has its own mbarrier."""
    kind, word, who = step
    place, bar = f"[buffer+{128 * word}]", f"[bars+{8 * number}]"
    chosen = f"setp.eq.u32 p, tid, {who};" if who >= 0 else f"setp.eq.u32 p, warp, {-1 - who};"
    copy_in = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {bar}, 16; cp.async.bulk.shared::cluster.global"
    body = {
        "load": f"ld.shared.b32 x, {place};",
        "store": f"st.shared.b32 {place}, tid;",
        "copy_in": f"{copy_in}.mbarrier::complete_tx::bytes {place}, [from], 16, {bar};",
        "copy_out": f"cp.async.bulk.global.shared::cta.bulk_group [to], {place}, 16; cp.async.bulk.commit_group;",
        "wait_read": "cp.async.bulk.wait_group.read 0;",
        "fence": "fence.proxy.async.shared::cta;",
        "signal": f"mbarrier.arrive.shared::cta.b64 _, {bar};",
        "sync_warp": "bar.warp.sync -1;",
        "barrier": "bar.sync 0;",
        "observe": "",
    }[kind]
    if kind == "observe":
        possible = [each for each in announcements(program) if each < number]
        if not possible:
            return ""
        body = wait(number, possible[word % len(possible)])
    if kind == "barrier":
        return body
    return f"{chosen} @!p bra skip{number}; {body} skip{number}:"


def wait(name, number):
    return f"wait{name}: mbarrier.try_wait.parity.shared::cta.b64 q, [bars+{8 * number}], 0; @!q bra wait{name};"


def has_race(program, announced):
    """Whether two accesses to one word, not both reads, are unordered.

    What a thread knows of is a set: accesses, ("fenced", access) for stores that their thread has fenced, and
    ("crossed", access) for all that a thread knew of before a fence. Its own accesses it knows. An agent's access is
    known to those who waited for it. An access by an agent needs the stores before it to be known as fenced; a write by
    one needs the loads before it to be known as crossed. A write hides what came before it from those who come later.
    """
    known = {thread: set() for thread in ALL}
    written, reads = {}, {0: [], 1: []}  # by word: the last write, and the reads since
    stores, loads = {thread: set() for thread in ALL}, set()
    brought, copies_out = {}, {thread: set() for thread in ALL}
    for number, (kind, word, who) in enumerate(program):
        members = members_of(who)
        if kind in ("barrier", "sync_warp"):
            members = ALL if kind == "barrier" else members
            together = set().union(*(known[thread] for thread in members))
            for thread in members:
                known[thread] = set(together)
        elif kind == "fence":
            for thread in members:
                known[thread] |= {("fenced", each) for each in stores[thread]}
                known[thread] |= {("crossed", each) for each in known[thread] if isinstance(each, int)}
        elif kind == "signal":
            brought[number] = set().union(*(known[thread] for thread in members))
        elif kind == "observe":
            possible = [each for each in announced if each < number]
            for thread in members if possible else ():
                known[thread] |= brought[possible[word % len(possible)]]
        elif kind == "wait_read":
            known[who] |= copies_out[who]
        elif kind != "nothing":
            by_agent, writes = kind.startswith("copy"), kind in ("store", "copy_in")
            for before, is_store in [written.get(word, (None, False))] + [
                (each, False) for each in reads[word]
            ] * writes:
                if before is None:
                    continue
                if before not in known[who] or (by_agent and is_store and ("fenced", before) not in known[who]):
                    return True
                if kind == "copy_in" and before in loads and ("crossed", before) not in known[who]:
                    return True
            if kind == "copy_in":
                brought[number] = known[who] | {number}
            elif kind == "copy_out":
                copies_out[who].add(number)
            else:
                known[who].add(number)
            if writes:
                written[word], reads[word] = (number, kind == "store"), []
                stores[who] |= {number} if kind == "store" else set()
            else:
                reads[word].append(number)
                loads |= {number} if kind == "load" else set()
    return False


START = """
    mov.u32 tid, %tid.x; shr.u32 warp, tid, 5; mov.u32 cta, %ctaid.x; mov.u32 y, buffer; mad.lo.u32 y, tid, 4, y;
    st.shared.b32 [y], 0; fence.proxy.async.shared::cta; mov.u32 d, 0;
    ld.param.u64 from, [pointer_a]; ld.param.u64 to, [pointer_b]; mad.wide.u32 to, cta, 384, to; mov.u32 b, 0;
    setp.ne.u32 p, tid, 0; @p bra made;
    {}
    fence.mbarrier_init.release.cluster;
    made: bar.sync 0;
"""


def in_one_cta(number, cta, code):
    return f"setp.ne.u32 p, cta, {cta}; @p bra other{number}; {code} other{number}:" if cta is not None else code


def of_cta(program, own):
    """What a CTA executes: steps of the other one become nothing."""
    return [step if cta in (None, own) else ("nothing", 0, 0) for step, cta in program]


def check(program, lazy):
    """Runs steps of both CTAs, or of one alone, and compares the detector's verdict with the definition's."""
    shared = [step for step, _ in program]
    made = "".join(
        f"mbarrier.init.shared::cta.b64 [bars+{8 * number}], {32 if kind == 'signal' and who < 0 else 1};"
        for number, (kind, _, who) in enumerate(shared)
    )
    body = "".join(in_one_cta(number, cta, code_of(number, step, shared)) for number, (step, cta) in enumerate(program))
    last = "".join(
        in_one_cta(f"last{n}", program[n][1], f"setp.ne.u32 p, tid, 0; @p bra end{n}; {wait(f'end{n}', n)} end{n}:")
        for n in announcements(shared)
    )
    try:
        run_lanes(
            START.replace("{}", made) + body + last + "cp.async.bulk.wait_group 0;",
            {"a": np.zeros(64 * NUM_WARPS, np.uint32)}, {"d": "u4", "b": "u4"},
            registers=".reg .b32 tid, warp, cta, x, y; .reg .pred p, q; .reg .b64 from, to;",
            declarations=f".shared .align 128 .b8 buffer[1024]; .shared .align 8 .b8 bars[{8 * MOST_STEPS + 8}];",
            num_threads=32 * NUM_WARPS, grid=2, lazy_copies=lazy,
        )  # fmt: skip
    except RaceError as error:
        found = str(error)
    else:
        found = ""
    expected = any(has_race(of_cta(program, own), announcements(shared)) for own in (0, 1))
    event(f"race: {expected}")
    assert bool(found) == expected, found


def observes_only_its_own(program):
    """Whether nobody waits for what only the other CTA announces."""
    shared = [step for step, _ in program]
    for number, ((kind, word, _), cta) in enumerate(program):
        possible = [each for each in announcements(shared) if each < number]
        if kind == "observe" and possible and program[possible[word % len(possible)]][1] not in (None, cta):
            return False
    return True


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(steps, st.sampled_from([None, None, None, 0, 1])), max_size=MOST_STEPS).filter(
        observes_only_its_own
    ),
    st.booleans(),
)
def test_races_with_agents_are_reported_where_there_are_any_and_nowhere_else(program, lazy):
    check(program, lazy)
