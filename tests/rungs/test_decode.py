"""The ladder for decode on the emulator, under the race detector: lengths, packed rows, pages, splits."""

import dataclasses
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import catalog, own
from flashladder.common.compiler import build_one, translate
from flashladder.common.errors import EmulatorError, UnsupportedProblemError
from flashladder.common.paths import VERSIONS
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem, operation_named
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.rung_table import mostly_slow

NAME = "decode"
RUNGS = [rung for rung in catalog.versions(ladder=NAME) if not {"fp8_cache", "packed_q"} & rung.choices.keys()]
LAST, HOPPERS, FIRST_PAGED, GENERAL = (catalog.find(f"decode/{number}") for number in ("06", "07", "04", "10"))
BY_TMA = [rung for rung in RUNGS if "page_size" in rung.choices]
ARCH = {"ampere": "sm_80", "hopper": "sm_90a"}
LENGTHS = (0, 1, 40, 130)
PAGED = {"paged": True, "page_size": 16}


def problem(lengths=LENGTHS, options=(), **values):
    """Few heads of few columns, of which two share one of K and V; two rows a sequence."""
    usual = {"num_heads": 4, "num_heads_k": 2, "head_dim": 64, "seqlen_q": 2, "causal": True, "seqlens_k": lengths}
    return Problem(operation=NAME, options=options, **(usual | values))


def compiled(version, task, make=translate):
    return make(version, version.config_for(task), ARCH[version.instruction_set])


def emulated(version, task, tensors=None, make=translate, **options):
    """Requires a right output without a race; returns the tensors."""
    tensors = tensors or make_inputs(task)
    on_emulator(compiled(version, task, make), task, tensors, **options)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(version.name)
    return tensors


def cut_into(version, splits):
    """The option, for rungs that take it."""
    return {"num_splits": splits} if "num_splits" in version.supports.options else {}


def of_sequence(tensors, number):
    return {name: output[number].clone() for name, output in tensors.outputs.items()}


@pytest.fixture(params=RUNGS, ids=lambda version: version.name)
def version(request):
    return request.param


def mixed(**options):
    """More sequences than a warp has lanes, of lengths far apart."""
    return problem((3, 600, *[0, 1, 70] * 11), options, seqlen_q=1, num_heads=2, num_heads_k=1)


def able(option):
    """The rungs that take an option of the operation."""
    return [pytest.param(rung, id=rung.name) for rung in RUNGS if option in rung.supports.options]


# Rungs


@pytest.mark.parametrize("version", mostly_slow(RUNGS))
def test_any_lengths(version):
    """NaN beyond each length, in the guards and between padded rows are never seen."""
    tensors = emulated(version, problem(layout="padded"), make=build_one)
    assert (tensors.o[0] == 0).all()
    assert (tensors.lse[0] == -torch.inf).all()


@pytest.mark.slow
def test_rows_of_a_long_group(version):
    """More than a tile has, from other inputs."""
    emulated(version, problem((37,), num_heads=8, num_heads_k=1, seqlen_q=3, seqlen_k=50, family="jump_rows"))


@pytest.mark.parametrize(
    ("version", "columns"),
    [
        pytest.param(rung, columns, id=f"{rung.name}-{columns}")
        for rung in RUNGS
        for columns in rung.supports.head_dim
        if columns not in (64, 128)
    ],
)
@pytest.mark.slow
def test_other_columns(version, columns):
    """Some of the last 64 may not be there."""
    emulated(version, problem((0, 150), cut_into(version, 2), head_dim=columns, layout="padded"))


@pytest.mark.parametrize("version", able("num_splits"))
@pytest.mark.slow
def test_splits(version):
    """Of more blocks than a ring has stages."""
    emulated(version, problem((1, 900), {"num_splits": 3}))


@pytest.mark.slow
def test_more_splits_than_there_are_keys_for():
    emulated(LAST, problem((1, 130), {"num_splits": 130}))


def test_more_splits_than_a_warp_has_lanes():
    """Each lane that combines them has several."""
    sizes = {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 1}
    emulated(catalog.find("decode/06"), problem((1, 40 * 64), {"num_splits": 40}, **sizes))


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.slow
def test_many_sequences_of_different_lengths(splits):
    emulated(LAST, mixed(num_splits=splits))


