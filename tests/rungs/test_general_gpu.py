"""The general rungs on a real GPU (`pytest -m gpu`): thousands of problems, and tensors larger than 2^31 elements."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from far_apart import spread
from general_problems import (
    DECIDED,
    FA_LENGTHS,
    GENERAL,
    HOPPERS,
    LAUNCHED,
    compiled_kinds,
    draw,
    draw_config,
    id_of,
    kinds,
)
from packed_problems import draw_bounds

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build, build_one
from flashladder.common.errors import BuildError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import gpu
from flashladder.common.runtime.execute import on_gpu

pytestmark = pytest.mark.gpu
BOUNDED = [
    catalog.find(name) for name in ("bounded", "packed_sequences", "scheduler_warp", "place_of_q", "column_of_ones")
]
RUNGS = list(dict.fromkeys([GENERAL, *HOPPERS, *BOUNDED]))
KINDS = [pytest.param(rung, kind, id=f"{rung.number}-{id_of(kind)}") for rung in RUNGS for kind in compiled_kinds(rung)]
EACH_HEAD_DIM = pytest.mark.parametrize(
    ("rung", "head_dim"),
    [(rung, head_dim) for rung in RUNGS for head_dim in rung.supports.head_dim],
    ids=lambda x: getattr(x, "number", x),
)


@pytest.fixture(autouse=True)
def _for_this_gpu(request):
    rung = request.node.callspec.params.get("rung")
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


@pytest.fixture(scope="module", autouse=True)
def _built_at_once():
    arch = gpu.device_arch()
    able = [rung for rung in RUNGS if rung.runs_on(arch)]
    build([BuildRequest(rung, rung.config(**kind), arch) for rung in able for kind in compiled_kinds(rung)])


@pytest.mark.parametrize(("rung", "kind"), KINDS)
def test_two_thousand_random_problems(rung, kind):
    rng = random.Random(id_of(kind))
    for _ in range(2000 // len(kinds(rung))):
        launched(rung, draw(rng, longest=1200, **kind))


@pytest.mark.parametrize(("rung", "kind"), [case for case in KINDS if case.values[0] in BOUNDED])
def test_many_random_windows_and_softcaps(rung, kind):
    rng = random.Random(f"window {id_of(kind)}")
    for _ in range(200):
        bounds = draw_bounds(rng, kind["causal"]) | {"alibi": False}
        launched(rung, draw(rng, longest=1500, **kind, **bounds))


@pytest.mark.parametrize(("rung", "kind"), KINDS)
def test_lengths_that_flash_attention_tests(rung, kind):
    for seqlen_q, seqlen_k in FA_LENGTHS:
        launched(rung, Problem(batch=2, num_heads=6, num_heads_k=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **kind))


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.number)
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
        kind = {name: getattr(config, name) for name in DECIDED if name in config.fields}
        launched(rung, draw(rng, longest=1200, **kind), **config.as_dict())


@pytest.mark.alone
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("far", ["batch", "row", "head"])
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.number)
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


@pytest.mark.parametrize("causal", [False, True])
@EACH_HEAD_DIM
def test_long_sequences(rung, head_dim, causal):
    """Many CTAs in many waves, and sections of heads under a causal mask."""
    problem = Problem(num_heads=24, num_heads_k=6, seqlen_q=4096, seqlen_k=9000, head_dim=head_dim, causal=causal)
    launched(rung, problem)


@pytest.mark.parametrize("causal", [False, True])
@EACH_HEAD_DIM
def test_many_tiles_of_one_block(rung, head_dim, causal):
    """A persistent CTA has hundreds of them, one soon after the other: what is given back too early is overwritten."""
    shape = {"num_heads": 40000, "num_heads_k": 20000, "seqlen_q": 3, "seqlen_k": 17}
    for seed in range(3):
        launched(rung, Problem(**shape, head_dim=head_dim, causal=causal, seed=seed))


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.number)
def test_a_thread_that_has_not_used_the_gpu_may_launch(rung):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launched, rung, Problem(seqlen_q=100, seqlen_k=150, head_dim=64)).result()
