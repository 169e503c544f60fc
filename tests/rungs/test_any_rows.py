"""decode/15, 16 and 17 on the emulator, under the race detector: rows of many sequences, over pages."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import catalog
from flashladder.common.compiler import build_one, translate
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

RUNGS = RUNG, *BY_WARPGROUPS = [catalog.find(f"decode/{number}") for number in ("15", "16", "17")]
ARCH = {"ampere": "sm_80", "hopper": "sm_90a"}
# A prompt, a sequence without rows, one without keys, a chunk, a token, one with more rows than keys: in blocks of 64.
ROWS, KEYS = (70, 0, 3, 33, 1, 9), (70, 40, 0, 200, 129, 4)
WRONG = ((0, 200, 300), (-64, 20, 60), (0, 50, 20), (2**31 - 1, -(2**31), 5), (60, 60, 60))
KINDS_OF_SCALES = ("tensor_scales", "page_scales")
OPTIONS = ("fp8_cache", *KINDS_OF_SCALES, "num_splits")
ALL = {"window_left": 60, "softcap": 20.0, "alibi": True, "sinks": True}


def problem(rows=ROWS, keys=KEYS, page_size=16, **values):
    """Few heads of few columns, of which two share one of K and V."""
    usual = {"num_heads": 4, "num_heads_k": 2, "head_dim": 64, "causal": True, "layout": "padded"}
    options = {"packed_q": True, "paged": page_size > 0, **({"page_size": page_size} if page_size else {})}
    options |= {name: values.pop(name) for name in OPTIONS if name in values}
    return Problem(operation="decode", seqlens_q=rows, seqlens_k=keys, options=options, **(usual | values))


def run(task, tensors, rung=RUNG, make=translate, race=True, arch="", **config):
    tensors.poison()
    arch = arch or ARCH[rung.instruction_set]
    on_emulator(make(rung, rung.config_for(task, **config), arch), task, tensors, race=race)
    return tensors


def emulated(task, tensors=None, rung=RUNG, make=translate, **config):
    """Requires a right output without a race; returns the tensors."""
    tensors = run(task, tensors or make_inputs(task), rung, make, **config)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(task.name)
    return tensors


by_warpgroups = pytest.mark.parametrize("rung", BY_WARPGROUPS, ids=lambda rung: rung.address)


@pytest.fixture(
    params=[RUNG, *(pytest.param(x, marks=pytest.mark.slow) for x in BY_WARPGROUPS)], ids=lambda rung: rung.address
)
def rung(request):
    return request.param


def test_rows_of_many_sequences():
    """NaN beyond lengths, in unused pages, in the guards and between padded rows are never seen."""
    tensors = emulated(problem(), make=build_one)
    begin = sum(ROWS[:2])
    assert not tensors.o[0, begin : begin + 3].any()
    assert (tensors.lse[0, :, begin : begin + 3] == -torch.inf).all()


@by_warpgroups
def test_the_same_by_warpgroups(rung):
    """A tile of two warpgroups, of which one has rows that see other blocks, or none."""
    emulated(problem(), rung=rung, make=build_one)


def far_scores(task):
    """Q and K whose scores grow towards the first keys, by more than 2^64: P of a later block is infinite at first."""
    tensors = make_inputs(task)
    tensors.q.fill_(4.0)
    for sequence, keys in enumerate(task.seqlens_k):
        for key in range(keys):
            page = tensors.block_table[sequence, key // 16].long()
            tensors.k_cache[page, key % 16] = 4.0 - key / 64
    return tensors


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.slow
def test_scores_that_a_lagging_maximum_loses(dtype):
    """They are computed once more, of K whose place is not free yet."""
    task = problem((70, 3), (400, 300), dtype=dtype, softmax_scale=1.0)
    emulated(task, far_scores(task), rung=BY_WARPGROUPS[-1])


PARTS = {
    "few rows": {},
    "all that rows see": ALL | {"window_left": 300},
    "fewer columns": {"head_dim": 96, "head_dim_v": 40},
    "8 bits": {"fp8_cache": True, "page_scales": True},
}


@pytest.mark.parametrize("kind", [pytest.param(x, marks=pytest.mark.slow if "columns" in x else []) for x in PARTS])
def test_long_keys_are_cut_into_parts(kind, rung):
    """Those of a token, of a draft, and of rows of two tiles; what each tile comes to is of all its parts."""
    task = problem((1, 3, 0, 33, 2), (700, 333, 50, 90, 0), **PARTS[kind])
    if rung.takes(task):
        emulated(task, rung=rung)


def test_tiles_with_fewer_blocks_than_parts(rung):
    """The first rows of a prompt, whose table has room for many keys."""
    tensors = emulated(problem((300,), (300,), num_heads=1, num_heads_k=1, seqlen_k=4096), rung=rung)
    whole = problem((300,), (300,), num_heads=1, num_heads_k=1, seqlen_k=4096, num_splits=1)
    assert not torch.equal(run(whole, make_inputs(whole), rung).o, tensors.o)


@pytest.mark.parametrize("keys", [600, 2600], ids=["few", "many"])
def test_parts_of_a_tile_full_of_rows(keys, rung):
    """A thread adds up several rows' parts at once, and comes again for more."""
    emulated(problem((30,), (keys,), num_heads=2, num_heads_k=1), rung=rung)


