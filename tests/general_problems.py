"""Problems and configurations for the general rungs, drawn at random."""

import math

from flashladder.common import catalog
from flashladder.common.errors import ConfigError
from flashladder.common.problem.operations.forward import LAYOUTS
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import ahead

GENERALS = [catalog.find("general"), catalog.find("woven_general")]
GENERAL = GENERALS[-1]
HOPPERS = [
    catalog.find(name)
    for name in (
        "any_attention",
        "own_rows",
        "wide_heads",
        "no_maxima",
        "next_q",
        "shorter_turn",
        "row_by_row",
        "half_block",
        "from_the_end",
        "across_tiles",
        "scheduler_warp",
        "place_of_q",
        "column_of_ones",
    )
]
HEAD_DIMS = GENERAL.supports.head_dim
DECIDED = ("head_dim", "dtype", "causal", "lse")  # fields of the configuration that a problem decides
APART = ("packed", "window", "softcap", "alibi")  # such that have tests of their own


def kinds(rung):
    """All heads, types and masks that a rung takes."""
    return [
        {"head_dim": head_dim, "dtype": dtype, "causal": causal}
        for head_dim in sorted(rung.supports.head_dim)
        for dtype in rung.supports.dtype
        for causal in (False, True)
    ]


KINDS = kinds(GENERAL)
LAUNCHED = [catalog.find(name) for name in ahead.GENERAL]  # by `attention`


def compiled_kinds(rung):
    """The kinds to ask a rung in on a GPU, where each compiles a kernel: all, or of a rung that `attention` does not
    launch fewer. Still every head_dim, type and mask."""
    return kinds(rung)[:: 1 if rung in LAUNCHED else 5]


# The lengths of queries and keys in FlashAttention's own tests, and their like.
FA_LENGTHS = (
    *((1, 1), (1, 239), (3, 799), (239, 1), (799, 3), (127, 512), (128, 513), (113, 203), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (512, 256), (640, 128), (64, 65), (65, 64), (1023, 1024), (1024, 1023)),
)


def id_of(kind):
    """A kind of problem in a test's name: 'd64-bf16-causal'."""
    return f"d{kind['head_dim']}-{kind['dtype']}-{'causal' if kind['causal'] else 'full'}"


def draw(rng, longest, **kind):
    """Any lengths up to `longest`, short ones often; any heads, layout and scale."""
    heads_k = rng.choice((1, 1, 2, 3))
    lengths = {name: rng.randint(1, rng.choice((4, 40, longest))) for name in ("seqlen_q", "seqlen_k")}
    if rng.random() < 0.25:
        lengths["seqlen_k"] = lengths["seqlen_q"]
    layouts = LAYOUTS if lengths["seqlen_q"] == lengths["seqlen_k"] else [name for name in LAYOUTS if name != "qkv"]
    return Problem(
        batch=rng.choice((1, 1, 2)),
        num_heads=heads_k * rng.choice((1, 1, 2, 4)),
        num_heads_k=heads_k,
        **lengths,
        **kind,
        softmax_scale=rng.choice((None, math.exp(rng.uniform(-6, 0)))),
        layout=rng.choice(layouts),
        seed=rng.randrange(2**31),
    )


def draw_config(rng, rung=GENERAL):
    """A valid configuration of a rung."""
    while True:
        values = {name: rng.choice(choice.values) for name, choice in rung.choices.items() if name not in APART}
        try:
            return rung.config(**values)
        except ConfigError:
            continue
