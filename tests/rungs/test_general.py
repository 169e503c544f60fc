"""The last general rung on the emulator: hundreds of problems of every kind, each checked, and under the race detector;
and what is special about them also on the one before."""

import dataclasses
import math
import random

import pytest
import torch
from general_problems import DECIDED, FA_LENGTHS, GENERAL, GENERALS, HEAD_DIMS, KINDS, draw, draw_config, id_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build, build_one
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.config import gpu_names, load_gpu
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

ARCH = "sm_80"
SMALL = {"block_m": 64, "block_n": 32}  # many tiles in short sequences
TILES = {"bf16": SMALL, "fp16": {}}


@pytest.fixture(scope="module", autouse=True)
def _built_at_once():
    """On every core, what the tests then find in the cache."""
    build([BuildRequest(GENERAL, GENERAL.config(**kind, **TILES[kind["dtype"]]), ARCH) for kind in KINDS])


@pytest.fixture(params=GENERALS, ids=lambda version: version.name)
def version(request):
    return request.param


def emulated(problem, tensors=None, version=GENERAL, **values):
    """Requires a right output without a race; returns the tensors and the emulator's report."""
    tensors = tensors or make_inputs(problem)
    config = version.config_for(problem, **(values or TILES[problem.dtype]))
    version.check(problem, config)
    report = on_emulator(build_one(version, config, ARCH), problem, tensors)
    verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(f"{problem.name} with {config}")
    return tensors, report


@pytest.mark.parametrize("kind", KINDS, ids=id_of)
def test_random_problems(kind):
    rng = random.Random(id_of(kind))
    for _ in range(19):
        emulated(draw(rng, longest=100, **kind))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 3), st.integers(1, 3), st.sampled_from(KINDS))
def test_any_lengths_and_heads(seqlen_q, seqlen_k, heads_k, group, kind):
    emulated(Problem(num_heads=heads_k * group, num_heads_k=heads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **kind))


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32))
def test_random_configurations(seed):
    rng = random.Random(seed)
    config = draw_config(rng)
    kind = {name: getattr(config, name) for name in DECIDED}
    emulated(draw(rng, longest=200, **kind), **config.as_dict())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", FA_LENGTHS, ids=str)
def test_lengths_that_flash_attention_tests(lengths, causal):
    seqlen_q, seqlen_k = lengths
    emulated(Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, causal=causal))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 1), (300, 70), (65, 64)])
def test_rows_that_see_no_key(version, head_dim, seqlen_q, seqlen_k):
    problem = Problem(num_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, causal=True)
    tensors, _ = emulated(problem, version=version)
    blind = seqlen_q - seqlen_k
    assert not tensors.o[:, :blind].any()
    assert (tensors.lse[:, :, :blind] == -math.inf).all()
    assert tensors.lse[:, :, blind:].isfinite().all()


def test_what_is_hidden_may_be_anything(version):
    """Neither a NaN behind the last key nor one behind a row's own reaches its output."""
    problem = Problem(seqlen_q=100, seqlen_k=150, head_dim=64, causal=True, layout="padded")
    clean, _ = emulated(problem, version=version)
    tensors = make_inputs(problem)
    last = 120
    tensors.k[:, last:] = math.nan
    on_emulator(build_one(version, version.config_for(problem, **SMALL), ARCH), problem, tensors)
    seen = last - (problem.seqlen_k - problem.seqlen_q)  # rows that see none of them
    assert torch.equal(tensors.o[:, :seen], clean.o[:, :seen])
    assert tensors.o[:, seen:].isnan().all()


@pytest.mark.parametrize("scale", [1e-30, 0.02, 3.0])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_scale(scale, causal):
    emulated(Problem(seqlen_q=70, seqlen_k=90, head_dim=64, causal=causal, softmax_scale=scale))


