"""Packed sequences of the Hopper rung that takes them, on the emulator, under the race detector."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_problems import (
    require_it_stays_within,
    require_nothing_of_neighbours,
    require_the_same_as_a_batch,
    require_zeros_without_keys,
)
from test_general_hopper import ARCH, emulated, tiles
from test_packed import WRONG, packed

from flashladder.common import catalog
from flashladder.common.api.packed import packed_attention
from flashladder.common.compiler import build_one
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.runtime.launch import packed_mapped

RUNG = catalog.find("column_of_ones")
TILED = ("packed_sequences", "scheduler_warp", "place_of_q", "column_of_ones")
SMALL = {"block_m": 128, "block_n": 64, "q_in_registers": False, "num_stages": 2}
LENGTHS = (0, 0, 1, 2, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257)


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_about_each_boundary(causal):
    """Every pair of lengths next to a multiple of a warpgroup's rows, of the tile and of a block, in one call."""
    pairs = list(itertools.product((0, 1, 63, 64, 65, 127, 128, 129), (0, 1, 63, 64, 65, 128, 129)))
    tensors = emulated(RUNG, packed(*map(tuple, zip(*pairs, strict=True)), causal=causal), **SMALL)
    require_zeros_without_keys(tensors, pairs)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(LENGTHS), st.sampled_from(LENGTHS)), min_size=1, max_size=5),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from((1, 2, 132)),
)
def test_any_lengths_and_heads(lengths, heads_k, group, causal, num_sms):
    seqlens_q, seqlens_k = ((*each, 1) for each in zip(*lengths, strict=True))
    heads = {"num_heads": heads_k * group, "num_heads_k": heads_k}
    emulated(RUNG, packed(seqlens_q, seqlens_k, **heads, causal=causal), num_sms=num_sms)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rung", "head_dim", "tile"), list(tiles(*TILED)))
def test_tiles_that_one_cta_computes_one_after_another(rung, head_dim, tile, causal):
    """Each warpgroup has another number of blocks, of one sequence and then of another."""
    m = tile["block_m"]
    problem = packed((m + 1, 0, m, 5, 2 * m), (70, 9, m + 200, 0, 2 * m), head_dim=head_dim, causal=causal)
    emulated(rung, problem, **tile, num_sms=1)


@pytest.mark.parametrize("number", [1, 300])
def test_sequences_shorter_than_a_tile(number):
    """Two of them stand in most tiles' rows, each in a tile of its own; every other one is empty."""
    emulated(RUNG, packed(number * (3, 0), num_heads=1, causal=True), num_sms=3, **SMALL)


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_of_a_neighbour_is_read_into_a_sequence(causal):
    """NaN and infinity in the sequences before and behind: what is between is the same to the last bit."""
    problem = packed((40, 170, 30), (33, 177, 20), num_heads=2, causal=causal)
    artifact = build_one(RUNG, RUNG.config_for(problem), ARCH)
    require_nothing_of_neighbours(artifact, problem, emulated(RUNG, problem), slice(40, 210), slice(33, 210))


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_whatever_cu_seqlens_say_nothing_outside_a_tensor_is_touched(wrong):
    """The emulator fails at a read outside a tensor, the canaries tell of a write."""
    problem = packed((30, 30), (20, 40), causal=True)
    artifact = build_one(RUNG, RUNG.config_for(problem), ARCH)
    require_it_stays_within(artifact, problem, wrong, race=False)  # sequences that overlap are stored twice


@pytest.mark.parametrize("end", [0, 131, 229])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_behind_the_last_sequence_are_zeros(causal, end):
    problem = packed((100, 130), (70, 200), num_heads=2, causal=causal)
    tensors = make_inputs(problem)
    tensors.cu_seqlens_q.copy_(torch.tensor([0, min(100, end), end], dtype=torch.int32))
    tensors.poison()
    on_emulator(build_one(RUNG, RUNG.config_for(problem), ARCH), problem, tensors)
    assert not tensors.o[0, end:].any()
    assert (tensors.lse[:, end:] == -math.inf).all()


@pytest.mark.parametrize("layout", ["bhsd", "padded", "qkv"])
def test_any_strides(layout):
    emulated(RUNG, packed((33, 0, 150), num_heads=2, layout=layout, lse=False))


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_are_a_batch(causal):
    """To the last bit what the same rung gives for them."""
    problem = packed((270, 270), (200, 200), num_heads=2, causal=causal)
    require_the_same_as_a_batch(partial(emulated, RUNG), problem, emulated(RUNG, problem))


@pytest.mark.parametrize(("rows", "heads"), [(300, 2), (1, 2), (300, 1)])
def test_a_map_ends_where_a_sequence_does(rows, heads):
    """Row r of a sequence that ends before row `end` is found, and the row behind its last one is outside."""
    (declared, *_) = build_one(RUNG, RUNG.config(packed=True), ARCH).launch.tensor_maps
    strides = (0, 2048 if rows > 1 else 7, 128 if heads > 1 else 7)  # where there is one, a stride means nothing
    made = packed_mapped(declared, 1 << 20, "bf16", (1, rows, heads, 128), strides)
    for begin, end in {(0, rows), (rows // 3, rows // 2), (rows - 1, rows)} - {(0, 0)}:
        row = made.dims[1] - (end - begin)  # where the kernel has its first row
        of_row, of_head, of_end = made.strides
        address = (made.address + row * of_row + (heads - 1) * of_head + end * of_end) % 2**64
        assert address == (1 << 20) + (begin * 2048 if rows > 1 else 0) * 2 + (heads - 1) * 128 * 2
        assert row + end - begin == made.dims[1]
        assert end < made.dims[3]


def test_attention_can_be_asked_for_it():
    q, k, v = torch.randn(3, 150, 2, 64).bfloat16()
    starts = torch.tensor((0, 70, 70, 140), dtype=torch.int32)
    o = packed_attention(q, k, v, starts, starts, 70, 70, causal=True, window=(40, None), version="48")
    expected = packed_attention(q, k, v, starts, starts, 70, 70, causal=True, window=(40, None))
    torch.testing.assert_close(o, expected, rtol=0.02, atol=0.02)
    assert not o[140:].any()
