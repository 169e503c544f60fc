"""The general rungs on a real GPU (`pytest -m gpu`): thousands of problems with all that a rung takes, real sizes, and
tensors larger than 2^31 elements."""

import dataclasses
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashladder.common.api import attention
from flashladder.common.api.packed import packed_attention
from flashladder.common.catalog import FASTEST
from flashladder.common.compiler import BuildRequest, build, build_one
from flashladder.common.errors import BuildError
from flashladder.common.measure import packing
from flashladder.common.measure.timing import TimingSettings
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import gpu, target
from flashladder.common.runtime.execute import on_gpu
from flashladder.tests.support.far_apart import spread
from flashladder.tests.support.rung_features import LENGTHS
from flashladder.tests.support.rung_table import (
    ANY_LENGTH,
    GENERAL,
    LAUNCHED,
    WIDE,
    decided,
    draw,
    draw_config,
    id_of,
    tile_of,
)

pytestmark = pytest.mark.gpu
FEATURES = ("packed", "window", "softcap", "alibi")
MORE_LENGTHS = (*LENGTHS, (239, 1), (3, 799), (127, 512), (640, 128), (64, 65), (65, 64), (1023, 1024), (1024, 1023))


def kinds(rung):
    """Head_dim, type, mask and features: each feature alone, and all together, for each head_dim, type and mask.

    A rung that `attention` does not launch has fewer: each kind is a kernel to compile.
    """
    own = [name for name in FEATURES if getattr(rung.supports, name)]
    several = [(), *((name,) for name in own), *([tuple(own)] if len(own) > 1 else [])]
    found = [
        {"head_dim": head_dim, "dtype": dtype, "causal": causal} | dict.fromkeys(features, True)
        for head_dim, dtype, causal in itertools.product(rung.supports.head_dim, rung.supports.dtype, (False, True))
        for features in several
    ]
    return found[:: 1 if rung in (*LAUNCHED, *WIDE) else 5]


def name_of(kind):
    """d64-bf16-causal-packed"""
    return "-".join([f"d{kind['head_dim']}", kind["dtype"], *(name for name, value in kind.items() if value is True)])


KINDS = [(rung, kind) for rung in ANY_LENGTH for kind in kinds(rung)]
PLAIN = [(rung, kind) for rung, kind in KINDS if not kind.keys() & {*FEATURES}]


def of_each(cases):
    named = [pytest.param(rung, kind, id=f"{id_of(rung)}-{name_of(kind)}") for rung, kind in cases]
    return pytest.mark.parametrize(("rung", "kind"), named)


OF_EACH_RUNG = pytest.mark.parametrize("rung", GENERAL, ids=id_of)
OF_EACH_PACKED = pytest.mark.parametrize("rung", [rung for rung in GENERAL if rung.supports.packed], ids=id_of)
OF_EACH_HEAD_DIM = pytest.mark.parametrize(
    ("rung", "head_dim"),
    [(rung, head_dim) for rung in GENERAL for head_dim in rung.supports.head_dim],
    ids=lambda x: getattr(x, "address", x),
)
MASKS = pytest.mark.parametrize("causal", [False, True])


@pytest.fixture(scope="module", autouse=True)
def _built_at_once(request):
    """What the tests that were asked for run."""
    arch = gpu.device_arch()
    asked = {item.callspec.params.get("rung") for item in request.session.items if hasattr(item, "callspec")}
    build(
        [BuildRequest(rung, rung.config(**kind), arch) for rung, kind in KINDS if rung in asked and rung.runs_on(arch)]
    )


@pytest.fixture(autouse=True)
def _for_this_gpu(request):
    rung = request.node.callspec.params.get("rung") if hasattr(request.node, "callspec") else None
    if rung and not rung.runs_on(gpu.device_arch()):
        pytest.skip(f"{rung.name} has no instructions for {gpu.device_arch()}")


def launched(rung, problem, tensors=None, expected=None, **values):
    """Requires a right output."""
    tensors = tensors or make_inputs(problem, "cuda")
    config = rung.config_for(problem, **values)
    rung.check(problem, config)
    artifact = build_one(rung, config, gpu.device_arch())
    tensors.poison()
    with gpu.faults_named(artifact):
        on_gpu(artifact, problem, tensors)()
    verify(expected or expect(problem, tensors), tensors.outputs, tensors.buffers).require(
        f"{problem.name} with {config}"
    )


