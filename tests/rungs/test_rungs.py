"""Every rung on the emulator, under the race detector; and all that those do which `attention` launches."""

import dataclasses
import re

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.rung_features import cases
from flashladder.tests.support.rung_table import (
    GENERAL,
    LAUNCHED,
    OF_MODS,
    RUNGS,
    built,
    default_kind,
    emulated,
    masked,
    mostly_slow,
    tile_of,
)

EACH = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)


def as_first_tested(rung):
    """The problem and the configuration: in one head_dim and type; test_configurations.py has the others."""
    problem = Problem(num_heads=2, seqlen_q=256, seqlen_k=384, **default_kind(rung))
    return problem, tile_of(rung.config_for(problem))


@pytest.mark.parametrize("rung", mostly_slow(RUNGS))
def test_default(rung):
    problem, tile = as_first_tested(rung)
    emulated(rung, problem, **tile)


@pytest.mark.slow
@EACH
def test_default_has_no_spills(rung):
    """But those that a rung declares; nor does ptxas run its products one by one."""
    problem, tile = as_first_tested(rung)
    built(rung, problem, build_one, **tile)


@cases(LAUNCHED, quick=(catalog.find("48"),))
def test_what_attention_launches(check, rung):
    check(rung)


@cases(OF_MODS, quick=(), only="mods")
@pytest.mark.in_turn
def test_expressions(check, rung):
    check(rung)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_an_expression_any_mask_is_its_parent(head_dim):
    """To the last byte of its machine code, by default: what the rung brings costs nothing where it is not used."""
    rung = catalog.find("51")
    found = [
        build_one(each, each.config(head_dim=head_dim), "sm_90a").code for each in (rung, catalog.find(rung.parent))
    ]
    assert found[0] == found[1]


@EACH
def test_a_shape_that_a_rung_does_not_take_names_one_that_does(rung):
    problem = Problem(num_heads=2, seqlen_q=129, head_dim=rung.config().head_dim)
    if rung.takes(problem):
        assert rung.supports.seqlen_q == "any"
        return
    with pytest.raises(UnsupportedProblemError) as refusal:
        rung.check(problem, rung.config_for(problem))
    assert re.search(rf"{rung.name} takes seqlen_. in multiples of .*, not 129", str(refusal.value))
    able = [other for other in rung.its_ladder() if other.takes(problem)]
    named = re.search(r"nearest rung that takes the problem is (\w+)", str(refusal.value))
    assert named[1] in [other.name for other in able] if able else named is None


@pytest.mark.parametrize(
    ("feature", "lack"),
    [
        ({"causal": True}, "causal mask"),
        ({"window_left": 3}, "sliding window"),
        ({"softcap": 2.0}, "softcap"),
        ({"alibi": True}, "ALiBi"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_rung_without_a_feature_names_one_with_it(feature, lack):
    problem = Problem(**feature)
    able = [rung for rung in RUNGS if rung.takes(problem)]
    for rung in {rung for rung in RUNGS if problem.head_dim in rung.supports.head_dim} - set(able):
        with pytest.raises(UnsupportedProblemError, match=f"has no {lack}") as refusal:
            rung.config_for(problem)
        named = re.search(r"nearest rung that takes the problem is (\w+)", str(refusal.value))
        assert named is None if rung.ladder != catalog.FIRST else catalog.find(named[1]) in able


def test_a_rung_without_packed_sequences_names_one_with_them():
    problem = Problem(operation="packed", seqlens_q=(3, 2), head_dim=64)
    general, woven = catalog.find("23"), catalog.find("24")
    with pytest.raises(UnsupportedProblemError, match=f"forward, not packed; the nearest rung .* is {woven.name}"):
        general.config_for(problem)
    with pytest.raises(UnsupportedProblemError, match="is configured for packed=false, but the problem has packed=tru"):
        woven.check(problem, woven.config_for(Problem(head_dim=64)))


def test_tensors_with_another_row_stride_are_refused():
    problem = Problem(num_heads=2, seqlen_q=128)
    artifact = built(catalog.find("16"), Problem(num_heads=4, seqlen_q=128))
    with pytest.raises(UnsupportedProblemError, match=r"q has rows 256 elements apart; 16.*row_stride=512: configure"):
        on_emulator(artifact, problem, make_inputs(problem))


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_strides_that_no_copy_can_follow_are_refused(name):
    problem = masked(seqlen_q=64)
    tensors, artifact = make_inputs(problem), built(GENERAL[-1], problem)
    odd = torch.zeros(1, 64, 1, 68, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(UnsupportedProblemError, match=rf"{name} has strides .*; kernels need multiples of 8 elements"):
        on_emulator(artifact, problem, dataclasses.replace(tensors, by_name={**tensors.by_name, name: odd}))
