"""Packed sequences, windows and softcaps on a real GPU (`pytest -m gpu`): real sizes, beside torch's own kernels."""

import dataclasses
import random

import pytest
import torch
from general_problems import GENERAL, draw, id_of, kinds
from packed_problems import draw_bounds, draw_packed

from flashladder.common.attention import attention
from flashladder.common.attention.packed import packed_attention
from flashladder.common.build import BuildRequest, build, build_one
from flashladder.common.measure import packing
from flashladder.common.measure.timing import TimingSettings
from flashladder.common.problem import Problem, expect, make_inputs, verify
from flashladder.common.run import gpu, target
from flashladder.common.run.ahead import DEFAULT
from flashladder.common.run.execute import on_gpu

pytestmark = pytest.mark.gpu
KINDS = kinds(GENERAL)
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=id_of)
FIELDS = (
    {"packed": True},
    {"window": True},
    {"window": True, "softcap": True},
    {"packed": True, "window": True},
    {"alibi": True},
)


@pytest.fixture(scope="module", autouse=True)
def _built_at_once():
    arch = gpu.device_arch()
    build([BuildRequest(GENERAL, GENERAL.config(**kind, **fields), arch) for kind in KINDS for fields in FIELDS])


def launched(problem, tensors=None):
    """Requires a right output."""
    tensors = tensors or make_inputs(problem, "cuda")
    config = GENERAL.config_for(problem)
    GENERAL.check(problem, config)
    artifact = build_one(GENERAL, config, gpu.device_arch())
    tensors.poison()
    with gpu.faults_named(artifact):
        on_gpu(artifact, problem, tensors)()
    verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(f"{problem.name} with {config}")
    return tensors


@OF_EACH_KIND
def test_many_random_packed_problems(kind):
    rng = random.Random(f"packed {id_of(kind)}")
    for _ in range(60):
        launched(draw_packed(rng, longest=1500, **kind))


@OF_EACH_KIND
def test_many_random_windows_and_softcaps(kind):
    rng = random.Random(f"window {id_of(kind)}")
    for _ in range(60):
        problem = draw(rng, longest=1500, **kind)
        launched(dataclasses.replace(problem, **draw_bounds(rng, kind["causal"])))


@OF_EACH_KIND
def test_many_random_slopes(kind):
    rng = random.Random(f"alibi {id_of(kind)}")
    for _ in range(30):
        launched(dataclasses.replace(draw(rng, longest=1500, **kind), alibi=True))
        launched(dataclasses.replace(draw_packed(rng, longest=1500, **kind), alibi=True))


@OF_EACH_KIND
def test_packed_with_windows(kind):
    rng = random.Random(f"both {id_of(kind)}")
    for _ in range(30):
        bounds = draw_bounds(rng, kind["causal"]) | {"softcap": 0.0}
        launched(dataclasses.replace(draw_packed(rng, longest=1500, **kind), **bounds))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mix", packing.MIXES)
def test_lengths_of_real_batches(mix, causal):
    launched(Problem(operation="packed", seqlens_q=packing.lengths(mix, 16384), num_heads=8, causal=causal))


@pytest.mark.parametrize("window", [(1023, 0), (4095, 0), (512, 512)], ids=str)
def test_windows_of_real_models(window):
    """Mistral's and Gemma's among them, against FlashAttention-2's own windows."""
    problem = Problem(seqlen_q=8192, num_heads=8, num_heads_k=2)
    tensors = make_inputs(problem, "cuda")
    given = (tensors.q, tensors.k, tensors.v)
    o = attention(*given, window=window)
    k, v = (x.repeat_interleave(4, 2) for x in given[1:])
    left, right = window
    theirs, *_ = torch.ops.aten._flash_attention_forward.default(
        tensors.q, k, v, None, None, 8192, 8192, 0.0, False, False, window_size_left=left, window_size_right=right
    )
    torch.testing.assert_close(o, theirs, atol=4e-3, rtol=2e-2)


@pytest.mark.parametrize("wrong", [(0, 20000, 30000), (-5000, 3000, 8000), (0, 6000, 2000)], ids=str)
def test_whatever_cu_seqlens_say_the_gpu_does_not_fault(wrong):
    problem = Problem(operation="packed", seqlens_q=(4000, 4000), num_heads=4, causal=True)
    tensors = make_inputs(problem, "cuda")
    for starts in (tensors.cu_seqlens_q, tensors.cu_seqlens_k):
        starts.copy_(torch.tensor(wrong, dtype=torch.int32))
    artifact = build_one(GENERAL, GENERAL.config_for(problem), gpu.device_arch())
    with gpu.faults_named(artifact):
        on_gpu(artifact, problem, tensors)()
        torch.cuda.synchronize()
    assert [buffer.damage() for buffer in tensors.buffers] == [None] * len(tensors.buffers)


def test_a_cuda_graph_takes_other_lengths():
    """cu_seqlens are data: a graph that was captured once computes whatever they say later."""
    problem = Problem(operation="packed", seqlens_q=(300, 0, 212), num_heads=4, head_dim=64, causal=True)
    tensors = make_inputs(problem, "cuda")
    given = (tensors.q[0], tensors.k[0], tensors.v[0], tensors.cu_seqlens_q, tensors.cu_seqlens_k, 512, 512)
    packed_attention(*given, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = packed_attention(*given, causal=True)
    other = dataclasses.replace(problem, seqlens_q=(1, 500, 11), seqlens_k=(1, 500, 11))
    for starts in given[3:5]:
        starts.copy_(torch.tensor((0, 1, 501, 512), dtype=torch.int32))
    graph.replay()
    expected = expect(other, tensors)
    assert (o - expected.exact["o"][0]).abs().max() <= expected.tolerances["o"]


def test_the_benchmark_runs():
    problem = Problem(operation="packed", seqlens_q=packing.lengths("spread", 8192), num_heads=4, causal=True)
    measured = packing.contest(problem, DEFAULT, target.resolve("gpu", None), TimingSettings(rounds=3))
    assert set(measured.checks) - {"fa3"} == {"fa2", "packed", "padded"}
