"""Rung 37 computes P before it knows a maximum: rows on both sides of each limit that its sums are held against.

Rung 33 looks at maxima, and then at the same sums.
"""

import functools
import itertools
import math

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.designed import drawn_by, missed_of_each
from flashladder.tests.support.rung_table import built

pytestmark = pytest.mark.slow

BLOCK = 128  # keys
EACH = 5  # in log2: a lane sums 32 P of a row, so that each of a whole block is so much below the sum
# In log2, sums up to which nothing is done (P at most 1 on average), up to which P can be brought down again, and up to
# which fp32 holds them.
LIMITS = (EACH, 120, 128)
BESIDE = [limit - whole + beside for limit in LIMITS for whole in (0, EACH) for beside in (-0.05, 0.05)]
HEIGHTS = (10, 16, 124, 126, 200, 1500, *BESIDE)  # of a score above those before it, in log2


def of_keys(sketch, height, one_key):
    """In log2: 0 in the last block, which is taken first; then the height, at all keys or at one with nothing beside
    it; 3 more, which a warp that looks for maxima lets pass; 6 more, which it does not; and 0."""
    block = sketch.behind // BLOCK
    heights = height * (block == 1) + (height + 3) * (block == 2) + (height + 6) * (block == 3)
    return torch.where((block == 1) & one_key & (sketch.behind % BLOCK != 77), -60.0, heights.double())


def rising(height, one_key):
    """A third of the rows rise, half of them by 3 % more or less."""

    def design(sketch):
        rows = (sketch.row % 3 == 0) * torch.where(sketch.row % 2 == 0, 1.0, sketch.near(1))
        sketch.add(rows * math.log(2), of_keys(sketch, height, one_key))

    return design


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16")])
def test_rows_on_both_sides_of_each_limit(head_dim, dtype):
    """At one key and at a whole block."""
    cases = list(itertools.product(HEIGHTS, (True, False)))
    designs = [rising(*case) for case in cases]
    problem, tensors = drawn_by(designs, seqlen_q=128, seqlen_k=5 * BLOCK, head_dim=head_dim, dtype=dtype)
    on_emulator(built(catalog.find("no_maxima"), problem), problem, tensors)
    for case, missed in zip(cases, missed_of_each(problem, tensors), strict=True):
        assert missed == (), case


NOTHING, FOLLOWED, DOWN, AGAIN = "nothing", "m follows the maxima", "brought down", "computed again"


@functools.cache
def counted(rung, block_n, height, one_key):
    """What tells one way from another: products, logarithms and multiplications, in a run of two blocks of 128 keys."""
    design = [lambda sketch: sketch.add(math.log(2), of_keys(sketch, height, one_key))]
    problem, tensors = drawn_by(design, seqlen_q=128, seqlen_k=2 * BLOCK)
    report = on_emulator(built(catalog.find(rung), problem, block_n=block_n), problem, tensors, race=False)
    return report.mma_flops, report.instructions["lg2.approx.f32"], report.instructions["mul.f32"]


def done(rung, height, one_key, block_n=BLOCK):
    """What warps do with scores whose rows all rise so high, if that is more than with scores that do not rise."""
    ours, least = (counted(rung, block_n, *rise) for rise in ((height, one_key), (-1, False)))
    ways = zip((AGAIN, DOWN, FOLLOWED), ours, least, strict=True)
    return next((way for way, of_ours, of_least in ways if of_ours > of_least), NOTHING)


@pytest.mark.parametrize(
    ("rung", "block_n", "limit", "below", "above"),
    [
        ("37", 128, EACH, NOTHING, DOWN),
        ("37", 64, EACH - 1, NOTHING, DOWN),
        ("37", 128, 120, DOWN, AGAIN),
        ("33", 128, EACH, NOTHING, DOWN),
    ],
)
def test_each_limit_is_where_it_is_said_to_be(rung, block_n, limit, below, above):
    for one_key, of_key in ((True, limit), (False, limit - math.log2(block_n / 4))):
        assert done(rung, of_key - 0.01, one_key, block_n) == below
        assert done(rung, of_key + 0.01, one_key, block_n) == above


@pytest.mark.parametrize("one_key", [True, False], ids=["one key", "a block"])
def test_maxima_are_followed_beyond_the_slack(one_key):
    assert done("33", 7.99, one_key) == DOWN
    assert done("33", 8.01, one_key) == FOLLOWED


@pytest.mark.parametrize("rung", ["33", "36", "37", "38", "39", "40", "41", "42", "43"])
def test_what_is_no_number_reaches_its_own_rows_alone(rung):
    """Rows of Q of NaN and of infinities are NaN. The rows beside them are what they are without, however they rise."""
    designs = [rising(height, one_key=False) for height in (6, 20, 200, 1500)]
    shape = {"seqlen_q": 128, "seqlen_k": 5 * BLOCK, "head_dim": 64}
    problem, clean = drawn_by(designs, **shape)
    _, tensors = drawn_by(designs, **shape)
    no_numbers = [5, 77]
    tensors.q[:, 5], tensors.q[:, 77] = math.nan, math.inf
    artifact = built(catalog.find(rung), problem)
    for each in (clean, tensors):
        on_emulator(artifact, problem, each, race=False)
    others = [row for row in range(problem.seqlen_q) if row not in no_numbers]
    assert tensors.o[:, no_numbers].isnan().all()
    torch.testing.assert_close(tensors.o[:, others], clean.o[:, others], rtol=0.01, atol=0.002)
    torch.testing.assert_close(tensors.lse[..., others], clean.lse[..., others])


@pytest.mark.parametrize(("rung", "head_dim"), [("41", 128), ("43", 64)])
def test_a_tile_forgets_what_the_one_before_has_lost(rung, head_dim):
    """A warp that has lost scores looks for maxima up to the tile's end. One CTA looks no more often than four do."""
    designs = [rising(height, one_key=False) for height in (400, 0, 0, 0)]
    problem, tensors = drawn_by(designs, seqlen_q=128, seqlen_k=5 * BLOCK, head_dim=head_dim)
    artifact = built(catalog.find(rung), problem, block_m=128, block_n=BLOCK, q_in_registers=True, q_stages=1)
    looks = [
        on_emulator(artifact, problem, tensors, num_sms=num_sms, race=False).instructions["max.f32"]
        for num_sms in (1, len(designs))
    ]
    assert looks[0] == looks[1]
