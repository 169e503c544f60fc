"""Families of inputs that are hard on an attention kernel: scores and values by design, through q and k.

Normal random inputs hide what goes wrong in a softmax. Their scores lie close together, so that no maximum is far from
the first; and values of zero mean hide a bias, since weights that are all too small give the same zero. Here a function
a family says which scores a row sees and what V holds. Kernels take keys from the last to the first, so "first" and
"last" mean positions, and what is taken before is behind. V is positive, with another mean in each column: outputs fall
all over the steps of a 16-bit number, and a bias below half a step shows in the mean of many.

Where two groups of keys share a row's weight, V is zero at one group in the odd columns: O is the weight of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashladder.common.problem.families.sketch import Sketch, heads_first

NORMAL = "normal"
_FIRST = 128  # keys that every kernel takes before the others: whole blocks, whatever block_n is
_EDGES = (128, 192, 256)  # keys behind which plateaus of rows begin: at an edge of blocks, or amid one
_LARGEST = {torch.bfloat16: 2.0**100, torch.float16: 2.0**14}  # of V, with room for what a family multiplies it by
_POWERS = 40  # of two, up to which scores jump: beyond all that P may grow to
_LN2 = math.log(2)


Design = Callable[[Sketch], None]
ScaleOf = Callable[[torch.dtype], float]


@dataclass(frozen=True)
class Family:
    """A kind of inputs. Without a design: standard normal q, k and v."""

    name: str
    purpose: str
    design: Design | None = None
    softmax_scale: ScaleOf | None = None  # its default, where that is not 1/sqrt(head_dim)
    one_hot: bool = False  # each row's weight is on one key: O is a row of V, to the bit

    def draw(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, random: torch.Generator
    ) -> None:
        """Fills the tensors, (batch, seqlen, heads, head_dim), with numbers made on the generator's device."""
        if self.design is None:
            for tensor in (q, k, v):
                tensor.copy_(torch.randn(tensor.shape, generator=random, device=random.device))
            return
        for sequence in range(len(q)):
            inputs = [tensor[sequence : sequence + 1] for tensor in (q, k, v)]
            sketch = Sketch(inputs[0], inputs[1], softmax_scale, random)
            self.design(sketch)
            for tensor, drawn in zip(inputs, (sketch.q, sketch.k, sketch.v), strict=True):
                heads_first(tensor).copy_(drawn)


FAMILIES = {NORMAL: Family(NORMAL, "Standard normal q, k and v: what most tests use.")}


def _family(softmax_scale: ScaleOf | None = None, one_hot: bool = False) -> Callable[[Design], Design]:
    """Makes a design a family of its name, whose purpose is the first line of its docstring."""

    def register(design: Design) -> Design:
        purpose = (design.__doc__ or "").partition("\n")[0]
        FAMILIES[design.__name__] = Family(design.__name__, purpose, design, softmax_scale, one_hot)
        return design

    return register


# Spreads


@_family()
def normal_3(sketch: Sketch) -> None:
    """Normal scores of 3 nats, as trained models have them."""
    sketch.noise(3)


@_family()
def normal_10(sketch: Sketch) -> None:
    """Normal scores of 10 nats: few keys count, and maxima are far apart."""
    sketch.noise(10)


@_family()
def outlier_channels(sketch: Sketch) -> None:
    """Four channels of K with a large mean, and four columns of V that are much larger."""
    sketch.q.copy_(sketch.normal(*sketch.q.shape))
    sketch.k.copy_(sketch.normal(*sketch.k.shape))
    sketch.q[..., :4] *= 3
    sketch.k[..., :4] += 8
    sketch.v[..., :4] *= 64


@_family()
def sinks(sketch: Sketch) -> None:
    """Attention sinks: the first four keys take most of the weight and have small values."""
    sketch.add(sketch.near(8), (sketch.key < 4).float())
    sketch.noise(1)
    sketch.v[:, :4] *= 0.01


@_family()
def equal_keys(sketch: Sketch) -> None:
    """All keys are the same, so that O is the mean of V."""
    sketch.q.copy_(sketch.normal(*sketch.q.shape))
    sketch.k.copy_(sketch.normal(len(sketch.k), 1, sketch.k.shape[-1]).expand_as(sketch.k))


@_family(softmax_scale=lambda dtype: 2.0**-20 if dtype == torch.float16 else 2.0**-100)
def tiny_scale(sketch: Sketch) -> None:
    """Normal scores from a tiny softmax_scale and large q and k."""
    sketch.noise(1)


@_family(softmax_scale=lambda dtype: 2.0**20 if dtype == torch.float16 else 2.0**100)
def huge_scale(sketch: Sketch) -> None:
    """Normal scores from a huge softmax_scale and tiny q and k."""
    sketch.noise(1)


# Slopes


@_family()
def rising_gently(sketch: Sketch) -> None:
    """Scores rise along the keys by some nats: kernels meet the largest first."""
    sketch.add(5 + 5 * sketch.uniform(*sketch.row.shape), sketch.key / len(sketch.key))


@_family()
def falling_gently(sketch: Sketch) -> None:
    """Scores fall along the keys by some nats: each block that kernels take is a little above the last."""
    sketch.add(5 + 5 * sketch.uniform(*sketch.row.shape), sketch.behind / len(sketch.key))


@_family()
def rising_steeply(sketch: Sketch) -> None:
    """Scores rise by 13 to 26 nats every 64 keys, up to 200: only the last count."""
    sketch.add(1 + sketch.uniform(*sketch.row.shape), -(0.2 * sketch.behind).clamp(max=100))