@pytest.mark.parametrize("page_size", [1, 24])
@pytest.mark.parametrize("version", [FIRST_PAGED, LAST], ids=lambda version: version.name)
def test_pages_in_random_order(version, page_size):
    emulated(version, problem(options={"paged": True, "page_size": page_size, **cut_into(version, 2)}))


@pytest.mark.parametrize("page_size", [8, 128])
@pytest.mark.parametrize("version", BY_TMA, ids=lambda version: version.name)
@pytest.mark.slow
def test_boxes_of_pages(version, page_size):
    """Behind the last key, a box has NaN."""
    options = {"paged": True, "page_size": page_size, **cut_into(version, 1)}
    emulated(version, problem((300, 0, 7), options, layout="padded"))


def test_pages_that_are_no_boxes_are_left_to_another_rung():
    task = problem(options={"paged": True, "page_size": 24})
    for version in BY_TMA:
        with pytest.raises(UnsupportedProblemError, match=r"not 24; the nearest rung .* is decode/13"):
            version.check(task, version.config_for(problem()))


@pytest.mark.parametrize(("rung", "bounds"), [(LAST, {}), (GENERAL, {"window_left": 30})], ids=["plain", "window"])
def test_bits_do_not_depend_on_the_rest_of_the_batch(rung, bounds):
    """Nor on the place in it, with so many splits."""
    task, alone = (problem(lengths, {"num_splits": 3}, **bounds) for lengths in ((130, 7, 40), (40,)))
    tensors, others = make_inputs(alone), make_inputs(task)
    for name in ("q", "k_cache", "v_cache"):
        rows = tensors.by_name[name][0]
        others.by_name[name][2, : len(rows)] = rows
    expected, found = of_sequence(emulated(rung, alone, tensors), 0), of_sequence(emulated(rung, task, others), 2)
    assert all(torch.equal(found[name], bits) for name, bits in expected.items())


@pytest.mark.slow
def test_bits_do_not_depend_on_who_is_late():
    task = problem((130,), {"num_splits": 3})
    on_time, late = (of_sequence(emulated(LAST, task, lagging=warps), 0) for warps in ((), (0,)))
    assert all(torch.equal(late[name], bits) for name, bits in on_time.items())


@pytest.mark.parametrize(("rung", "bounds"), [(LAST, {}), (GENERAL, {"window_left": 500})], ids=["plain", "window"])
def test_a_table_that_points_outside_reads_nothing_there(rung, bounds):
    task = problem(options=PAGED, **bounds)
    tensors = make_inputs(task)
    tensors.block_table[2:] = torch.tensor([[-1, 2**31 - 1, 10**6] + [-7] * (tensors.block_table.shape[1] - 3)] * 2)
    on_emulator(compiled(rung, task), task, tensors)
    assert (tensors.lse[0] == -torch.inf).all()


@pytest.mark.parametrize("length", [-5, 2**30])
def test_a_length_that_is_none_reads_nothing_outside(length):
    """It counts as the next one that is."""
    task = problem((40, 40))
    tensors, right = make_inputs(task), make_inputs(task)
    tensors.cache_seqlens[1], right.cache_seqlens[1] = length, max(0, min(length, 40))
    on_emulator(compiled(LAST, task), task, tensors)
    verify(expect(task, right), tensors.outputs, tensors.buffers).require(LAST.name)


# Sinks

SINKING = [pytest.param(rung, id=rung.name) for rung in RUNGS if rung.supports.sinks]


@pytest.mark.parametrize("rung", SINKING)
def test_a_sink_counts_once(rung):
    """However many parts there are, one or five; a row without keys has it alone."""
    task = problem((0, 40, 300), sinks=True)
    tensors = make_inputs(task)
    tensors.sinks.copy_(torch.tensor([9.0, -2.0, 1e30, 0.0]))
    emulated(rung, task, tensors)
    assert (tensors.o[0] == 0).all()
    assert torch.equal(tensors.lse[0], tensors.sinks[:, None].expand(-1, 2))
    assert (tensors.o[:, :, 2].abs() < 1e-35).all()


@pytest.mark.parametrize("rung", [LAST, HOPPERS], ids=lambda rung: rung.name)
def test_a_sink_of_minus_infinity_is_none(rung):
    task = problem((0, 40, 300), sinks=True)
    tensors = make_inputs(task)
    tensors.sinks.fill_(-torch.inf)
    emulated(rung, task, tensors)
    assert (tensors.lse[0] == -torch.inf).all()


# What rows see

