"""Problems of packed sequences, drawn at random, and what runs them on the emulator."""

import math

from general_problems import GENERAL

from flashladder.common.build import build_one
from flashladder.common.problem import LAYOUTS, Problem, expect, make_inputs, verify
from flashladder.common.run.execute import on_emulator

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