@pytest.mark.slow
def test_one_turn_of_long_parts_in_place_of_two_of_short_ones(monkeypatch):
    """On a GPU of 4 SMs: two parts of each head take no longer than four."""
    rung = BY_WARPGROUPS[0]
    monkeypatch.setattr(type(rung), "check_value", lambda *_: None)
    task = problem((1,), (1024,), num_heads=2, num_heads_k=2)
    of_two, of_four, as_usual = (emulated(task, rung=rung, wave=wave).o for wave in (4, 1, 132))
    assert torch.equal(of_four, as_usual)
    assert not torch.equal(of_two, of_four)


@pytest.mark.parametrize("kind", ["", pytest.param("tensor_scales", marks=pytest.mark.slow), "page_scales"])
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
def test_caches_in_8_bits(kind, arch):
    """Scales of heads, of the cache or of pages; a window, sinks and the rest with the last ones."""
    bounds = ALL if kind == "page_scales" else {}
    emulated(problem(fp8_cache=True, **bounds, **({kind: True} if kind else {})), arch=arch)


@pytest.mark.parametrize(("columns", "of_v"), [(96, 48), (128, 128), (192, 128), (256, 256)])
@pytest.mark.slow
def test_columns_in_8_bits(columns, of_v):
    sizes = {"head_dim": columns, "head_dim_v": of_v, "num_heads": 2, "num_heads_k": 1}
    emulated(problem((40, 3), (130, 20), fp8_cache=True, page_scales=True, **sizes), make=build_one, arch="sm_90a")


def test_scales_of_pages_that_a_row_does_not_see_are_nothing_to_it():
    """Its bits are those beside other keys, of which later rows see more."""
    task = problem((40,), (100,), fp8_cache=True, page_scales=True)
    expected, tensors = emulated(task), make_inputs(task)
    behind = tensors.block_table[0, 5].long()
    for scales in (tensors.k_descale, tensors.v_descale):
        scales[behind] *= 37
    run(task, tensors)
    rows = 80 - (100 - 40)  # whose last key is in the pages before
    assert torch.equal(tensors.o[:, :rows], expected.o[:, :rows])
    assert not torch.equal(tensors.o[:, rows:], expected.o[:, rows:])


@pytest.mark.parametrize("page_size", [0, 1, 24, 256])
def test_pages_of_any_size_and_none(page_size):
    emulated(problem(page_size=page_size))


def test_all_that_rows_see_together(rung):
    """A row that sees no key has the sink as its log-sum-exp."""
    tensors = emulated(problem(**ALL), rung=rung)
    begin = sum(ROWS[:2])
    blind = tensors.sinks[:, None].expand(4, 3)
    torch.testing.assert_close(tensors.lse[0, :, begin : begin + 3], blind, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.address)