BOUNDS = {  # each kind is compiled once
    "a window": {"window_left": 40, "window_right": 3, "causal": False},
    "a causal window in pages": {"window_left": 0, "options": PAGED},
    "padding": {"options": {"leftpad": True, "num_splits": 3}},
    "a softcap": {"softcap": 5.0, "softmax_scale": 1.0},
    "ALiBi": {"alibi": True, "causal": False},
    "all": {"window_left": 60, "softcap": 20.0, "alibi": True, "options": {**PAGED, "leftpad": True}},
}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.slow
def test_bounds(kind):
    """NaN beyond lengths, in padding and in unused pages are never seen."""
    tensors = emulated(GENERAL, problem(**BOUNDS[kind], layout="padded"))
    assert (tensors.o[0] == 0).all()
    assert (tensors.lse[0] == -torch.inf).all()


@settings(max_examples=50)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 63, 64, 65, 200, 333]), min_size=1, max_size=3),
    rows=st.integers(1, 20),
    left=st.sampled_from([0, 1, 31, 64, 500, 2**40]),
    softcap=st.sampled_from([1.0, 30.0]),
    page_size=st.sampled_from([1, 7, 64]),
    splits=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_any_bounds_together(lengths, rows, left, softcap, page_size, splits, seed):
    options = {"paged": True, "page_size": page_size, "leftpad": True, "num_splits": splits}
    bounds = {"window_left": left, "softcap": softcap, "alibi": True}
    emulated(GENERAL, problem(tuple(lengths), options, seqlen_q=rows, seed=seed, **bounds))


def test_what_a_window_hides_is_not_read():
    """Of one row: neither K nor V."""
    task = problem((200,), seqlen_q=1, window_left=70)
    tensors = make_inputs(task)
    for cache in (tensors.k_cache, tensors.v_cache):
        cache[:, : 200 - 71] = torch.nan
    on_emulator(compiled(GENERAL, task), task, tensors)
    assert tensors.o.isfinite().all()
    whole, part = (on_emulator(compiled(GENERAL, each), each, make_inputs(each)) for each in (wide(3000), wide(70)))
    assert part.mma_flops * 20 < whole.mma_flops


def wide(window):
    """Of one tile of rows, so that all work is that of keys."""
    return problem((3000,), {"num_splits": 4}, seqlen_q=1, window_left=window)


def test_rows_of_a_draft_tree():
    """Of as many rows as a mask has bits, also where a sequence has fewer keys, and with what else bounds them."""
    for lengths, rows, more in (((0, 3, 40, 300), 32, {}), ((5, 70), 7, {"window_left": 20, "softcap": 9.0})):
        task = problem(lengths, {**PAGED, "tree": True, "num_splits": 3}, seqlen_q=rows, **more)
        tensors = make_inputs(task)
        assert (tensors.tree_mask & 1 == 0).any(), "branches that do not begin with the first row"
        emulated(GENERAL, task, tensors)


def test_a_tree_of_one_branch_is_a_causal_mask():
    task, plain = (problem((40, 5), {"tree": tree}, seqlen_q=6, window_left=30) for tree in (True, False))
    tensors, expected = make_inputs(task), make_inputs(plain)
    tensors.tree_mask.copy_((2 << torch.arange(6)) - 1)
    for name in ("q", "k_cache", "v_cache"):
        tensors.by_name[name].copy_(expected.by_name[name])
    found, wanted = emulated(GENERAL, task, tensors), emulated(GENERAL, plain, expected)
    assert all(torch.equal(found.by_name[name], output) for name, output in wanted.outputs.items())


@pytest.mark.parametrize("padding", [-5, 2**31 - 1])
def test_padding_that_is_none_reads_nothing_outside(padding):
    task = problem((40, 40), {**PAGED, "leftpad": True})
    tensors = make_inputs(task)
    tensors.cache_leftpad.fill_(padding)
    on_emulator(compiled(GENERAL, task), task, tensors)
    assert (tensors.lse == -torch.inf).all() == (padding > 0)


def test_slopes_of_any_size_and_sign():
    task = problem((300,), alibi=True)
    tensors = make_inputs(task)
    tensors.alibi_slopes.copy_(torch.tensor([[-0.3, 0.0, 4.0, 1e-3]]))
    emulated(GENERAL, task, tensors)


