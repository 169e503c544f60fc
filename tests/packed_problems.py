"""Problems of packed sequences, drawn at random, and what runs them on the emulator."""

import itertools
import math

import torch
from general_problems import GENERAL

from flashladder.common.compiler import build_one
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.operations.forward import LAYOUTS
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

ARCH = "sm_80"
SMALL = {"block_m": 64, "block_n": 32}  # many tiles in short sequences
LENGTHS = (0, 0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 97, 127, 128, 129)


def emulated(problem, tensors=None, **values):
    """Requires a right output without a race; returns the tensors and the emulator's report."""
    tensors = tensors or make_inputs(problem)
    config = GENERAL.config_for(problem, **(values or SMALL))
    GENERAL.check(problem, config)
    report = on_emulator(build_one(GENERAL, config, ARCH), problem, tensors)
    verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(f"{problem.name} with {config}")
    return tensors, report


def draw_packed(rng, longest, **kind):
    """Any lengths up to `longest`, short ones and none often; any heads, layout and scale."""
    heads_k, count = rng.choice((1, 1, 2, 3)), rng.randint(1, 7)
    lengths = [
        [rng.choice((0, rng.randint(0, 4), rng.randint(0, 70), rng.randint(0, longest))) for _ in range(count)]
        for _ in "qk"
    ]
    for each in lengths:
        each[rng.randrange(count)] += 1  # not all may be empty
    if rng.random() < 0.4:
        lengths[1] = lengths[0]
    return Problem(
        operation="packed",
        seqlens_q=tuple(lengths[0]),
        seqlens_k=tuple(lengths[1]),
        num_heads=heads_k * rng.choice((1, 1, 2, 4)),
        num_heads_k=heads_k,
        **kind,
        softmax_scale=rng.choice((None, math.exp(rng.uniform(-6, 0)))),
        layout=rng.choice([name for name in LAYOUTS if name != "qkv" or sum(lengths[0]) == sum(lengths[1])]),
        seed=rng.randrange(2**31),
        lse=rng.random() < 0.8,
    )


def draw_bounds(rng, causal):
    """A window, with an end on one side or on both; a softcap and ALiBi now and then."""
    keys = (0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 100, 150)
    left, right = rng.choice((*keys, None)), rng.choice(keys)
    return {
        "window_left": left if left is not None or not causal else 7,
        "window_right": None if causal or (left is not None and rng.random() < 0.3) else right,
        "softcap": rng.choice((0.0, 0.0, 20.0)),
        "alibi": rng.random() < 0.2,
    }


def require_zeros_without_keys(tensors, pairs):
    """Of sequences of so many rows and keys each."""
    ends = tensors.cu_seqlens_q.tolist()
    for (_, keys), (begin, end) in zip(pairs, itertools.pairwise(ends), strict=True):
        if not keys:
            assert not tensors.o[0, begin:end].any()
            assert (tensors.lse[:, begin:end] == -math.inf).all()


def require_nothing_of_neighbours(artifact, problem, clean, rows, keys):
    """NaN and infinity before and behind these rows and keys: what comes of them is the same to the last bit."""
    tensors = make_inputs(problem)
    for x, own in ((tensors.q, rows), (tensors.k, keys), (tensors.v, keys)):
        x[:, : own.start], x[:, own.stop :] = math.nan, math.inf
    on_emulator(artifact, problem, tensors)
    assert torch.equal(tensors.o[:, rows], clean.o[:, rows])
    assert torch.equal(tensors.lse[:, rows], clean.lse[:, rows])


def require_it_stays_within(artifact, problem, wrong, **options):
    """Whatever cu_seqlens say: the emulator fails at a read outside a tensor, the canaries tell of a write."""
    for names in (("cu_seqlens_q",), ("cu_seqlens_k",), ("cu_seqlens_q", "cu_seqlens_k")):
        tensors = make_inputs(problem)
        for name in names:
            getattr(tensors, name).copy_(torch.tensor(wrong, dtype=torch.int32))
        on_emulator(artifact, problem, tensors, **options)
        assert [buffer.damage() for buffer in tensors.buffers] == [None] * len(tensors.buffers)


def require_the_same_as_a_batch(run, problem, tensors):
    """What `run` makes of sequences of equal lengths as a batch, to the last bit; `tensors` are of packed ones."""
    sizes = {"batch": problem.batch, "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k}
    batch = Problem(**sizes, num_heads=problem.num_heads, head_dim=problem.head_dim, causal=problem.causal)
    given = make_inputs(batch)
    for name in "qkv":
        getattr(given, name).copy_(getattr(tensors, name).view_as(getattr(given, name)))
    run(batch, given)
    assert torch.equal(given.o.flatten(0, 1), tensors.o[0])
    assert torch.equal(given.lse.transpose(0, 1).flatten(1, 2), tensors.lse)