@of_each(KINDS)
def test_many_random_problems(rung, kind):
    rng = random.Random(name_of(kind))
    for _ in range(160 if (rung, kind) in PLAIN else 60):
        launched(rung, draw(rng, longest=1500, **kind))


@of_each(PLAIN)
def test_lengths_that_flash_attention_tests(rung, kind):
    for seqlen_q, seqlen_k in MORE_LENGTHS:
        launched(rung, Problem(batch=2, num_heads=6, num_heads_k=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **kind))


@OF_EACH_RUNG
def test_random_configurations(rung):
    rng = random.Random(0)
    configs = [draw_config(rng, rung) for _ in range(48 if rung in LAUNCHED else 12)]
    built = build([BuildRequest(rung, config, gpu.device_arch()) for config in configs], on_error="return")
    room = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    fitting = [
        config
        for config, artifact in zip(configs, built, strict=True)
        if not isinstance(artifact, BuildError) and artifact.launch.shared_bytes <= room
    ]
    assert len(fitting) * 48 > 20 * len(configs)
    for config in fitting:
        launched(rung, draw(rng, longest=1200, **{"causal": False} | decided(config)), **tile_of(config))


@pytest.mark.alone
@MASKS
@pytest.mark.parametrize("far", ["batch", "row", "head"])
@OF_EACH_RUNG
def test_offsets_past_two_to_the_31(rung, far, causal):
    """The last row of the last head of the last batch lies more than 2^31 elements from the first."""
    batch, seqlen, heads, head_dim = 2, 300, 2, 64
    step = 2**31 // {"batch": 1, "row": seqlen - 40, "head": 1}[far] // 8 * 8 + 64
    strides = {
        "batch": (step, heads * head_dim, head_dim, 1),
        "row": (head_dim, step, batch * head_dim, 1),
        "head": (seqlen * head_dim, head_dim, step, 1),
    }[far]
    problem = Problem(batch=batch, num_heads=heads, seqlen_q=seqlen, head_dim=head_dim, causal=causal)
    launched(rung, problem, *spread(problem, strides))


@MASKS
@OF_EACH_HEAD_DIM
def test_long_sequences(rung, head_dim, causal):
    """Many CTAs in many waves, and sections of heads under a causal mask."""
    problem = Problem(num_heads=24, num_heads_k=6, seqlen_q=4096, seqlen_k=9000, head_dim=head_dim, causal=causal)
    launched(rung, problem)


@MASKS
@OF_EACH_HEAD_DIM
def test_many_tiles_of_one_block(rung, head_dim, causal):
    """A persistent CTA has hundreds of them, one soon after the other: what is given back too early is overwritten."""
    heads = 40000 if head_dim <= 256 else 30000  # rung 24 has two CTAs for a head of 512, and a grid 65,535
    shape = {"num_heads": heads, "num_heads_k": heads // 2, "seqlen_q": 3, "seqlen_k": 17}
    for seed in range(3):
        launched(rung, Problem(**shape, head_dim=head_dim, causal=causal, seed=seed))


@OF_EACH_RUNG
def test_a_thread_that_has_not_used_the_gpu_may_launch(rung):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launched, rung, Problem(seqlen_q=100, seqlen_k=150, head_dim=64)).result()


@OF_EACH_PACKED
@MASKS
@pytest.mark.parametrize("mix", packing.MIXES)
def test_lengths_of_real_batches(rung, mix, causal):
    lengths = packing.lengths(mix, 16384)
    launched(rung, Problem(operation="packed", seqlens_q=lengths, num_heads=8, causal=causal))


@OF_EACH_PACKED
def test_a_thousand_short_sequences(rung):
    """Most tiles are not full, and many are of no rows."""
    rng = random.Random(0)
    seqlens = [rng.choice((0, 1, rng.randint(0, 200))) for _ in range(1000)]
    for head_dim in (64, 128):
        kind = {"head_dim": head_dim, "num_heads": 4, "num_heads_k": 2, "causal": True}
        launched(rung, Problem(operation="packed", seqlens_q=(*seqlens, 1), **kind))


@OF_EACH_PACKED
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
    kernels = packing.kernels(problem, FASTEST, target.resolve("gpu", None))
    measured = packing.contest(problem, kernels, TimingSettings(rounds=3))
    assert set(measured.checks) - {"fa3"} == {"fa2", "packed", "padded"}
