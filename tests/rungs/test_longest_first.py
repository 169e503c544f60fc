"""The orders of packed sequences' tiles: a kernel writes each tile's number to its first row."""

import itertools
import random

import pytest

from flashladder.common.compiler import translate
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.rung_table import packed
from flashladder.tests.support.tiny_ladder import make_rung

VERSION_YAML = """
title: Numbers
idea: Where each tile comes.
instruction_set: hopper
supports: {dtype: [bf16], head_dim: [64], causal: true, gqa: true, lse: true, packed: true}
config:
  causal: {default: false, values: [false, true]}
  packed: {default: true, values: [true]}
  block_m: {default: 128, values: [128, 192]}
"""
KERNEL = """
#include "config.cuh"
#include "launch.cuh"
#include "schedule/order.cuh"
using namespace config;
FLASHLADDER_KERNEL(attention_forward, PackedParams, Launch{32, 0, block_m, 64}.persistent());
extern "C" __global__ void attention_forward(const __grid_constant__ PackedParams params) {
    PackedOrder<block_m, head_dim, causal> order(params);
    for (int number = 0; number < order.count; ++number) {
        const auto tile = order.find(number);
        if (lane_index() == 0) tile.lse[tile.first_row] = number;
    }
}
"""
LENGTHS = {
    "one": ((300,), (70,)),
    "empty ones": ((0, 200, 0, 0, 129, 0), (5, 0, 7, 0, 300, 9)),
    "long keys": ((200, 130, 400), (70_000, 300_000, 20_000)),  # K and V of few heads fit into L2
    "33": tuple(tuple(random.Random(seed).choices(range(400), k=33)) for seed in "qk"),
    "100": tuple(tuple(random.Random(seed).choices(range(300), k=100)) for seed in "qk"),
}


@pytest.fixture(scope="module")
def rung(tmp_path_factory):
    """It is compiled once for all lengths."""
    return make_rung(tmp_path_factory.mktemp("numbers"), "07_numbers", VERSION_YAML, KERNEL)


def numbers(rung, seqlens_q, seqlens_k, block_m, **kind):
    """{(sequence, head): its tiles' numbers, by rows}."""
    problem = packed(seqlens_q, seqlens_k, **kind)
    tensors = make_inputs(problem)
    tensors.lse.fill_(-1)
    on_emulator(translate(rung, rung.config_for(problem, block_m=block_m), "sm_90a"), problem, tensors, num_sms=1)
    bounds = list(enumerate(itertools.pairwise(tensors.cu_seqlens_q.tolist())))
    found = {}
    for head in range(problem.num_heads):
        for sequence, (begin, end) in bounds:
            of_rows = tensors.lse[head, begin:end]
            found[sequence, head] = [int(number) for number in of_rows[of_rows >= 0]]
            if kind["causal"] and (of_rows >= 0).any():
                first, *others = (of_rows >= 0).nonzero().flatten().tolist()
                assert first == 0
                assert all((end - begin + 63) // 64 * 64 % block_m == row % block_m for row in others)
            else:
                assert all(row % block_m == 0 for row in (of_rows >= 0).nonzero().flatten().tolist())
    return found


@pytest.mark.parametrize(("block_m", "causal"), [(128, False), (128, True), (192, True)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_tile_comes_once_and_those_of_long_sequences_first(rung, lengths, causal, block_m):
    seqlens_q, seqlens_k = lengths
    found = numbers(rung, *lengths, block_m, num_heads=6, num_heads_k=3, causal=causal)
    for (sequence, _), tiles in found.items():
        assert len(tiles) == -(-seqlens_q[sequence] // block_m)
        assert not causal or tiles == sorted(tiles, reverse=True), "the last rows see the most keys"
    ordered = sorted((number, sequence) for (sequence, _), tiles in found.items() for number in tiles)
    assert [number for number, _ in ordered] == list(range(len(ordered)))
    came = list(dict.fromkeys(sequence for _, sequence in ordered))
    assert [each for each, _ in itertools.groupby(sequence for _, sequence in ordered)] == came, "one after the other"
    shortest = float("inf")
    for keys in (max(seqlens_k[sequence], 256) for sequence in came):  # up to 256 keys they are one class
        assert keys <= 1.25 * shortest
        shortest = min(shortest, keys)