@pytest.mark.parametrize("growth", [1, 400], ids=["", "rows jump"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_without_lse_o_is_the_same(version, dtype, causal, growth):
    problem = Problem(seqlen_q=100, seqlen_k=300, num_heads=2, head_dim=64, dtype=dtype, causal=causal)
    without = dataclasses.replace(problem, lse=False)
    given = [make_inputs(problem), make_inputs(without)]
    for tensors in given:
        tensors.k.copy_(tensors.k * torch.linspace(growth, 1, 300).reshape(1, 300, 1, 1))
    (ours, _), (bare, report) = (
        emulated(asked, tensors, version, **SMALL) for asked, tensors in zip((problem, without), given, strict=True)
    )
    assert torch.equal(bare.o, ours.o)
    assert (set(bare.outputs), [buffer.names for buffer in bare.buffers][-1]) == ({"o"}, ("o",))
    assert report.bytes_written["global"] == bare.o.nbytes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "growth", "lost"), [("bf16", 1, False), ("bf16", 4, False), ("bf16", 400, True), ("fp16", 400, False)]
)
def test_scores_that_outgrow_their_anchor(version, dtype, growth, lost, causal):
    """Blocks are taken from the last: scores that grow towards the first key move the anchor, or jump out of range."""
    problem = Problem(seqlen_q=128, seqlen_k=512, dtype=dtype, causal=causal)
    tensors = make_inputs(problem)
    tensors.k.copy_(tensors.k * torch.linspace(growth, 0.1, 512).reshape(1, 512, 1, 1))
    tensors.q.abs_()
    tensors.k[:, :256].abs_()
    _, report = emulated(problem, tensors, version, block_m=128, block_n=64)
    # A warp leaves out the blocks, or the parts of 32 keys, of which it sees nothing.
    skipped = (64 * 64 if version.name == "23_general" else 32 * (32 + 64 + 96)) if causal else 0
    again = 3 * 2 * 64 * 128 if lost else 0  # thrice the block of a jump, and the one in which all warps know
    once = 4 * problem.head_dim + 2 * 8  # with the sum of P, eight columns alike
    assert report.mma_flops == once * (128 * 512 - skipped + again), "blocks are computed twice when a P jumped"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rise", [4.0, 7.0, 12.0])
def test_a_long_plateau_above_the_anchor(version, dtype, rise):
    """Every later key scores alike, and above the first block: many like weights, each with its full precision."""
    problem = Problem(seqlen_q=64, seqlen_k=1600, head_dim=64, dtype=dtype, softmax_scale=1.0)
    tensors = make_inputs(problem)
    tensors.q.zero_()
    tensors.q[..., 0] = 1
    tensors.k[:, :-64] *= 0.05
    tensors.k[:, :-64, :, 0] += rise
    tensors.k[:, -64:, :, 0] = 0
    tensors.v.copy_(tensors.v.abs() + 1)
    emulated(problem, tensors, version)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("gpu", {load_gpu(name).arch: name for name in gpu_names()}.values())
def test_defaults_fit_a_gpu_of_every_architecture(head_dim, gpu):
    described = load_gpu(gpu)
    config = GENERAL.config_for(Problem(head_dim=head_dim, causal=True), described)
    artifact = build_one(GENERAL, config, described.arch)
    assert artifact.launch.shared_bytes <= described.shared_per_block
    assert artifact.spill_store_bytes == 0


def test_it_is_what_other_rungs_advise():
    below = catalog.find("16")
    for problem in (
        Problem(causal=True),
        Problem(seqlen_q=129, head_dim=96),
        Problem(head_dim=256),
        Problem(num_heads=4, num_heads_k=2, dtype="fp16", causal=True, layout="padded"),
    ):
        assert GENERAL.takes(problem)
        with pytest.raises(UnsupportedProblemError, match=f"nearest rung that takes the problem is {GENERALS[0].name}"):
            below.check(problem, below.config())


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_strides_that_no_copy_can_follow_are_refused(name):
    problem = Problem(seqlen_q=64, head_dim=64)
    tensors = make_inputs(problem)
    artifact = build_one(GENERAL, GENERAL.config_for(problem, **SMALL), ARCH)
    odd = torch.zeros(1, 64, 1, 68, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(UnsupportedProblemError, match=rf"{name} has strides .*; kernels need multiples of 8 elements"):
        on_emulator(artifact, problem, dataclasses.replace(tensors, by_name={**tensors.by_name, name: odd}))