@settings(max_examples=40)
@given(
    sequences=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 61, 64, 65, 130]),
            st.sampled_from([0, 1, 2, 15, 63, 64, 65, 129, 200, 333]),
        ),
        min_size=1,
        max_size=5,
    ),
    group=st.sampled_from([1, 2, 3, 8]),
    page_size=st.sampled_from([1, 7, 16, 64]),
    bounds=st.one_of(
        st.just({}),
        st.builds(
            lambda left, softcap: ALL | {"window_left": left, "softcap": softcap},
            st.sampled_from([0, 1, 31, 64, 500, 2**40]),
            st.sampled_from([1.0, 30.0]),
        ),
    ),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_any_sequences(rung, sequences, group, page_size, bounds, seed):
    rows, keys = zip(*sequences, strict=True)
    if rung in BY_WARPGROUPS:
        page_size = 8 if page_size < 16 else page_size  # it is compiled for a power of two
    emulated(problem(rows, keys, page_size, num_heads=group, num_heads_k=1, seed=seed, **bounds), rung=rung)


@pytest.mark.parametrize(
    ("columns", "dtype"), [(40, "bf16"), (80, "fp16"), (96, "bf16"), (128, "fp16"), (192, "bf16"), (256, "bf16")]
)
@pytest.mark.slow
@pytest.mark.in_turn
def test_columns_of_any_number(columns, dtype, rung):
    task = problem((40, 3), (130, 20), head_dim=columns, dtype=dtype, num_heads=2, num_heads_k=1)
    if rung.takes(task):
        emulated(task, rung=rung, make=build_one)


def test_fewer_columns_of_v(rung):
    emulated(problem((40, 3), (130, 20), head_dim=96, head_dim_v=40), rung=rung)


@pytest.mark.parametrize(
    "config",
    [{"block_m": 16, "block_n": 32}, {"block_m": 128, "block_n": 32, "num_stages": 3}, {"num_stages": 4}],
    ids=str,
)
@pytest.mark.slow
def test_tiles_of_any_size(config):
    emulated(problem((90, 1, 0, 17), (333, 80, 9, 40)), **config)


@pytest.mark.parametrize(
    "config", [{"block_m": 64, "block_n": 64, "num_stages": 3, "ctas_per_sm": 2}, {"block_m": 192}], ids=str
)
@pytest.mark.parametrize("page_size", [8, 32, 256])
@pytest.mark.slow
@by_warpgroups
@pytest.mark.in_turn
def test_tiles_of_warpgroups_and_boxes_of_any_size(rung, config, page_size):
    emulated(problem((90, 1, 0, 17), (533, 80, 9, 40), page_size), rung=rung, **config)


@pytest.mark.slow
def test_a_window_to_both_sides(rung):
    emulated(problem(causal=False, window_left=30, window_right=5), rung=rung)


