"""Races in global memory against the definition: random programs of three CTAs, and every pair of conflicting accesses
looked at. Words are accessed weakly, flags strongly; steps are executed in the order of the program."""

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from flashladder.common import emulator
from flashladder.common.emulator.errors import RaceError

NUM_CTAS, LANES = 3, (0, 1)
ALL = [(cta, lane) for cta in range(NUM_CTAS) for lane in LANES]

ACCESSES = ["load", "store", "store"]
WRITES = ["relaxed_store", "release_store", "relaxed_add", "acq_rel_add", "release_red", "relaxed_red"]
READS = ["relaxed_load", "acquire_load", "relaxed_add", "acq_rel_add"]
who, words = st.sampled_from(ALL), st.integers(0, 1)
steps = st.one_of(
    st.tuples(st.sampled_from(ACCESSES), words, who),
    st.tuples(st.sampled_from(WRITES + READS), words, who),
    st.tuples(st.sampled_from(["fence", "fence", "narrow_fence"]), st.just(0), who),
    st.tuples(st.just("sync_warp"), st.just(0), who),
)


@st.composite
def handovers(draw):
    """What a thread does to a word, told to another one through a flag, with or without what it takes."""
    word, flag, one, other = draw(words), draw(words), draw(who), draw(who)
    beside = [draw(st.sampled_from([thread, (thread[0], 1 - thread[1])])) for thread in (one, other)]
    maybe = st.lists(st.sampled_from(["fence", "sync_warp"]), max_size=3)
    return [
        (draw(st.sampled_from(ACCESSES)), word, beside[0]),
        *((kind, 0, draw(st.sampled_from([one, beside[0]]))) for kind in draw(maybe)),
        (draw(st.sampled_from(WRITES)), flag, one),
        (draw(st.sampled_from(READS)), flag, other),
        *((kind, 0, draw(st.sampled_from([other, beside[1]]))) for kind in draw(maybe)),
        (draw(st.sampled_from(ACCESSES)), word, beside[1]),
    ]


programs = st.lists(st.one_of(steps.map(lambda step: [step]), handovers()), min_size=1, max_size=6).map(
    lambda parts: [step for part in parts for step in part]
)

CODE = {
    "load": "ld.global.u32 x, [data+{}];",
    "store": "st.global.u32 [data+{}], x;",
    "relaxed_store": "st.relaxed.gpu.global.u32 [flag+{}], x;",
    "release_store": "st.release.gpu.global.u32 [flag+{}], x;",
    "relaxed_load": "ld.relaxed.gpu.global.u32 x, [flag+{}];",
    "acquire_load": "ld.acquire.sys.global.u32 x, [flag+{}];",
    "relaxed_add": "atom.global.add.u32 x, [flag+{}], 1;",
    "acq_rel_add": "atom.acq_rel.gpu.global.add.u32 x, [flag+{}], 1;",
    "release_red": "red.release.gpu.global.add.u32 [flag+{}], 1;",
    "relaxed_red": "red.relaxed.gpu.global.add.u32 [flag+{}], 1;",
    "fence": "fence.acq_rel.gpu;",
    "narrow_fence": "fence.acq_rel.cta;",
}


def code_of(number, step):
    """PTX of one step."""
    kind, word, (cta, lane) = step
    if kind == "sync_warp":
        return f"setp.ne.u32 p, cta, {cta}; @p bra skip{number}; bar.warp.sync -1; skip{number}:"
    chosen = f"setp.ne.u32 p, cta, {cta}; setp.ne.or.u32 p, tid, {lane}, p; @p bra skip{number};"
    return f"{chosen} {CODE[kind].format(4 * word)} skip{number}:"


def has_race(program):
    """Whether two accesses of different CTAs to one word, not both reads, are unordered.

    What a thread knows of is a set: accesses; ("published", access) where a fence lies behind it; and ("seen", access)
    of what a strong load brought, to be known of after a fence. A flag holds what its last writer published, and an
    atomic operation adds to that.
    """
    known = {thread: set() for thread in ALL}
    accesses, flags = [], [set(), set()]
    for number, (kind, word, who) in enumerate(program):
        mine = known[who]
        if kind == "sync_warp":
            together = set().union(*(known[who[0], lane] for lane in LANES))
            for lane in LANES:
                known[who[0], lane] = set(together)
        elif kind == "fence":
            mine |= {each[1] for each in mine if isinstance(each, tuple) and each[0] == "seen"}
            mine |= {("published", each) for each in mine if isinstance(each, int)}
        elif kind in ("load", "store"):
            for before, (other_kind, other_word, other) in accesses:
                conflict = other_word == word and other[0] != who[0] and "store" in (kind, other_kind)
                if conflict and before not in mine:
                    return True
            accesses.append((number, (kind, word, who)))
            mine.add(number)
        elif kind != "narrow_fence":
            how, operation = kind.rsplit("_", 1)
            brought = flags[word]
            if operation in ("load", "add"):
                mine |= {each if how.startswith("acq") else ("seen", each) for each in brought}
            if operation != "load":
                is_released = how in ("release", "acq_rel")
                wanted = (each for each in mine if isinstance(each, int))
                told = {each for each in wanted if is_released or ("published", each) in mine}
                flags[word] = told | (set() if operation == "store" else brought)
    return False


HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 pointer_data, .param .u64 pointer_flag)
{
    .reg .b32 x, tid, cta; .reg .b64 data, flag; .reg .pred p;
    ld.param.u64 data, [pointer_data]; ld.param.u64 flag, [pointer_flag];
    mov.u32 tid, %tid.x; mov.u32 cta, %ctaid.x; mov.u32 x, 0;
"""


def check(program, chunk):
    """Runs a program, and compares the detector's verdict with the definition's."""
    body = "".join(code_of(number, step) for number, step in enumerate(program))
    memory = emulator.GlobalMemory()
    pointers = [memory.add(name, np.zeros(2, np.uint32)) for name in ("data", "flag")]
    params = np.array(pointers, np.uint64).tobytes()
    try:
        emulator.run(HEAD + body + "ret; }", params, (NUM_CTAS, 1, 1), 32, 0, memory, entry="kernel", chunk=chunk)
    except RaceError as error:
        found = str(error)
    else:
        found = ""
    in_order = program if chunk >= NUM_CTAS else sorted(program, key=lambda step: step[2][0] // chunk)
    expected = has_race(in_order)
    event(f"race: {expected}")
    assert bool(found) == expected, found


@settings(max_examples=120, deadline=None)
@given(programs, st.sampled_from([NUM_CTAS, 1]))
def test_races_between_ctas_are_reported_where_there_are_any_and_nowhere_else(program, chunk):
    check(program, chunk)