# What the emulator finds


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Makes a rung with a part of it, or of a header of the ladder, replaced."""

    def make(rung, file, old, new):
        folder = tmp_path / "mutants"
        shutil.copytree(VERSIONS / NAME / "cuda", folder / "cuda")
        shutil.copytree(rung.directory, folder / "00_mutant")
        path = folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        yaml = folder / "00_mutant" / "version.yaml"
        yaml.write_text(f"operation: {NAME}\n{yaml.read_text()}")
        shutil.copy(VERSIONS / NAME / "fields.yaml", folder)
        monkeypatch.setenv(own.VARIABLE, str(folder))
        return catalog.find("mutants/00")

    return make


@pytest.mark.parametrize(
    ("rung", "file", "old", "message"),
    [
        (LAST, "cuda/arrivals.cuh", "__threadfence();  // before others", "race on global memory: .*partial_lse"),
        (LAST, "cuda/arrivals.cuh", "__threadfence();  // behind", "race on global memory: .*partial_lse"),
        (HOPPERS, "00_mutant/kernel.cu", "wait_for_dependency();", "attention_decode, before which combine may begin"),
        (BY_TMA[0], "cuda/page_ring.cuh", "empty[at.stage].wait(at.parity);", "more arrivals at once"),
        (BY_TMA[0], "00_mutant/kernel.cu", "fence_proxy_async();  // this lane", "read in another proxy"),
        (BY_TMA[1], "00_mutant/kernel.cu", "fence_proxy_async();  // before wgmma reads Q", "fence.proxy.async"),
        (BY_TMA[1], "00_mutant/kernel.cu", "fence_proxy_async();  // before wgmma reads P", "fence.proxy.async"),
        (BY_TMA[1], "cuda/column_softmax.cuh", "named_barrier_sync(1, warpgroup_threads);", "race on shared memory"),
    ],
)
@pytest.mark.slow
def test_a_fault_is_found(broken, rung, file, old, message):
    with pytest.raises(EmulatorError, match=f"(?s){message}"):
        emulated(broken(rung, file, old, old.partition(";")[2]), problem((1, 900), {"num_splits": 3}))


# The operation


def test_a_problem_says_how_large_it_is():
    task = problem((3, 5), seqlen_q=1, causal=False, options=PAGED)
    assert (task.batch, task.seqlen_k) == (2, 5)
    assert task.asked.bytes_moved(task) == 2 * 8 * 2 * (64 + 64)
    assert task.flops == 4 * 8 * 4 * 64
    assert make_inputs(task).k_cache.shape == (2 + 3, 16, 2, 64)
    assert make_inputs(task).block_table.shape == (2, 1)


def test_few_sequences_are_cut_into_more_parts():
    kind = operation_named(NAME)
    usual = [Problem(operation=NAME, **{**kind.usual, "batch": batch}) for batch in (1, 4, 16, 64)]
    splits = [kind.argument(each, "num_splits") for each in usual]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] * usual[0].num_heads_k == 128, "a CTA an SM, nearly"
    assert splits[-1] == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lengths": (3, -1)}, "no sequence is shorter than 0"),
        ({"seqlen_k": 100}, "the cache has room for seqlen_k=100 keys"),
        ({"seqlen_k": 131, "options": {"new_keys": True, "seqlen_new": 2}}, "and 2 new keys: the cache has room for"),
        ({"options": {"rotary": True}}, "rotary=true takes new_keys=true: keys in the cache are turned already"),
        ({"options": {"new_keys": True, "rotary": True, "rotary_dim": 66}}, "rotary_dim=66: pairs of columns turn, of"),
        ({"options": {"paged": True, "num_pages": 2}}, "the sequences need 5 pages of page_size=64"),
        ({"total_q": 3}, "the operation decode knows no total_q"),
        ({"options": {"tree": True}, "seqlen_q": 33}, "tree=true takes causal=true, up to 32 rows and no rotary"),
        ({"options": {"page_scales": True}}, "page_scales=true takes fp8_cache=true: other caches have no scales"),
        ({"options": {"page_scales": True, "fp8_cache": True}}, "page_scales=true takes paged=true, and"),
    ],
)
def test_what_is_no_problem_is_refused(values, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        problem(**values)


def test_a_cache_of_another_length_is_drawn_with_nan():
    tensors = make_inputs(dataclasses.replace(problem(), seqlen_k=200))
    assert tensors.k_cache[2, 40:].isnan().all()
    assert not tensors.k_cache[2, :40].isnan().any()
