"""Families of inputs that are hard on an attention kernel: scores and values by design, through q and k.

Normal random inputs hide what goes wrong in a softmax. Their scores lie close together, so that no maximum is far from
the first; and values of zero mean hide a bias, since weights that are all too small give the same zero. Here a function
a family says which scores a row sees and what V holds. Forward kernels take keys from the last to the first, so "first"
and "last" mean positions, and what is taken before is behind. Kernels that read a cache begin with its first key: what
rises for others falls for them. V is positive, with another mean in each column: outputs fall all over the steps of a
16-bit number, and a bias below half a step shows in the mean of many.

Where two groups of keys share a row's weight, V is zero at one group in the odd columns: O is the weight of the other.

One family, `trained`, is not designed but recorded.
"""

from __future__ import annotations

import math

import torch

from flashladder.common.problem.families import recording
from flashladder.common.problem.families.family import FAMILIES, NORMAL, Family, designed
from flashladder.common.problem.families.sketch import Sketch

__all__ = ["FAMILIES", "NORMAL", "Family"]

_FIRST = 128  # keys that every kernel takes before the others: whole blocks, whatever block_n is
_EDGES = (128, 192, 256)  # keys behind which plateaus of rows begin: at an edge of blocks, or amid one
_LARGEST = {torch.bfloat16: 2.0**100, torch.float16: 2.0**14}  # of V, with room for what a family multiplies it by
_POWERS = 40  # of two, up to which scores jump: beyond all that P may grow to
_LN2 = math.log(2)


# Spreads


@designed()
def normal_3(sketch: Sketch) -> None:
    """Normal scores of 3 nats, as trained models have them."""
    sketch.noise(3)


@designed()
def normal_10(sketch: Sketch) -> None:
    """Normal scores of 10 nats: few keys count, and maxima are far apart."""
    sketch.noise(10)


@designed()
def outlier_channels(sketch: Sketch) -> None:
    """Four channels of K with a large mean, and four columns of V that are much larger."""
    sketch.q.copy_(sketch.normal(*sketch.q.shape))
    sketch.k.copy_(sketch.normal(*sketch.k.shape))
    sketch.q[..., :4] *= 3
    sketch.k[..., :4] += 8
    sketch.v[..., :4] *= 64


@designed()
def sinks(sketch: Sketch) -> None:
    """Attention sinks: the first four keys take most of the weight and have small values."""
    sketch.add(sketch.near(8), (sketch.key < 4).float())
    sketch.noise(1)
    sketch.v[:, :4] *= 0.01


@designed()
def equal_keys(sketch: Sketch) -> None:
    """All keys are the same, so that O is the mean of V."""
    sketch.q.copy_(sketch.normal(*sketch.q.shape))
    sketch.k.copy_(sketch.normal(len(sketch.k), 1, sketch.k.shape[-1]).expand_as(sketch.k))


@designed(softmax_scale=lambda dtype: 2.0**-20 if dtype == torch.float16 else 2.0**-100)
def tiny_scale(sketch: Sketch) -> None:
    """Normal scores from a tiny softmax_scale and large q and k."""
    sketch.noise(1)


@designed(softmax_scale=lambda dtype: 2.0**20 if dtype == torch.float16 else 2.0**100)
def huge_scale(sketch: Sketch) -> None:
    """Normal scores from a huge softmax_scale and tiny q and k."""
    sketch.noise(1)


# Recorded


@designed()
def trained(sketch: Sketch) -> None:
    """Q, K and V as the layers of a small GPT had them, which was trained on text."""
    recording.fill(sketch, recording.read())


# Slopes


@designed()
def rising_gently(sketch: Sketch) -> None:
    """Scores rise along the keys by some nats: kernels meet the largest first."""
    sketch.add(5 + 5 * sketch.uniform(*sketch.row.shape), sketch.key / len(sketch.key))


@designed()
def falling_gently(sketch: Sketch) -> None:
    """Scores fall along the keys by some nats: each block that kernels take is a little above the last."""
    sketch.add(5 + 5 * sketch.uniform(*sketch.row.shape), sketch.behind / len(sketch.key))


@designed()
def rising_steeply(sketch: Sketch) -> None:
    """Scores rise by 13 to 26 nats every 64 keys, up to 200: only the last count."""
    sketch.add(1 + sketch.uniform(*sketch.row.shape), -(0.2 * sketch.behind).clamp(max=100))


@designed()
def falling_steeply(sketch: Sketch) -> None:
    """Scores fall by 13 to 26 nats every 64 keys, by 200 at most: all that was summed before is as nothing."""
    sketch.add(1 + sketch.uniform(*sketch.row.shape), -(0.2 * sketch.key).clamp(max=100))


def _sloping(sketch: Sketch, nats: float | torch.Tensor, steps: torch.Tensor) -> None:
    """Normal scores that rise by so much from step to step, in the order in which kernels take keys."""
    sketch.add(nats, steps)
    sketch.noise(1)


@designed()
def rising(sketch: Sketch) -> None:
    """Normal scores that rise by 12 nats along the keys: kernels meet the largest first."""
    _sloping(sketch, 12, sketch.key / len(sketch.key))


