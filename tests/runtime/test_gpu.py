"""Every rung on a real GPU (`pytest -m gpu`): layouts, dtypes, configurations, graphs, streams, devices, sanitizers."""

import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build, build_one
from flashladder.common.errors import DeviceError, UnsupportedProblemError
from flashladder.common.measure import baselines
from flashladder.common.measure.contest import hold
from flashladder.common.measure.timing import Contender, TimingSettings, measure
from flashladder.common.problem.check import Check, expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.operations.forward import LAYOUTS
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import gpu
from flashladder.common.runtime.execute import on_gpu
from flashladder.tests.support import run_every_rung
from flashladder.tests.support.far_apart import spread
from flashladder.tests.support.tiny_ladder import make_rung

pytestmark = pytest.mark.gpu

RUNGS = [version for version in catalog.versions() if version.takes(Problem())]
MAX_LAUNCH_COST = 0.5  # of what SDPA costs the host
RIGHT = Check(0.0, 1.0, 0.0, 1.0, faults=())


def small(**options) -> Problem:
    return Problem(**{"batch": 2, "num_heads": 3, "seqlen_q": 256, **options})


def takers(*problems):
    """A test for every rung and each of the problems that it takes."""
    return pytest.mark.parametrize(
        ("version", "problem"),
        [
            pytest.param(version, problem, id=f"{version.name}-{problem.name}")
            for version in RUNGS
            for problem in problems
            if version.takes(problem)
        ],
    )


def compiled(version, problem):
    """The rung's default configuration for a problem."""
    return build_one(version, version.config_for(problem), gpu.device_arch())


def checked(problem, artifact):
    name = artifact.version
    hold(problem, {name: artifact}, [], None).checks[name].require(gpu.describe(artifact))


@pytest.fixture(params=RUNGS, ids=lambda version: version.name)
def version(request):
    return request.param


@pytest.fixture
def launched():
    """A rung on a problem: the launch, its tensors, and what they should hold afterwards."""

    def prepare(name="02", **options):
        problem = small(**options)
        artifact = compiled(catalog.find(name), problem)
        tensors = make_inputs(problem, "cuda")
        return on_gpu(artifact, problem, tensors), tensors, expect(problem, tensors)

    return prepare


@takers(*(small(layout=layout, dtype=dtype) for layout in LAYOUTS for dtype in ("bf16", "fp16")))
def test_rungs(version, problem):
    checked(problem, compiled(version, problem))


@takers(small(causal=True), small(num_heads=4, num_heads_k=2), small(seqlen_k=512))
def test_features(version, problem):
    checked(problem, compiled(version, problem))


@takers(small(seqlen_q=77, seqlen_k=131))
def test_any_length(version, problem):
    checked(problem, compiled(version, problem))
    rng = random.Random(version.name)
    for _ in range(8):
        lengths = {"seqlen_q": rng.randint(1, 300), "seqlen_k": rng.randint(1, 300)}
        causal = version.supports.causal and rng.random() < 0.5
        problem = small(**lengths, causal=causal, seed=rng.randint(0, 10**6))
        checked(problem, compiled(version, problem))


def test_configurations(version):
    problem = Problem(num_heads=16, seqlen_q=256)
    rng = random.Random(version.name)
    space = [config for config in version.space() if takes(version, config, problem)]
    sample = rng.sample(space, min(8, len(space)))
    assert sample
    for artifact in build([BuildRequest(version, config, gpu.device_arch()) for config in sample]):
        checked(problem, artifact)


def takes(version, config, problem):
    try:
        version.check(problem, config)
    except UnsupportedProblemError:
        return False
    return True


def test_a_large_problem(version):
    """Many CTAs in many waves."""
    problem = Problem(batch=4, num_heads=16, seqlen_q=2048)
    checked(problem, compiled(version, problem))


def test_runs_are_equal_to_the_bit(version):
    problem = Problem(batch=2, num_heads=16, seqlen_q=1024)
    tensors = make_inputs(problem, "cuda")
    launch = on_gpu(compiled(version, problem), problem, tensors)
    outputs = []
    for _ in range(3):
        tensors.poison()
        launch()
        outputs.append((tensors.o.clone(), tensors.lse.clone()))
    assert all(torch.equal(o, outputs[0][0]) and torch.equal(lse, outputs[0][1]) for o, lse in outputs)


def test_cuda_graph(launched):
    launch, tensors, expected = launched()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    tensors.poison()
    graph.replay()
    torch.cuda.synchronize()
    verify(expected, tensors.outputs, tensors.buffers).require("the captured kernel")


def test_launches_go_to_the_current_stream(launched):
    launch, tensors, expected = launched()
    stream = torch.cuda.Stream()
    verify(expected, tensors.outputs)  # loads its kernels, for which the device may have to be idle
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        launch()
    before = verify(expected, tensors.outputs)  # on the default stream, which does not wait
    stream.synchronize()
    assert "were not written" in before.faults[0]
    verify(expected, tensors.outputs, tensors.buffers).require("the kernel on a second stream")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
def test_a_second_device():
    problem = small()
    artifact = compiled(catalog.find("02"), problem)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        tensors = make_inputs(problem, device)
        launch = on_gpu(artifact, problem, tensors)
        launch()  # while cuda:0 is the current device
        torch.cuda.synchronize(device)
        verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(f"the kernel on {device}")


def test_occupancy():
    problem = small()
    assert 1 <= gpu.load(compiled(catalog.find("02"), problem)).occupancy() <= 16


