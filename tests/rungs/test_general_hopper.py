"""The general Hopper rungs on the emulator, under the race detector: lengths, heads, masks, rows that see nothing."""

import itertools
import math
import random
from contextlib import suppress

import pytest
import torch
from general_problems import FA_LENGTHS, HOPPERS, draw, id_of, kinds

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.errors import ConfigError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import ahead, tuned
from flashladder.common.runtime.execute import EMULATED_SMS, on_emulator

ARCH = "sm_90a"
KINDS = [pytest.param(rung, kind, id=f"{rung.number}-{id_of(kind)}") for rung in HOPPERS for kind in kinds(rung)]
WINNERS = [each for each in tuned.every() if catalog.find(each.version) in map(catalog.find, ahead.RIVALS)]
EACH = pytest.mark.parametrize("rung", HOPPERS, ids=lambda rung: rung.number)


def emulated(rung, problem, tensors=None, num_sms=EMULATED_SMS, **values):
    """Requires a right output without a race."""
    tensors = tensors or make_inputs(problem)
    config = rung.config_for(problem, **values)
    rung.check(problem, config)
    on_emulator(build_one(rung, config, ARCH), problem, tensors, num_sms=num_sms)
    verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(f"{problem.name} with {config}")
    return tensors


@pytest.mark.parametrize(("rung", "kind"), KINDS)
def test_random_problems(rung, kind):
    rng = random.Random(id_of(kind))
    for _ in range(3):
        emulated(rung, draw(rng, longest=300, **kind))


def kind_of(winner):
    config = tuned.standing(winner)
    return {name: getattr(config, name) for name in ("dtype", "head_dim", "causal")}


DISTINCT = {(winner.version, str(kind_of(winner)), str(winner.values)): winner for winner in WINNERS}


@pytest.mark.parametrize("winner", DISTINCT.values(), ids=lambda each: f"{each.version[:2]}-{each.kind}")
def test_random_problems_of_winners(winner):
    """What attention launches."""
    rung, kind = catalog.find(winner.version), kind_of(winner)
    rng = random.Random(winner.kind)
    for _ in range(3):
        emulated(rung, draw(rng, longest=300, **kind), **winner.values)


def tiles(*names):
    """Every block_m and block_n of some rungs, where some of their configurations have them, with the fewest places."""
    for rung in map(catalog.find, names):
        fields = {name: rung.choices[name].values for name in ("block_m", "block_n", "q_in_registers", "num_stages")}
        one_place = {"q_stages": 1} if "q_stages" in rung.choices else {}
        seen = set()
        for head_dim, *values in itertools.product((64, 128), *fields.values()):
            tile, config = (head_dim, *values[:-1]), dict(zip(fields, values, strict=True), **one_place)
            with suppress(ConfigError):
                rung.config(head_dim=head_dim, **config)
                if tile not in seen:
                    yield pytest.param(rung, head_dim, config, id="-".join(map(str, (rung.number, *tile))))
                seen.add(tile)


@pytest.mark.parametrize(("rung", "head_dim", "tile"), list(tiles(*ahead.RIVALS)))
def test_every_tile_that_attention_may_launch(rung, head_dim, tile):
    problem = Problem(num_heads=2, seqlen_q=tile["block_m"] + 70, seqlen_k=200, head_dim=head_dim, causal=True)
    emulated(rung, problem, **tile)


@pytest.mark.parametrize(
    ("rung", "head_dim", "tile"),
    list(tiles("from_the_end", "across_tiles", "scheduler_warp", "place_of_q", "column_of_ones")),
)
def test_whole_tiles_that_one_cta_computes_one_after_another(rung, head_dim, tile):
    """Each warpgroup of a tile sees another number of blocks, so that some are passed while the tile before ends."""
    problem = Problem(num_heads=3, seqlen_q=tile["block_m"], head_dim=head_dim, causal=True)
    emulated(rung, problem, **tile, num_sms=1)


@pytest.mark.parametrize("lengths", FA_LENGTHS[:8], ids=str)
@EACH
def test_lengths_that_flash_attention_tests(rung, lengths):
    seqlen_q, seqlen_k = lengths
    emulated(rung, Problem(num_heads=4, num_heads_k=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, causal=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@EACH
def test_rows_that_see_no_key(rung, head_dim):
    """Whole tiles of them, for which nothing is copied, and the first rows of others."""
    problem = Problem(seqlen_q=500, seqlen_k=70, head_dim=head_dim, causal=True)
    tensors = emulated(rung, problem)
    blind = problem.seqlen_q - problem.seqlen_k
    assert not tensors.o[:, :blind].any()
    assert (tensors.lse[:, :, :blind] == -math.inf).all()
    assert tensors.lse[:, :, blind:].isfinite().all()


@EACH
def test_rows_that_see_no_key_are_zero_whatever_is_in_v(rung):
    """Their tile has rows that see one, for which V is read: 0 times NaN would be NaN."""
    problem = Problem(seqlen_q=100, seqlen_k=70, head_dim=64, causal=True)
    tensors = make_inputs(problem)
    tensors.v.fill_(math.nan)
    on_emulator(build_one(rung, rung.config_for(problem), ARCH), problem, tensors)
    assert not tensors.o[:, :30].any()
    assert tensors.o[:, 30:].isnan().all()


@EACH
def test_what_is_hidden_may_be_anything(rung):
    """Neither a NaN behind the last key nor one behind a row's own reaches its output."""
    problem = Problem(seqlen_q=100, seqlen_k=150, head_dim=64, causal=True, layout="padded")
    clean, tensors = emulated(rung, problem), make_inputs(problem)
    last = 120
    tensors.k[:, last:] = math.nan
    on_emulator(build_one(rung, rung.config_for(problem), ARCH), problem, tensors)
    seen = last - (problem.seqlen_k - problem.seqlen_q)  # rows that see none of them
    assert torch.equal(tensors.o[:, :seen], clean.o[:, :seen])
    assert tensors.o[:, seen:].isnan().all()


@pytest.mark.parametrize("dtype", HOPPERS[0].supports.dtype)
@EACH
def test_scores_that_climb_raise_the_maximum_again_and_again(rung, dtype):
    """Blocks are taken from the last key on: each has scores far above those before it, in some rows only."""
    problem = Problem(seqlen_q=128, seqlen_k=640, dtype=dtype)
    tensors = make_inputs(problem)
    tensors.k.copy_(tensors.k * torch.linspace(40, 0.1, 640).reshape(1, 640, 1, 1))
    tensors.q[:, ::3].abs_()
    tensors.k.abs_()
    emulated(rung, problem, tensors)


@EACH
def test_a_grid_smaller_than_the_tiles_draws_them_all(rung):
    emulated(rung, Problem(batch=3, num_heads=5, seqlen_q=300, seqlen_k=129, head_dim=64, causal=True))