@designed()
def falling(sketch: Sketch) -> None:
    """Normal scores that fall by 12 nats along the keys: maxima come late."""
    _sloping(sketch, 12, sketch.behind / len(sketch.key))


@designed()
def climbing_blocks(sketch: Sketch) -> None:
    """Normal scores, each 128 keys 1.5 nats above those that kernels took before."""
    _sloping(sketch, 1.5, (sketch.behind // _FIRST).float())


@designed()
def one_climbing_row_in_64(sketch: Sketch) -> None:
    """The same of one row in 64; all others are normal, and wait for it where rows wait for each other."""
    _sloping(sketch, 1.5 * (sketch.row % 64 == 5), (sketch.behind // _FIRST).float())


# Plateaus


@designed()
def lone_top(sketch: Sketch) -> None:
    """The last key is 10.47 nats above all others, and V is zero there: O is the weight of all that is small."""
    sketch.add(sketch.near(-10.47), (sketch.behind > 0).float())
    sketch.v[:, -1] = 0


def _plateau(sketch: Sketch, nats: float) -> None:
    """All keys but the last 64 are so far above those."""
    sketch.add(sketch.near(nats), (sketch.behind >= 64).float())


@designed()
def plateau_2(sketch: Sketch) -> None:
    """Equal keys, 2 nats above the last 64."""
    _plateau(sketch, 2)


@designed()
def plateau_3(sketch: Sketch) -> None:
    """Keys 3.12 nats above the last 64, with a little noise."""
    _plateau(sketch, 3.12)
    sketch.noise(0.05)


@designed()
def plateau_4(sketch: Sketch) -> None:
    """Equal keys, 4.5 nats above the last 64."""
    _plateau(sketch, 4.5)


@designed()
def plateau_below(sketch: Sketch) -> None:
    """Equal keys, 4.5 nats below the last 64, where V is zero in the odd columns."""
    _plateau(sketch, -4.5)
    sketch.hide(sketch.behind < 64)


def _risen(sketch: Sketch) -> None:
    """Behind the last 128, 192 or 256 keys, each row rises. The rows of a warp rise by about one power of two, 2^1 to
    2^7: P would be 0.4 units beside a 16-bit number, and rounded up in some rows, down in others."""
    beside = torch.where(sketch.uniform(*sketch.row.shape) < 0.5, 0.4, 0.6) * torch.finfo(sketch.dtype).eps
    heights = (1 + sketch.row // 16 % 7 + torch.log2(1 + beside)) * _LN2
    for turn, edge in enumerate(_EDGES):
        sketch.add(heights * (sketch.row % len(_EDGES) == turn), (sketch.behind >= edge).float())


@designed()
def plateau_rows(sketch: Sketch) -> None:
    """Equal keys, 1 to 7 in log2 above the last 128, 192 or 256: another height in each row."""
    _risen(sketch)


@designed()
def plateau_sparse(sketch: Sketch) -> None:
    """The same of one key in 64, 40 nats above all others: P of one lane weighs, and its sum is small."""
    _risen(sketch)
    sketch.add(sketch.near(40), (sketch.behind % 64 == 37).float())


def _raised(sketch: Sketch, every: int) -> None:
    """Behind the last 128, one key in so many is at one height: 0 to 4 in log2, another in each warp, and a bit more.
    P would be 0.6 units beside a 16-bit number, and all are rounded up."""
    heights = sketch.row // 16 % 5 + math.log2(1 + 0.6 * torch.finfo(sketch.dtype).eps)
    sketch.add(heights * _LN2, ((sketch.behind >= _FIRST) & (sketch.behind % every == 0)).float())


@designed()
def plateau_half(sketch: Sketch) -> None:
    """Every other key behind the last 128 is at one height, 0 to 4 in log2 above all others, and rounded up."""
    _raised(sketch, 2)


@designed()
def plateau_fourth(sketch: Sketch) -> None:
    """The same of every fourth key."""
    _raised(sketch, 4)


@designed()
def plateau_64th(sketch: Sketch) -> None:
    """The same of one key in 64."""
    _raised(sketch, 64)


@designed()
def plateau_nudge(sketch: Sketch) -> None:
    """All keys behind the last 128 are 2^-11 in log2 above those: P is a third of a unit of fp16 above one."""
    sketch.add(2.0**-11 * _LN2, (sketch.behind >= _FIRST).float())


# One key


def _dominant(sketch: Sketch, key: int) -> None:
    """One key is 12 nats above normal scores; V is small at all others."""
    chosen = sketch.key == key
    sketch.add(sketch.near(12), chosen.float())
    sketch.noise(1)
    sketch.v[:, ~chosen] *= 2.0**-6


@designed()
def dominant_first(sketch: Sketch) -> None:
    """One key dominates, the first: kernels meet it last."""
    _dominant(sketch, 0)


@designed()
def dominant_middle(sketch: Sketch) -> None:
    """One key dominates, in the middle."""
    _dominant(sketch, len(sketch.key) // 2)


@designed()
def dominant_last(sketch: Sketch) -> None:
    """One key dominates, the last: kernels meet it first."""
    _dominant(sketch, len(sketch.key) - 1)


@designed()
def runner_up(sketch: Sketch) -> None:
    """Two keys, 40 nats above all others: the last, and one in the middle, which is 0 to 5 in log2 above it."""
    top = (sketch.key == len(sketch.key) // 2).float()
    sketch.add(sketch.near(40), (sketch.behind == 0).float() + top)
    sketch.add(5 * _LN2 * sketch.uniform(*sketch.row.shape), top)


@designed(one_hot=True)
def one_hot(sketch: Sketch) -> None:
    """Each row has one key, 40 nats above all others: O is a row of V."""
    sketch.match(40)


@designed(one_hot=True)
def huge_scores(sketch: Sketch) -> None:
    """The same with products q k of 2^28 and more, where fp32 numbers are 32 apart."""
    sketch.match(2.0**28 * sketch.scale)


@designed()
def maximum_in_turn(sketch: Sketch) -> None:
    """Each key in turn is the maximum of a row, 3 to 4 nats above: every place in a tile, so every lane, once."""
    sketch.match(3)
    sketch.q *= 1 + 0.25 * sketch.uniform(*sketch.row.shape, 1)


# Large numbers


@designed()
def common_scores(sketch: Sketch) -> None:
    """Normal scores above a common one of each row, up to 1,000 nats."""
    sketch.add(1000 * sketch.uniform(*sketch.row.shape), torch.ones_like(sketch.key, dtype=torch.float))
    sketch.noise(1)


@designed(one_hot=True)
def largest_values(sketch: Sketch) -> None:
    """Each row has one key, and V goes to the largest number of its type."""
    sketch.match(40)
    sketch.v *= 0.99 * torch.finfo(sketch.dtype).max / sketch.v.max()


@designed()
def large_values(sketch: Sketch) -> None:
    """V of 1e9 (fp16: 2^14) and one key 69 nats above all others: P V may leave fp32's range before P does."""
    sketch.add(sketch.near(69), (sketch.key == len(sketch.key) // 2 - 3).float())
    sketch.v *= min(1e9, _LARGEST[sketch.dtype])


@designed()
def huge_values(sketch: Sketch) -> None:
    """V of 1e30 (fp16: 2^14): what P may grow to, times V, must stay within fp32's range."""
    sketch.noise(3)
    sketch.v *= min(1e30, _LARGEST[sketch.dtype])


# Jumps over what was before, in log2: just below and just above each power of two from 2^1 to 2^40


def _steps(sketch: Sketch, numbers: torch.Tensor) -> torch.Tensor:
    """A step for each number, 0.02 to 0.08 beside a power: neighbours are far apart, and 80 in a row have all."""
    number = numbers * 37 % (2 * _POWERS)
    beside = 0.02 + 0.06 * sketch.uniform(*numbers.shape)
    return 1 + number // 2 + torch.where(number % 2 == 0, -beside, beside)


def _jump(sketch: Sketch, steps: torch.Tensor, keys: torch.Tensor) -> None:
    """Rows jump by these steps at these keys, where V is zero in the odd columns."""
    sketch.add(steps * _LN2, keys.float())
    sketch.hide(keys)


@designed()
def jump_rows(sketch: Sketch) -> None:
    """Behind the last 128 keys, each row jumps by a step of its own."""
    _jump(sketch, _steps(sketch, sketch.row), sketch.behind >= _FIRST)


@designed()
def jump_warps(sketch: Sketch) -> None:
    """Behind the last 128 keys, all rows of a warp jump by the same step."""
    _jump(sketch, _steps(sketch, sketch.row // 16), sketch.behind >= _FIRST)


@designed()
def jump_lone_row(sketch: Sketch) -> None:
    """One row in 16 jumps; what it does to its neighbours must leave them right."""
    lone = sketch.row % 16 == 5
    _jump(
        sketch,
        torch.where(lone, _steps(sketch, sketch.row // 16), torch.zeros_like(sketch.row)),
        sketch.behind >= _FIRST,
    )


@designed()
def jump_key(sketch: Sketch) -> None:
    """One key jumps, in the middle of others that stay."""
    _jump(sketch, _steps(sketch, sketch.row), sketch.key == len(sketch.key) // 2 - 3)


@designed()
def jump_in_turn(sketch: Sketch) -> None:
    """Each key in turn jumps, for one row: by a step for each digit that it matches."""
    sketch.match(_LN2)
    sketch.q *= _steps(sketch, sketch.row)[..., None]


@designed()
def climbing(sketch: Sketch) -> None:
    """Every 64 keys scores climb by up to 8 in log2, 25 times: an anchor has to move again and again."""
    sketch.add(8 * _LN2 * sketch.uniform(*sketch.row.shape), (sketch.behind // 64).clamp(max=25))


@designed()
def leaping(sketch: Sketch) -> None:
    """Every 128 keys scores leap by a step, four times."""
    sketch.add(_steps(sketch, sketch.row) * _LN2, (sketch.behind // _FIRST).clamp(max=4))
