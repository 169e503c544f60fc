"""The race detector against the definition: random programs, and every pair of conflicting accesses looked at."""

from hypothesis import event, given, settings
from hypothesis import strategies as st
from lanes import run_lanes

from flashladder.common.emulator.errors import RaceError

NUM_WARPS = 3
THREADS = [0, 1, 2, 33, 34, 70]
LANE_MASKS = [0b011, 0b110]
ALL = frozenset(range(32 * NUM_WARPS))


def lanes_of(warp):
    return frozenset(range(32 * warp, 32 * warp + 32))


words, threads, warps = st.integers(0, 1), st.sampled_from(THREADS), st.integers(0, NUM_WARPS - 1)
steps = st.one_of(
    st.tuples(st.just("load"), words, threads),
    st.tuples(st.just("store"), words, threads),
    st.tuples(st.just("add"), words, threads),
    st.tuples(st.just("load_by_warp"), words, warps),
    st.tuples(st.just("matrix"), words, warps),
    st.tuples(st.just("barrier"), st.just(0), st.just(0)),
    st.tuples(st.just("sync_warp"), st.just(0), warps),
    st.tuples(st.just("sync_lanes"), st.integers(0, 1), warps),  # those of a LANE_MASK
    st.tuples(st.just("sync_halves"), st.just(0), warps),  # in one instruction, lanes 0-15 and 16-31 apart
    st.tuples(st.just("pair"), st.just(0), warps),  # all warps but this one
)


def code_of(number, step):
    """PTX of one step; 64 bytes from word to word."""
    kind, word, who = step
    place = f"[buffer+{128 * word}]"
    by_thread, by_warp = f"setp.eq.u32 p, tid, {who};", f"setp.eq.u32 p, warp, {who};"
    by_lanes = (
        f"{by_warp} and.b32 y, tid, 31; shr.u32 y, {LANE_MASKS[word]}, y; and.b32 y, y, 1; setp.ne.and.u32 p, y, 0, p;"
    )
    return {
        "load": f"{by_thread} @p ld.shared.b32 x, {place};",
        "store": f"{by_thread} @p st.shared.b32 {place}, tid;",
        "add": f"{by_thread} @p red.shared.add.u32 {place}, 1;",
        "load_by_warp": f"{by_warp} @p ld.shared.b32 x, {place};",
        "matrix": f"{by_warp} @!p bra skip{number}; mov.u32 y, buffer; add.u32 y, y, {128 * word};"
        f"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{x}}, [y]; skip{number}:",
        "barrier": "bar.sync 0;",
        "sync_warp": f"{by_warp} @p bar.warp.sync -1;",
        "sync_lanes": f"{by_lanes} @p bar.warp.sync {LANE_MASKS[word]};",
        "sync_halves": f"and.b32 y, tid, 16; mov.u32 x, 0xffff; shl.b32 y, x, y; {by_warp} @p bar.warp.sync y;",
        "pair": f"{by_warp} @!p bar.sync {1 + who}, 64;",
    }[kind]


# The groups of threads that see each other's accesses afterwards.
SYNCHRONISES = {
    "barrier": lambda word, who: [ALL],
    "pair": lambda word, who: [ALL - lanes_of(who)],
    "sync_warp": lambda word, who: [lanes_of(who)],
    "sync_lanes": lambda word, who: [{32 * who + lane for lane in range(32) if LANE_MASKS[word] >> lane & 1}],
    "sync_halves": lambda word, who: [set(range(first, first + 16)) for first in (32 * who, 32 * who + 16)],
}


def has_race(program):
    """Whether two accesses to one word by different threads, not both reads nor both atomic, are unordered.

    Order is each thread's own and what barriers give; it is what each thread knows of the accesses so far. An ldmatrix
    is complete for all its warp when any lane of it goes on.
    """
    known = {thread: set() for thread in ALL}
    accesses = []  # (word, kind, threads)
    for kind, word, who in program:
        if kind in SYNCHRONISES:
            for members in SYNCHRONISES[kind](word, who):
                together = set().union(*(known[thread] for thread in members))
                for thread in members:
                    known[thread] = set(together)
            continue
        members = lanes_of(who) if kind in ("load_by_warp", "matrix") else frozenset([who])
        group = {"load_by_warp": "load", "matrix": "load"}.get(kind, kind)
        for index, (other_word, other, other_members) in enumerate(accesses):
            conflict = other_word == word and not (group == other and group in ("load", "add"))
            if conflict and any((index, before) not in known[now] for before in other_members for now in members):
                return True
        for thread in members:
            seen = members if kind == "matrix" else [thread]
            known[thread] |= {(len(accesses), one) for one in seen}
        accesses.append((word, group, members))
    return False


def in_one_cta(number, cta, code):
    return f"setp.ne.u32 p, cta, {cta}; @p bra other{number}; {code} other{number}:" if cta is not None else code


START = """
    mov.u32 tid, %tid.x; shr.u32 warp, tid, 5; mov.u32 cta, %ctaid.x;
    mov.u32 y, buffer; mad.lo.u32 y, tid, 4, y; st.shared.b32 [y], 0; bar.sync 0; mov.u32 d, 0;
"""


def check(program):
    """Runs steps of both CTAs, or of one alone, and compares the detector's verdict with the definition's."""
    body = "".join(in_one_cta(number, cta, code_of(number, step)) for number, (step, cta) in enumerate(program))
    try:
        run_lanes(
            START + body, {}, {"d": "u4"}, registers=".reg .b32 tid, warp, cta, x, y; .reg .pred p;",
            declarations=".shared .align 16 .b8 buffer[1024];", num_threads=32 * NUM_WARPS, grid=2,
        )  # fmt: skip
    except RaceError:
        found = True
    else:
        found = False
    expected = any(has_race([step for step, cta in program if cta in (None, own)]) for own in (0, 1))
    event(f"race: {expected}")
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(steps, st.sampled_from([None, None, 0, 1])), max_size=10))
def test_races_are_reported_where_there_are_any_and_nowhere_else(program):
    check(program)


lanes = st.sampled_from([0, 1, 2, 17])
steps_of_lanes = st.one_of(
    st.tuples(st.sampled_from(["load", "store", "store", "add"]), st.just(0), lanes),
    st.tuples(st.sampled_from(["load_by_warp", "matrix", "sync_warp", "sync_halves"]), st.just(0), st.just(0)),
    st.tuples(st.just("sync_lanes"), st.integers(0, 1), st.just(0)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(steps_of_lanes, st.sampled_from([None, None, 0, 1])), min_size=2, max_size=7))
def test_races_among_the_lanes_of_a_warp(program):
    check(program)