@_family()
def falling_steeply(sketch: Sketch) -> None:
    """Scores fall by 13 to 26 nats every 64 keys, by 200 at most: all that was summed before is as nothing."""
    sketch.add(1 + sketch.uniform(*sketch.row.shape), -(0.2 * sketch.key).clamp(max=100))


# Plateaus


@_family()
def lone_top(sketch: Sketch) -> None:
    """The last key is 10.47 nats above all others, and V is zero there: O is the weight of all that is small."""
    sketch.add(sketch.near(-10.47), (sketch.behind > 0).float())
    sketch.v[:, -1] = 0


def _plateau(sketch: Sketch, nats: float) -> None:
    """All keys but the last 64 are so far above those."""
    sketch.add(sketch.near(nats), (sketch.behind >= 64).float())


@_family()
def plateau_2(sketch: Sketch) -> None:
    """Equal keys, 2 nats above the last 64."""
    _plateau(sketch, 2)


@_family()
def plateau_3(sketch: Sketch) -> None:
    """Keys 3.12 nats above the last 64, with a little noise."""
    _plateau(sketch, 3.12)
    sketch.noise(0.05)


@_family()
def plateau_4(sketch: Sketch) -> None:
    """Equal keys, 4.5 nats above the last 64."""
    _plateau(sketch, 4.5)


@_family()
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


@_family()
def plateau_rows(sketch: Sketch) -> None:
    """Equal keys, 1 to 7 in log2 above the last 128, 192 or 256: another height in each row."""
    _risen(sketch)


@_family()
def plateau_sparse(sketch: Sketch) -> None:
    """The same of one key in 64, 40 nats above all others: P of one lane weighs, and its sum is small."""
    _risen(sketch)
    sketch.add(sketch.near(40), (sketch.behind % 64 == 37).float())


# One key


def _dominant(sketch: Sketch, key: int) -> None:
    """One key is 12 nats above normal scores; V is small at all others."""
    chosen = sketch.key == key
    sketch.add(sketch.near(12), chosen.float())
    sketch.noise(1)
    sketch.v[:, ~chosen] *= 2.0**-6


@_family()
def dominant_first(sketch: Sketch) -> None:
    """One key dominates, the first: kernels meet it last."""
    _dominant(sketch, 0)


@_family()
def dominant_middle(sketch: Sketch) -> None:
    """One key dominates, in the middle."""
    _dominant(sketch, len(sketch.key) // 2)


@_family()
def dominant_last(sketch: Sketch) -> None:
    """One key dominates, the last: kernels meet it first."""
    _dominant(sketch, len(sketch.key) - 1)


@_family(one_hot=True)
def one_hot(sketch: Sketch) -> None:
    """Each row has one key, 40 nats above all others: O is a row of V."""
    sketch.match(40)


@_family(one_hot=True)
def huge_scores(sketch: Sketch) -> None:
    """The same with products q k of 2^28 and more, where fp32 numbers are 32 apart."""
    sketch.match(2.0**28 * sketch.scale)


@_family()
def maximum_in_turn(sketch: Sketch) -> None:
    """Each key in turn is the maximum of a row, 3 to 4 nats above: every place in a tile, so every lane, once."""
    sketch.match(3)
    sketch.q *= 1 + 0.25 * sketch.uniform(*sketch.row.shape, 1)


# Large values


@_family()
def large_values(sketch: Sketch) -> None:
    """V of 1e9 (fp16: 2^14) and one key 69 nats above all others: P V may leave fp32's range before P does."""
    sketch.add(sketch.near(69), (sketch.key == len(sketch.key) // 2 - 3).float())
    sketch.v *= min(1e9, _LARGEST[sketch.dtype])


@_family()
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


@_family()
def jump_rows(sketch: Sketch) -> None:
    """Behind the last 128 keys, each row jumps by a step of its own."""
    _jump(sketch, _steps(sketch, sketch.row), sketch.behind >= _FIRST)


@_family()
def jump_warps(sketch: Sketch) -> None:
    """Behind the last 128 keys, all rows of a warp jump by the same step."""
    _jump(sketch, _steps(sketch, sketch.row // 16), sketch.behind >= _FIRST)


@_family()
def jump_lone_row(sketch: Sketch) -> None:
    """One row in 16 jumps; what it does to its neighbours must leave them right."""
    lone = sketch.row % 16 == 5
    _jump(
        sketch,
        torch.where(lone, _steps(sketch, sketch.row // 16), torch.zeros_like(sketch.row)),
        sketch.behind >= _FIRST,
    )


@_family()
def jump_key(sketch: Sketch) -> None:
    """One key jumps, in the middle of others that stay."""
    _jump(sketch, _steps(sketch, sketch.row), sketch.key == len(sketch.key) // 2 - 3)


@_family()
def jump_in_turn(sketch: Sketch) -> None:
    """Each key in turn jumps, for one row: by a step for each digit that it matches."""
    sketch.match(_LN2)
    sketch.q *= _steps(sketch, sketch.row)[..., None]


@_family()
def climbing(sketch: Sketch) -> None:
    """Every 64 keys scores climb by up to 8 in log2, 25 times: an anchor has to move again and again."""
    sketch.add(8 * _LN2 * sketch.uniform(*sketch.row.shape), (sketch.behind // 64).clamp(max=25))


@_family()
def leaping(sketch: Sketch) -> None:
    """Every 128 keys scores leap by a step, four times."""
    sketch.add(_steps(sketch, sketch.row) * _LN2, (sketch.behind // _FIRST).clamp(max=4))
