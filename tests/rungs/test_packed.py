"""Packed sequences on the emulator, under the race detector: any lengths, whatever stands beside a sequence."""

import itertools

import pytest
from general_problems import GENERAL, GENERALS
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_problems import (
    ARCH,
    LENGTHS,
    SMALL,
    emulated,
    require_it_stays_within,
    require_nothing_of_neighbours,
    require_the_same_as_a_batch,
    require_zeros_without_keys,
)

from flashladder.common.compiler import build_one
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.problem import Problem

# Behind the end, before the start, falling, far away, no rows.
WRONG = [(0, 200, 300), (-64, 20, 60), (0, 50, 20), (2**31 - 1, -(2**31), 5), (60, 60, 60)]


def packed(seqlens_q, seqlens_k=(), **options):
    return Problem(**{"operation": "packed", "head_dim": 64, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k} | options)


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_about_each_boundary(causal):
    """Every pair of lengths next to a multiple of the tile, of a block of keys and of its part, in one call."""
    pairs = list(itertools.product((0, 1, 31, 32, 33, 65), (0, 1, 15, 16, 17, 31, 32, 33, 64, 65)))
    tensors, _ = emulated(packed(*map(tuple, zip(*pairs, strict=True)), causal=causal))
    require_zeros_without_keys(tensors, pairs)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(LENGTHS), st.sampled_from(LENGTHS)), min_size=1, max_size=6),
    st.integers(1, 2),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_lengths_and_heads(lengths, heads_k, group, causal):
    seqlens_q, seqlens_k = ((*each, 1) for each in zip(*lengths, strict=True))
    emulated(packed(seqlens_q, seqlens_k, num_heads=heads_k * group, num_heads_k=heads_k, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_of_a_neighbour_is_read_into_a_sequence(causal):
    """NaN and infinity in the sequences before and behind: what is between is the same to the last bit."""
    problem = packed((40, 70, 30), (33, 77, 20), num_heads=2, causal=causal)
    clean, _ = emulated(problem)
    artifact = build_one(GENERAL, GENERAL.config_for(problem, **SMALL), ARCH)
    require_nothing_of_neighbours(artifact, problem, clean, slice(40, 110), slice(33, 110))


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_whatever_cu_seqlens_say_nothing_outside_a_tensor_is_touched(wrong):
    """The emulator fails at a read outside a tensor, the canaries tell of a write."""
    problem = packed((30, 30), (20, 40), causal=True)
    artifact = build_one(GENERAL, GENERAL.config_for(problem, **SMALL), ARCH)
    require_it_stays_within(artifact, problem, wrong)


@pytest.mark.parametrize("layout", ["bhsd", "padded", "qkv"])
def test_any_strides(layout):
    emulated(packed((33, 0, 50), num_heads=2, layout=layout, lse=False))


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_are_a_batch(causal):
    """To the last bit what the padded kernel gives."""
    problem = packed((70, 70), (90, 90), num_heads=2, causal=causal)
    tensors, _ = emulated(problem)
    require_the_same_as_a_batch(emulated, problem, tensors)


def test_a_rung_that_takes_no_packed_sequences_says_so():
    problem = packed((30, 20))
    with pytest.raises(UnsupportedProblemError, match="computes the operation forward, not packed; the nearest rung "
                       "that takes the problem is 24_woven_general"):  # fmt: skip
        GENERALS[0].config_for(problem)
    config = GENERAL.config_for(Problem(head_dim=64))
    with pytest.raises(UnsupportedProblemError, match="is configured for packed=false, but the problem has packed=tru"):
        GENERAL.check(problem, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seqlens_q": (3, -1)}, "no sequence is shorter than 0"),
        ({"seqlens_q": (3, 2), "seqlens_k": (1,)}, "seqlens_q are 2, seqlens_k 1 lengths"),
        ({"seqlens_q": (0, 0)}, "total_q=0: must be at least 1"),
        ({}, "packed sequences have lengths"),
        ({"seqlens_q": (3, 2), "operation": "forward"}, "the operation forward knows no seqlens_q"),
        ({"seqlens_q": (3, 2), "seqlens_k": (1, 3), "layout": "qkv"}, "total_q=5 must equal total_k=4"),
    ],
)
def test_what_is_no_problem_is_refused(options, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        Problem(**{"operation": "packed"} | options)


def test_lengths_that_the_gpu_alone_knows():
    problem = Problem(operation="packed", batch=3, seqlen_q=9, seqlen_k=7, total_q=20, total_k=11, num_heads=2)
    shapes = problem.asked.shapes(problem)
    assert (shapes["k"], shapes["cu_seqlens_k"], shapes["lse"]) == ((1, 11, 2, 128), (4,), (2, 20))
    known = Problem(operation="packed", seqlens_q=(9, 2, 9), seqlens_k=(4, 7, 0), num_heads=2)
    assert known.asked.shapes(known) == shapes
    assert (known.batch, known.seqlen_q, known.seqlen_k) == (3, 9, 7)
    assert known.flops == 4 * 2 * 128 * (9 * 4 + 2 * 7)
