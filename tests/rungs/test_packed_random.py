"""Packed sequences, windows and softcaps of every kind on the emulator: what takes minutes (make test-long)."""

import dataclasses
import random

import pytest
import test_general_hopper
from general_problems import APART, DECIDED, KINDS, draw, draw_config, id_of, kinds
from packed_problems import SMALL, draw_bounds, draw_packed, emulated

from flashladder.common import catalog

HOPPER = catalog.find("column_of_ones")
TILES = {"bf16": SMALL, "fp16": {"edge_n": 16}}
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=id_of)


@OF_EACH_KIND
def test_packed(kind):
    rng = random.Random(f"packed {id_of(kind)}")
    for _ in range(6):
        emulated(draw_packed(rng, longest=150, **kind), **TILES[kind["dtype"]])


@pytest.mark.parametrize("kind", kinds(HOPPER), ids=id_of)
def test_packed_on_hopper(kind):
    """With windows and softcaps, and without."""
    rng = random.Random(f"hopper {id_of(kind)}")
    for _ in range(2):
        problem = draw_packed(rng, longest=300, **kind)
        test_general_hopper.emulated(HOPPER, problem)
        bounds = draw_bounds(rng, kind["causal"]) | {"alibi": False}
        test_general_hopper.emulated(HOPPER, dataclasses.replace(problem, **bounds))


@OF_EACH_KIND
def test_windows(kind):
    rng = random.Random(f"window {id_of(kind)}")
    for _ in range(8):
        problem = dataclasses.replace(draw(rng, longest=250, **kind), **draw_bounds(rng, kind["causal"]))
        emulated(problem, **TILES[kind["dtype"]])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind["head_dim"] in (64, 256)], ids=id_of)
def test_all_together(kind):
    rng = random.Random(f"all {id_of(kind)}")
    for _ in range(4):
        bounds = draw_bounds(rng, kind["causal"]) | {"softcap": rng.choice((1.0, 30.0, 50.0))}
        problem = dataclasses.replace(draw_packed(rng, longest=150, **kind), **bounds)
        emulated(problem, **TILES[kind["dtype"]])


@pytest.mark.parametrize("seed", range(6))
def test_random_configurations(seed):
    rng = random.Random(seed)
    config = draw_config(rng)
    kind = {name: getattr(config, name) for name in ("head_dim", "dtype", "causal")}
    problem = dataclasses.replace(draw_packed(rng, longest=200, **kind), lse=config.lse)
    tile = {name: value for name, value in config.as_dict().items() if name not in {*DECIDED, *APART}}
    emulated(dataclasses.replace(problem, **draw_bounds(rng, kind["causal"])), **tile)
