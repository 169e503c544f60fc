"""Decode with new keys on the emulator, under the race detector: what is written to the cache, and what is not."""

import pytest
import torch
from test_decode import LENGTHS, PAGED, broken, compiled, emulated, of_sequence, problem  # noqa: F401 - a fixture

from flashladder.common import catalog
from flashladder.common.errors import EmulatorError
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.rotary import Rotary
from flashladder.common.runtime.execute import on_emulator

APPENDS = catalog.find("decode/12")
ROTARY = {"rotary": True, "rotary_dim": 20}
GROWTHS = {  # each kind is compiled once
    "keys": {"layout": "padded"},
    "turned, in pages": {"options": {**PAGED, **ROTARY, "leftpad": True, "rotary_positions": 200}, "layout": "padded"},
    "a tree, sinks": {"options": {"tree": True}, "seqlen_q": 5, "sinks": True},
    "turned, interleaved": {"options": {"rotary": True, "rotary_interleaved": True, "num_splits": 2}, "causal": False},
}


def growing(seqlen_new=3, lengths=LENGTHS, options=(), **values):
    return problem(lengths, {"new_keys": True, "seqlen_new": seqlen_new, **dict(options)}, **values)


def grown(task, tensors, old):
    """The caches as they should be behind a run: `old` ones, and new keys where a table says."""
    new = [tensors.k_new, tensors.v_new]
    places = tensors.cache_seqlens.long()[:, None] + torch.arange(task.seqlen_new)
    if task.rotary:
        tables = tensors.rotary_cos, tensors.rotary_sin
        new[0] = Rotary(*tables, task.rotary_interleaved).turned(tensors.k_new, places)
    for cache, keys in zip(old, new, strict=True):
        for sequence, row in torch.cartesian_prod(torch.arange(task.batch), torch.arange(task.seqlen_new)).tolist():
            page, at = sequence, int(places[sequence, row])
            if task.paged:
                page, at = int(tensors.block_table[sequence, at // task.page_size]), at % task.page_size
            cache[page, at] = keys[sequence, row]
    return old


@pytest.mark.parametrize("seqlen_new", [1, 5])
@pytest.mark.parametrize("kind", GROWTHS)
def test_new_keys_are_appended_and_seen(kind, seqlen_new):
    """To the bits that torch's operators give; NaN elsewhere stays NaN, and is not seen."""
    task = growing(seqlen_new, **GROWTHS[kind])
    tensors = make_inputs(task)
    old = [tensors.k_cache.clone(), tensors.v_cache.clone()]
    emulated(APPENDS, task, tensors)
    for found, expected in zip((tensors.k_cache, tensors.v_cache), grown(task, tensors, old), strict=True):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("table", [-1, 2**31 - 1, 10**6])
def test_a_page_that_is_none_is_not_written(table):
    task = growing(2, (16, 30), {**PAGED, "page_size": 16})
    tensors = make_inputs(task)
    tensors.block_table[:, 1:] = table
    old = [tensors.k_cache.clone(), tensors.v_cache.clone()]
    on_emulator(compiled(APPENDS, task), task, tensors)
    for found, before in zip((tensors.k_cache, tensors.v_cache), old, strict=True):
        assert torch.equal(found.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("length", [-5, 39, 40, 2**31 - 1])
def test_what_has_no_room_is_not_written(length):
    """Of two new keys, before place 40, which is the next sequence's first one, or nobody's."""
    task = growing(2, (38, 38), ROTARY)
    tensors, right = make_inputs(task), make_inputs(task)
    tensors.cache_seqlens.fill_(length)
    right.cache_seqlens.fill_(max(0, min(length, 40)))
    on_emulator(compiled(APPENDS, task), task, tensors)
    for name in ("k_cache", "v_cache"):
        found, before = (each.by_name[name].view(torch.int16) for each in (tensors, right))
        changed = (found != before).any(-1).any(-1)
        begin = max(0, min(length, 40))
        assert changed[:, :begin].sum() == changed[:, begin + 2 :].sum() == 0


def test_behind_the_last_page_nothing_is_written():
    """Where the table goes on with the next sequence's first page."""
    task = growing(2, (16, 30), {**PAGED, "page_size": 16})
    tensors, before = make_inputs(task), make_inputs(task)
    room = 16 * tensors.block_table.shape[1]
    tensors.cache_seqlens.copy_(torch.tensor([room - 1, 5]))
    on_emulator(compiled(APPENDS, task), task, tensors)
    own = {(int(tensors.block_table[0, -1]), 15), *((int(tensors.block_table[1, 0]), at) for at in (5, 6))}
    for name in ("k_cache", "v_cache"):
        found, old = (each.by_name[name].view(torch.int16) for each in (tensors, before))
        assert {tuple(place) for place in (found != old).any(-1).any(-1).nonzero().tolist()} == own


def test_bits_with_new_keys_do_not_depend_on_the_rest_of_the_batch():
    """Nor on the place in it, nor on whose keys lie in the pages around."""
    task, alone = (growing(2, lengths, {**PAGED, **ROTARY, "num_splits": 3}) for lengths in ((130, 7, 40), (40,)))
    tensors, others = make_inputs(alone), make_inputs(task)
    for name in ("q", "k_new", "v_new"):
        others.by_name[name][2] = tensors.by_name[name][0]
    for name in ("k_cache", "v_cache"):
        pages = [each.block_table[row, : -(-42 // 16)].long() for each, row in ((others, 2), (tensors, 0))]
        others.by_name[name][pages[0]] = tensors.by_name[name][pages[1]]
    expected, found = of_sequence(emulated(APPENDS, alone, tensors), 0), of_sequence(emulated(APPENDS, task, others), 2)
    assert all(torch.equal(found[name], bits) for name, bits in expected.items())


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("new_keys", "__syncthreads();  // before any warp reads them", "", "race on shared memory"),
        ("new_keys", "if (!has_place(params, sequence, key)) return;", "", "v_cache"),
        ("written_keys", "min(position, params.rotary_positions - 1)", "position", "rotary_cos"),
    ],
)
def test_a_fault_is_found(broken, file, old, new, message):  # noqa: F811
    """Also where lengths are wrong, so that a key comes behind the last place."""
    task = growing(2, (30, 38), ROTARY)
    tensors = make_inputs(task)
    tensors.cache_seqlens[1] = 40
    with pytest.raises(EmulatorError, match=f"(?s){message}"):
        on_emulator(compiled(broken(APPENDS, f"cuda/{file}.cuh", old, new), task), task, tensors)