@pytest.mark.parametrize("count", [33, 1030])
def test_more_sequences_than_a_warp_has_lanes(count):
    """A warp searches 32 numbers at a time: once, twice and three times."""
    some = {0: 5, 31: 1, 32: 70, count // 2: 3, count - 1: 2}
    rows = tuple(some.get(number, 0) for number in range(count))
    emulated(problem(rows, tuple(9 * n for n in rows), num_heads=1, num_heads_k=1))


def test_rows_behind_the_last_sequence_see_no_key(rung):
    """As where a server pads the rows of a CUDA graph; the host does not know how many they are."""
    task = problem((70, 30), (70, 200))
    for ends in ((0, 70, 90), (0, 0, 0), (0, 40, 40)):
        tensors = make_inputs(task)
        tensors.cu_seqlens_q.copy_(torch.tensor(ends))
        emulated(task, tensors, rung)
        assert not tensors.o[0, ends[-1] :].any()
        assert (tensors.lse[0, :, ends[-1] :] == -torch.inf).all()


@pytest.mark.parametrize("starts", WRONG)
def test_within_the_tensors_whatever_the_starts_say(starts, rung):
    """The emulator fails at a read outside, the canaries tell of a write. Sequences that overlap are stored twice."""
    task = problem((30, 30), (20, 40))
    tensors = make_inputs(task)
    tensors.cu_seqlens_q.copy_(torch.tensor(starts))
    run(task, tensors, rung, race=False)
    assert [buffer.damage() for buffer in tensors.buffers] == [None] * len(tensors.buffers)


def test_within_the_cache_whatever_lengths_and_tables_say(rung):
    task = problem((30, 30), (20, 40))
    tensors = make_inputs(task)
    tensors.block_table.copy_(torch.tensor([[-1, 2**31 - 1, -7], [10**6, 0, -(2**31)]]))
    tensors.cache_seqlens.copy_(torch.tensor([2**31 - 1, -5]))
    run(task, tensors, rung)
    assert [buffer.damage() for buffer in tensors.buffers] == [None] * len(tensors.buffers)
    assert not tensors.o[0, 30:].any()


def test_entries_behind_the_keys_are_never_read(rung):
    """Nor those of pages before the window."""
    task = problem((3, 30), (20, 200), window_left=20)
    expected, tensors = emulated(task, rung=rung), make_inputs(task)
    tensors.block_table[0, 2:] = 10**6
    tensors.block_table[1, : (200 - 30 - 20) // 16] = -(2**31)
    for name, output in run(task, tensors, rung).outputs.items():
        assert torch.equal(output, expected.outputs[name])


@pytest.mark.parametrize("bounds", [{}, ALL], ids=["plain", "all"])
def test_bits_do_not_depend_on_the_rest_of_the_batch(bounds, rung):
    """Nor on the place among its rows, where no keys are cut."""
    bounds = {**bounds, "alibi": False, "num_splits": 1}
    task, alone = (problem(*lengths, **bounds) for lengths in (((17, 50, 1), (130, 200, 77)), ((50,), (200,))))
    others, tensors = make_inputs(task), make_inputs(alone)
    for name in ("q", *(("sinks",) if bounds.get("sinks") else ())):
        source, rows = others.by_name[name], slice(17, 67) if name == "q" else slice(None)
        tensors.by_name[name].copy_(source[:, rows] if name == "q" else source)
    for name in ("k_cache", "v_cache"):
        pages, own = (x.block_table[n, :13].long() for x, n in ((others, 1), (tensors, 0)))
        tensors.by_name[name][own] = others.by_name[name][pages]
    emulated(alone, tensors, rung)
    emulated(task, others, rung)
    assert torch.equal(others.o[:, 17:67], tensors.o)
    assert torch.equal(others.lse[..., 17:67], tensors.lse)


def test_what_a_window_hides_is_not_read(rung):
    """Not even of the block in which it begins: what is there may be NaN."""
    task = problem((40,), (400,), page_size=0, window_left=30)
    expected, tensors = emulated(task, rung=rung), make_inputs(task)
    for cache in (tensors.k_cache, tensors.v_cache):
        cache[:, : 400 - 40 - 30] = torch.nan
    assert torch.equal(run(task, tensors, rung).o, expected.o)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": (3, -1), "keys": (5, 5)}, "seqlens_q=.*: no sequence is shorter than 0"),
        ({"rows": (3, 1), "keys": (5,)}, "seqlens_q are 2, seqlens_k 1 lengths"),
        ({"options": {}}, "sequences with rows of their own are packed_q=true"),
        ({"head_dim": 20}, "head_dim"),
        ({"head_dim": 40, "options": {"packed_q": True, "fp8_cache": True}}, "are multiples of 16 bytes"),
    ],
)
def test_what_is_no_problem_is_refused(values, message):
    options = {"packed_q": True} if "options" not in values else values.pop("options")
    rows, keys = values.pop("rows", (3,)), values.pop("keys", (5,))
    with pytest.raises(UnsupportedProblemError, match=message):
        RUNG.config_for(Problem(operation="decode", seqlens_q=rows, seqlens_k=keys, options=options, **values))


def test_the_work_of_a_problem_is_that_of_its_sequences():
    task = problem()
    alone = [problem((rows,), (keys,)) for rows, keys in zip(ROWS, KEYS, strict=True) if rows and keys]
    assert task.flops == sum(each.flops for each in alone)
    starts = make_inputs(task).cu_seqlens_q.tolist()
    assert [b - a for a, b in itertools.pairwise(starts)] == list(ROWS)
    assert (task.batch, task.seqlen_q, task.tensors["lse"].shape) == (6, 116, (1, 4, 116))
