"""Rungs in configurations of every kind, on the emulator: what takes minutes (make test-long)."""

import itertools

import pytest

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.compiler import build_one
from flashladder.common.own import FIRST
from flashladder.common.problem.config import gpu_names, load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.tests.support.rung_features import cases
from flashladder.tests.support.rung_table import (
    DECIDED,
    GENERAL,
    LAUNCHED,
    OTHERS,
    RUNGS,
    covering,
    default_kind,
    emulated_as_configured,
    fullest,
    id_of,
)

pytestmark = pytest.mark.slow

WOVEN = catalog.find("woven_general")  # what the emulator is given, and GPUs before Hopper


def each(configs):
    """(rung, configuration) as a test's parameters."""
    ids = [f"{id_of(rung)}-{number}" for rung, of_rung in itertools.groupby(configs, lambda case: case[0])
           for number, _ in enumerate(of_rung)]  # fmt: skip
    return pytest.mark.parametrize(("rung", "config"), configs, ids=ids)


def of_other_rungs():
    """Of general rungs every head_dim that neither test_rungs.py nor test_features has. Of the others every second one
    has the other type: what depends on it lies in headers that they share."""
    for rung in (rung for rung in RUNGS if rung in GENERAL or int(rung.number) % 2 == 0):
        tested, name = default_kind(rung), "head_dim" if rung in GENERAL else "dtype"
        for config in [] if rung in LAUNCHED else covering(rung, ("dtype", "head_dim")):
            if getattr(config, name) != tested[name]:
                yield rung, config


def of_launched_rungs():
    """Every value of each, and every pair that problems decide, beside what all options at once have."""
    for rung in LAUNCHED:
        pairs = covering(rung, DECIDED, strength=2, beside=fullest(rung))
        for config in dict.fromkeys([*pairs, *covering(rung)]):
            yield rung, config


def with_all_options(operation, **options):
    """What Hopper launches for all options at once. Products of rungs for Ampere run beside nothing."""
    for rung in catalog.launched(operation, "sm_90a"):
        if rung.instruction_set == "hopper":
            for config in fullest(rung, "packed" if operation == FIRST else operation, **options):
                yield rung, config


def winning():
    """Each that the tuner found, in every kind that it stands for."""
    found = {}
    for winner in winners.every():
        if (rung := catalog.find(winner.version)) in LAUNCHED:
            config = winners.standing(winner)
            found[rung, str(config)] = rung, config
    return list(found.values())


@cases(OTHERS, once=True)
def test_features(check, rung):
    check(rung)


@each(list(of_other_rungs()))
def test_each_kind(rung, config):
    emulated_as_configured(rung, config)


@each(list(of_launched_rungs()))
@pytest.mark.in_turn
def test_what_attention_may_launch(rung, config):
    emulated_as_configured(rung, config)


@each(list(with_all_options(FIRST)))
@pytest.mark.in_turn
def test_all_options_at_once(rung, config):
    emulated_as_configured(rung, config)


@each(list(with_all_options("backward", dlse=True)))
def test_gradients_with_all_options_at_once_are_built(rung, config):
    """With registers that suffice for products that run beside other instructions."""
    build_one(rung, config, "sm_90a")


@each(winning())
def test_what_attention_launches(rung, config):
    emulated_as_configured(rung, config)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("gpu", {load_gpu(name).arch: name for name in gpu_names()}.values())
def test_defaults_fit_a_gpu_of_every_architecture(head_dim, gpu):
    described = load_gpu(gpu)
    artifact = build_one(WOVEN, WOVEN.config_for(Problem(head_dim=head_dim, causal=True), described), described.arch)
    assert artifact.launch.shared_bytes <= described.shared_per_block
    has_spill = described.arch == "sm_90a" and head_dim == 128  # as its page says
    assert artifact.spill_store_bytes <= (8 if has_spill else 0)
