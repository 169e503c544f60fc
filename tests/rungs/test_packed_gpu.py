"""Packed sequences, windows and softcaps on a real GPU (`pytest -m gpu`): real sizes, beside torch's own kernels."""

import dataclasses
import random

import pytest
import torch
from general_problems import GENERAL, compiled_kinds, draw, id_of, kinds
from packed_problems import draw_bounds, draw_packed

from flashladder.common import catalog
from flashladder.common.api import attention
from flashladder.common.api.packed import packed_attention
from flashladder.common.compiler import BuildRequest, build, build_one
from flashladder.common.measure import packing
from flashladder.common.measure.timing import TimingSettings
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import gpu, target
from flashladder.common.runtime.ahead import DEFAULT
from flashladder.common.runtime.execute import on_gpu

pytestmark = pytest.mark.gpu
KINDS = kinds(GENERAL)
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=id_of)
PACKED = [GENERAL, *map(catalog.find, ("packed_sequences", "scheduler_warp", "place_of_q", "column_of_ones"))]
OF_EACH_RUNG = pytest.mark.parametrize("rung", PACKED, ids=lambda rung: rung.number)
OF_EACH_RUNG_AND_KIND = pytest.mark.parametrize(
    ("rung", "kind"),
    [pytest.param(rung, kind, id=f"{rung.number}-{id_of(kind)}") for rung in PACKED for kind in compiled_kinds(rung)],
)
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
    able = [rung for rung in PACKED if rung.runs_on(arch)]
    wanted = [
        BuildRequest(rung, rung.config(**kind, **fields), arch)
        for rung in able
        for kind in compiled_kinds(rung)
        for fields in FIELDS
        if fields.keys() <= rung.choices.keys()
    ]
    build(wanted)


@pytest.fixture(autouse=True)
def _for_this_gpu(request):
    rung = request.node.callspec.params.get("rung") if hasattr(request.node, "callspec") else None
    if rung and not rung.runs_on(gpu.device_arch()):
        pytest.skip(f"{rung.name} has no instructions for {gpu.device_arch()}")


def launched(problem, tensors=None, rung=GENERAL):
    """Requires a right output."""
    tensors = tensors or make_inputs(problem, "cuda")
    config = rung.config_for(problem)
    rung.check(problem, config)
    artifact = build_one(rung, config, gpu.device_arch())
    tensors.poison()
    with gpu.faults_named(artifact):
        on_gpu(artifact, problem, tensors)()
    verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(f"{problem.name} with {config}")
    return tensors


@OF_EACH_RUNG_AND_KIND
def test_many_random_packed_problems(rung, kind):
    rng = random.Random(f"packed {id_of(kind)}")
    for _ in range(60):
        launched(draw_packed(rng, longest=1500, **kind), rung=rung)


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


@OF_EACH_RUNG_AND_KIND
def test_packed_with_windows(rung, kind):
    rng = random.Random(f"both {id_of(kind)}")
    for _ in range(30):
        bounds = draw_bounds(rng, kind["causal"]) | {"softcap": 0.0}
        if not rung.supports.alibi:
            bounds["alibi"] = False
        launched(dataclasses.replace(draw_packed(rng, longest=1500, **kind), **bounds), rung=rung)


@OF_EACH_RUNG
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mix", packing.MIXES)
def test_lengths_of_real_batches(rung, mix, causal):
    problem = Problem(operation="packed", seqlens_q=packing.lengths(mix, 16384), num_heads=8, causal=causal)
    launched(problem, rung=rung)


@OF_EACH_RUNG
def test_a_thousand_short_sequences(rung):
    """Most tiles are not full, and many are of no rows."""
    rng = random.Random(0)
    seqlens = [rng.choice((0, 1, rng.randint(0, 200))) for _ in range(1000)]
    for head_dim in (64, 128):
        kind = {"head_dim": head_dim, "num_heads": 4, "num_heads_k": 2, "causal": True}
        launched(Problem(operation="packed", seqlens_q=(*seqlens, 1), **kind), rung=rung)


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


@OF_EACH_RUNG
@pytest.mark.parametrize("wrong", [(0, 20000, 30000), (-5000, 3000, 8000), (0, 6000, 2000)], ids=str)
def test_whatever_cu_seqlens_say_the_gpu_does_not_fault(rung, wrong):
    problem = Problem(operation="packed", seqlens_q=(4000, 4000), num_heads=4, causal=True)
    tensors = make_inputs(problem, "cuda")
    for starts in (tensors.cu_seqlens_q, tensors.cu_seqlens_k):
        starts.copy_(torch.tensor(wrong, dtype=torch.int32))
    artifact = build_one(rung, rung.config_for(problem), gpu.device_arch())
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
    kernels = packing.kernels(problem, DEFAULT, target.resolve("gpu", None))
    measured = packing.contest(problem, kernels, TimingSettings(rounds=3))
    assert set(measured.checks) - {"fa3"} == {"fa2", "packed", "padded"}