@pytest.mark.alone
def test_launch_cost(launched, capsys):
    launch, _, _ = launched(batch=1, num_heads=1, seqlen_q=64)
    tensor = torch.zeros(1, 1, 64, 128, dtype=torch.bfloat16, device="cuda")
    cost = gpu.host_costs_us({"launch": launch, "sdpa": lambda: scaled_dot_product_attention(tensor, tensor, tensor)})
    with capsys.disabled():
        print("\nhost, microseconds a call: {launch:.2f} a launch, {sdpa:.2f} SDPA".format(**cost))
    assert cost["launch"] <= MAX_LAUNCH_COST * cost["sdpa"]


@pytest.mark.alone
def test_offsets_past_two_to_the_31(version):
    """Two batches, more than 2^31 elements apart."""
    problem = Problem(batch=2, num_heads=1, seqlen_q=256)
    tensors, expected = spread(problem, (2**31 + 64, 128, 128, 1))
    artifact = compiled(version, problem)
    with gpu.faults_named(artifact):
        on_gpu(artifact, problem, tensors)()
    verify(expected, tensors.outputs, tensors.buffers).require(artifact.version)


def test_a_kernel_for_another_gpu_is_refused():
    major, _ = torch.cuda.get_device_capability()
    problem = small()
    version = catalog.find("02")
    artifact = build_one(version, version.config_for(problem), "sm_80" if major > 8 else "sm_90a")
    with pytest.raises(
        DeviceError, match=rf"02_swizzling with dtype=bf16.* It was built for {artifact.arch}; the device"
    ):
        on_gpu(artifact, problem, make_inputs(problem, "cuda"))


FAULT = """
import sys
from pathlib import Path
from flashladder.common.compiler import build_one
from flashladder.common.catalog import find
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import gpu
from flashladder.common.runtime.execute import on_gpu
version, problem = find("02_faulty", Path(sys.argv[1])), Problem(seqlen_q=64)
artifact = build_one(version, version.config_for(problem), gpu.device_arch())
with gpu.faults_named(artifact):
    on_gpu(artifact, problem, make_inputs(problem, "cuda"))()
"""


def test_a_fault_names_the_kernel(tmp_path):
    """In a process of its own, which can no longer use the GPU afterwards."""
    parent = catalog.find("02")
    head, brace, body = parent.kernel.read_text().partition("params) {\n")
    kernel = head + brace + "*reinterpret_cast<volatile int *>(16) = 0;" + body
    make_rung(tmp_path, "02_faulty", (parent.directory / "version.yaml").read_text(), kernel)
    result = subprocess.run([sys.executable, "-c", FAULT, str(tmp_path)], capture_output=True, text=True)
    assert "DeviceError: 02_faulty with dtype=bf16" in result.stderr
    assert "faulted: CUDA error" in result.stderr


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9"]
    # cuda-bindings probes the driver for entry points it may lack. A kernel filter makes racecheck 2025.3 crash.
    command += ["--report-api-errors", "no", sys.executable, "-m", "flashladder.tests.support.run_every_rung"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert result.stdout.count("\nright") == sum(version.takes(run_every_rung.PROBLEM) for version in RUNGS)


@pytest.mark.parametrize("name", ["fa2", "cudnn", "math"])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_baselines_compute_the_same(name, causal):
    problem = Problem(batch=2, num_heads=4, seqlen_q=512, causal=causal)
    tensors = make_inputs(problem, "cuda")
    output = baselines.find(name, "forward").prepare(problem, tensors)()
    given = {key: value for key, value in output._asdict().items() if value is not None}
    verify(expect(problem, tensors), given).require(name)


@pytest.mark.alone
def test_the_method_is_right(capsys):
    """A against A is tied, and the same kernel with 1 % more keys is slower, in at least 95 % of 40 trials."""
    runs = {}
    for name, seqlen_k in (("fa2", 12800), ("again", 12800), ("slowed", 12928)):
        problem = Problem(batch=1, num_heads=33, seqlen_q=512, seqlen_k=seqlen_k)
        runs[name] = baselines.find("fa2", "forward").prepare(problem, make_inputs(problem, "cuda"))
    field = [Contender(name, run, lambda launch: RIGHT) for name, run in runs.items()]
    results = [measure(field, TimingSettings(rounds=20, seed=seed)) for seed in range(40)]
    verdicts = {name: [result.verdict(name) for result in results] for name in ("again", "slowed")}
    with capsys.disabled():
        ratios = {name: [round(result.ratio(name).value, 4) for result in results[:5]] for name in verdicts}
        print(f"\n{ ({name: {v: given.count(v) for v in set(given)} for name, given in verdicts.items()}) } {ratios}")
    assert verdicts["again"].count("tied") >= 38
    assert verdicts["slowed"].count("slower") >= 38


@pytest.mark.alone
@pytest.mark.parametrize("mode", ["graph", "cold", "sustained"])
def test_other_modes_agree_on_which_is_faster(mode):
    problem = Problem(batch=2, num_heads=16, seqlen_q=2048)
    artifacts = {name: compiled(catalog.find(name), problem) for name in ("01", "02")}
    measurement = hold(
        problem, artifacts, [baselines.find("fa2", "forward")], TimingSettings(mode, rounds=4)
    ).measurement
    assert measurement.time_us("01") > 1.5 * measurement.time_us("02")
    assert measurement.clock_mhz("02")
