"""What a rung that takes packed sequences is held to, on the emulator, under the race detector (rung_features.py)."""

import itertools
import math

import torch

from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.rung_table import built, emulated, masked, packed

# What cu_seqlens may say: behind the end, before the start, falling, far away, no rows.
WRONG = ((0, 200, 300), (-64, 20, 60), (0, 50, 20), (2**31 - 1, -(2**31), 5), (60, 60, 60))


def lengths_about_each_boundary(rung):
    """Every pair of lengths next to a multiple of a warp's rows, of the tile and of a block, in one call."""
    unit = 32 if rung.instruction_set == "ampere" else 64
    rows = (0, 1, unit - 1, unit, unit + 1, 2 * unit + 1)
    pairs = list(itertools.product(rows, (*rows, unit // 2 + 1, 2 * unit)))
    tensors, _ = emulated(rung, packed(*map(tuple, zip(*pairs, strict=True))))
    ends = tensors.cu_seqlens_q.tolist()
    for (_, keys), (begin, end) in zip(pairs, itertools.pairwise(ends), strict=True):
        if not keys:
            assert not tensors.o[0, begin:end].any()
            assert (tensors.lse[:, begin:end] == -math.inf).all()


def many_short_sequences(rung):
    """Two of them stand in most tiles' rows, each in a tile of its own; every other one is empty."""
    emulated(rung, packed(40 * (3, 0), 40 * (3, 0)), num_sms=3)


def nothing_of_a_neighbour(rung):
    """NaN and infinity in the sequences before and behind: what is between is the same to the last bit."""
    problem = packed((40, 170, 30), (33, 177, 20), num_heads=2)
    (clean, _), tensors, rows, keys = emulated(rung, problem), make_inputs(problem), slice(40, 210), slice(33, 210)
    for x, own in ((tensors.q, rows), (tensors.k, keys), (tensors.v, keys)):
        x[:, : own.start], x[:, own.stop :] = math.nan, math.inf
    on_emulator(built(rung, problem), problem, tensors)
    assert torch.equal(tensors.o[:, rows], clean.o[:, rows])
    assert torch.equal(tensors.lse[:, rows], clean.lse[:, rows])


def within_the_tensors_whatever_cu_seqlens_say(rung):
    """The emulator fails at a read outside a tensor, the canaries tell of a write.

    Races are not looked for: sequences that overlap are stored twice.
    """
    problem = packed((30, 30), (20, 40))
    for wrong, names in itertools.product(WRONG, (("cu_seqlens_q",), ("cu_seqlens_q", "cu_seqlens_k"))):
        tensors = make_inputs(problem)
        for name in names:
            getattr(tensors, name).copy_(torch.tensor(wrong, dtype=torch.int32))
        on_emulator(built(rung, problem), problem, tensors, race=False)
        assert [buffer.damage() for buffer in tensors.buffers] == [None] * len(tensors.buffers)


def rows_before_the_first_sequence(rung):
    """Are of none, and not written to; the others have what they have without them.

    Without a mask: under one a rung may leave out tiles that begin before their sequence for another reason.
    """
    problem, first = packed((400, 130), (70, 200), num_heads=2, causal=False), 300  # more than a tile
    (whole, _), tensors, second = emulated(rung, problem), make_inputs(problem), slice(400, 530)
    tensors.cu_seqlens_q[0], tensors.cu_seqlens_k[0] = first, 30
    tensors.poison()
    on_emulator(built(rung, problem), problem, tensors)
    assert tensors.o[:, :first].isnan().all()
    assert tensors.lse[:, :first].isnan().all()
    assert torch.equal(tensors.o[:, second], whole.o[:, second])
    assert torch.equal(tensors.lse[:, second], whole.lse[:, second])


def equal_lengths_are_a_batch(rung):
    """To the last bit what the same rung gives for them."""
    ends, sizes = {"num_heads": 2}, {"batch": 2, "seqlen_q": 150, "seqlen_k": 200}
    tensors, _ = emulated(rung, packed((150, 150), (200, 200), **ends))
    batch = masked(**sizes, **ends)
    given = make_inputs(batch)
    for name in "qkv":
        getattr(given, name).copy_(getattr(tensors, name).view_as(getattr(given, name)))
    emulated(rung, batch, given)
    assert torch.equal(given.o.flatten(0, 1), tensors.o[0])
    assert torch.equal(given.lse.transpose(0, 1).flatten(1, 2), tensors.lse)


def zeros_behind_the_last_sequence(rung):
    for end in (0, 131, 229):
        problem = packed((100, 130), (70, 200), num_heads=2)
        tensors = make_inputs(problem)
        tensors.cu_seqlens_q.copy_(torch.tensor([0, min(100, end), end], dtype=torch.int32))
        tensors.poison()
        on_emulator(built(rung, problem), problem, tensors)
        assert not tensors.o[0, end:].any()
        assert (tensors.lse[:, end:] == -math.inf).all()
