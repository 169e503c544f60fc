"""Every rung of the ladder on the emulator: right outputs, in every dtype, without a race; and what a rung promises."""

import re

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

RUNGS = catalog.versions()
ARCH = {"ampere": "sm_80", "hopper": "sm_90a"}


@pytest.fixture(params=RUNGS, ids=lambda version: version.name)
def version(request):
    return request.param


def compiled(version, problem, **overrides):
    config = version.config_for(problem, **overrides)
    version.check(problem, config)
    return build_one(version, config, ARCH[version.instruction_set])


def emulated(version, problem, tensors=None, **overrides):
    """Runs a rung under the race detector and requires a right output; returns the emulator's report."""
    tensors = tensors or make_inputs(problem, "cpu")
    tensors.poison()
    report = on_emulator(compiled(version, problem, **overrides), problem, tensors)
    verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(version.name)
    return report


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_default(version, dtype):
    emulated(version, Problem(num_heads=2, seqlen_q=256, seqlen_k=384, dtype=dtype))


@pytest.mark.parametrize("number", ["00", "02", "12", "18"])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_random_problems_and_configurations(number, data):
    version = catalog.find(number)
    choices = {name: choice.values for name, choice in version.choices.items() if choice.values and name != "head_dim"}
    values = {name: data.draw(st.sampled_from(choices[name]), name) for name in choices}
    try:
        config = version.config(**values)
    except ConfigError:
        reject()  # a draw that breaks a rule of the space
    tiles = {"seqlen_q": config.block_m, "seqlen_k": config.block_n}
    lengths = {
        name: data.draw(st.integers(1, 200), name)
        if getattr(version.supports, name) == "any"
        else tile * data.draw(st.integers(1, 3), name)
        for name, tile in tiles.items()
    }
    layouts = ["bshd"] if "row_stride" in version.choices else ["bshd", "bhsd", "padded", "qkv"]
    if lengths["seqlen_q"] != lengths["seqlen_k"] and "qkv" in layouts:
        layouts.remove("qkv")
    problem = Problem(
        batch=data.draw(st.integers(1, 2), "batch"),
        num_heads=data.draw(st.integers(1, 3), "heads"),
        **lengths,
        dtype=config.dtype,
        layout=data.draw(st.sampled_from(layouts), "layout"),
        seed=data.draw(st.integers(0, 2**31), "seed"),
    )
    emulated(version, problem, **{name: value for name, value in values.items() if name != "row_stride"})


@pytest.mark.parametrize("number", ["18", "19", "20", "21", "22"])
@pytest.mark.parametrize(
    ("dtype", "growth", "blocks"),
    [("bf16", 1, 8), ("bf16", 4, 8), ("bf16", 400, 8 + 3 * 2), ("fp16", 1, 8), ("fp16", 400, 8)],
)
def test_scores_that_outgrow_their_anchor(number, dtype, growth, blocks):
    """Blocks are taken from the last: scores that grow towards the first block move the anchor, or jump out of range. A
    jump in one block is told of in the next, and then all begins anew with the first of both: three times at most."""
    problem = Problem(num_heads=1, seqlen_q=128, seqlen_k=512, dtype=dtype)
    tensors = make_inputs(problem, "cpu")
    ramp = torch.linspace(growth, 0.1, 512).reshape(1, 512, 1, 1)
    tensors.k.copy_(tensors.k * ramp)
    tensors.q.copy_(tensors.q.abs())
    tensors.k[:, :256].abs_()
    report = emulated(catalog.find(number), problem, tensors)
    once = (4 * problem.head_dim + 2 * 8) * 128 * 512  # with the sum of P, eight columns alike
    assert report.mma_flops == once * blocks / 8, "blocks are computed twice when a P jumped, and only then"


def test_tensors_with_another_row_stride_are_refused():
    problem = Problem(num_heads=2, seqlen_q=128)
    artifact = compiled(catalog.find("16"), Problem(num_heads=4, seqlen_q=128))
    with pytest.raises(UnsupportedProblemError, match=r"q has rows 256 elements apart; 16.*row_stride=512: configure"):
        on_emulator(artifact, problem, make_inputs(problem, "cpu"))


def test_a_shape_that_a_rung_does_not_take_names_one_that_does(version):
    problem = Problem(num_heads=2, seqlen_q=129, head_dim=128)
    if version.takes(problem):
        assert version.supports.seqlen_q == "any"
        return
    with pytest.raises(UnsupportedProblemError) as refusal:
        version.check(problem, version.config_for(problem))
    assert re.search(rf"{version.name} takes seqlen_. in multiples of .*, not 129", str(refusal.value))
    assert re.search(r"nearest rung that takes the problem is \d\d_\w+", str(refusal.value))
