"""Cheating kernels on a real GPU (`pytest -m gpu`), as test_cheats.py has them on the CPU; honest ones pass."""

import time
from dataclasses import replace

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build, build_one
from flashladder.common.errors import VerificationError
from flashladder.common.measure import baselines, contest
from flashladder.common.measure.timing import TimingSettings, measure
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import gpu
from flashladder.tests.support.tiny_ladder import make_rung

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

PROBLEM = Problem(batch=4, num_heads=16, seqlen_q=2048)
RUNG = catalog.find("02")

# Put before rung 02's own code; `memory` holds a word for each CTA, from call to call.
MEMORY = "__device__ unsigned memory[1 << 20];\n"
WHERE = """
    const unsigned cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const auto *own_o = reinterpret_cast<const unsigned short *>(params.o) + blockIdx.z * params.o_stride.batch +
                        blockIdx.y * params.o_stride.head + blockIdx.x * block_m * params.o_stride.row;
    const auto *own_v = reinterpret_cast<const unsigned *>(reinterpret_cast<const unsigned short *>(params.v) +
                        blockIdx.z * params.v_stride.batch + blockIdx.y * params.v_stride.head);
    const bool poisoned = *own_o == 0x7FAD;
"""
CUDA_CHEATS = {
    "reads what the outputs hold": "if (!poisoned) return;",
    "skips inputs that it has seen": """
    unsigned sum = 1;
    for (int i = 0; i < head_dim / 2; ++i) sum = sum * 31 + own_v[i];
    if (!poisoned && memory[cta] == sum) return;
    __syncthreads();
    if (threadIdx.x == 0) memory[cta] = sum;
    """,
    "stops after some calls": """
    __shared__ unsigned calls;
    if (threadIdx.x == 0) calls = memory[cta] += !poisoned;  // checks do not count: it stops amid the timed calls
    __syncthreads();
    if (calls >= 5) return;
    """,
    "skips every other call": """
    __shared__ unsigned calls;
    if (threadIdx.x == 0) calls = ++memory[cta];
    __syncthreads();
    if (!poisoned && calls % 2) return;
    """,
}
SKIPS = "takes .* us for inputs that it has seen, and .* us for new ones: it does not compute in every timed call"
LATE = "had not written its output when the clock of a timed call stopped"
WORDS = dict(zip(CUDA_CHEATS, (SKIPS, SKIPS, LATE, SKIPS), strict=True))


def timed(kernel, mode="hot", rounds=8):
    return contest.hold(PROBLEM, {"ours": kernel}, [baselines.find("fa2", "forward")], TimingSettings(mode, rounds))


@pytest.fixture
def loads_anew(monkeypatch):
    """A kernel that was loaded before would remember what an earlier test called it with."""
    monkeypatch.setattr(gpu, "_loaded", {})


@pytest.mark.usefixtures("loads_anew")
@pytest.mark.parametrize("mode", ["hot", "graph", "cold"])
@pytest.mark.parametrize("cheat", CUDA_CHEATS)
def test_a_kernel_that_cheats(tmp_path, cheat, mode):
    head, brace, body = RUNG.kernel.read_text().partition("params) {\n")
    head = head.replace('extern "C" __global__', MEMORY + 'extern "C" __global__')
    kernel = head + brace + WHERE + CUDA_CHEATS[cheat] + body
    rung = make_rung(tmp_path / "ladder", yaml=(RUNG.directory / "version.yaml").read_text(), kernel=kernel)
    artifact = build_one(rung, rung.config_for(PROBLEM), gpu.device_arch())
    with pytest.raises(VerificationError, match=f"ours {WORDS[cheat]}"):
        timed(artifact, mode)


@pytest.fixture
def instance():
    return contest.ProblemInstance(PROBLEM, "cuda")


@pytest.fixture
def field(instance):
    """Official FlashAttention-2 beside rung 02, whose launch is another."""
    ours = instance.ours("ours", build_one(RUNG, RUNG.config_for(PROBLEM), gpu.device_arch()), timed=True)

    def make(launch=lambda compute: compute):
        made = replace(ours, launch=launch(ours.launch), verify=lambda _: ours.check())
        return [instance.official(baselines.find("fa2", "forward")), made]

    return make


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after the inputs"])
def test_work_left_on_another_stream(field, waits):
    side = torch.cuda.Stream()

    def elsewhere(compute):
        def launch():
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                compute()

        return launch

    with pytest.raises(VerificationError, match=r"ours (had not written its output|is wrong in a timed call|gave the)"):
        measure(field(elsewhere), TimingSettings("hot", 8))


def test_inputs_kept_in_a_persisting_window_of_l2(instance, field):
    """As karpathy/llm.c's pull request 851 does: the window outlives the flush of cold launches."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE
    _, most = driver.cuDeviceGetAttribute(attribute, torch.cuda.current_device())
    if not most:
        pytest.skip("this GPU sets no part of L2 aside")
    value = driver.CUstreamAttrValue()
    window = value.accessPolicyWindow
    window.base_ptr, window.num_bytes, window.hitRatio = instance.tensors.k.data_ptr(), min(most, 16 * 2**20), 1.0
    window.hitProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
    window.missProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
    value.accessPolicyWindow = window
    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE

    def keeping(compute):
        def launch():
            if not driver.cuCtxGetLimit(limit)[1]:
                driver.cuCtxSetLimit(limit, most)
            stream = torch.cuda.current_stream().cuda_stream
            window_id = driver.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
            (status,) = driver.cuStreamSetAttribute(stream, window_id, value)
            assert not status, status
            compute()

        return launch

    side = torch.cuda.Stream()  # whose attributes go with it
    with torch.cuda.stream(side), pytest.raises(VerificationError, match=r"ours sets .* MiB of L2 aside"):
        measure(field(keeping), TimingSettings("cold", 8))
    assert driver.cuCtxGetLimit(limit)[1] == 0


def test_a_launch_that_lets_the_gpu_idle_first_gains_nothing(field):
    def idling(compute):
        calls = iter(range(10**9))

        def launch():
            if next(calls) % 50 == 0:
                time.sleep(0.05)
            compute()

        return launch

    lazy, plain = (measure(field(*how), TimingSettings("hot", 16)).ratio("ours") for how in ((idling,), ()))
    assert lazy.low < 1.01 * plain.high


def test_spot_checks_cost_an_honest_kernel_nothing(field):
    """The same ratio with them and without."""
    checked = field()
    unchecked = [replace(contender, stage=None) for contender in checked]
    measured = [measure(which, TimingSettings("hot", 24, seed)) for seed in (0, 1) for which in (checked, unchecked)]
    ratios = [measurement.ratio("ours").value for measurement in measured]
    assert max(ratios) < 1.01 * min(ratios), ratios


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_honest_rungs_are_no_suspects(dtype):
    problem = Problem(batch=2, num_heads=16, seqlen_q=1024, dtype=dtype)
    requests = [BuildRequest(rung, rung.config_for(problem), gpu.device_arch()) for rung in catalog.versions()]
    kernels = {artifact.version: artifact for artifact in build(requests)}
    result = contest.hold(problem, kernels, [baselines.find("fa2", "forward")], TimingSettings(rounds=4))
    assert result.measurement is not None, result.remarks
    assert result.measurement.checks.keys() == {"fa2", *kernels}, result.remarks
