"""Any rung as a function; and its time, which only a GPU can tell."""

import re

import pytest
import torch

import flashladder
from flashladder.common import catalog
from flashladder.common.errors import ConfigError, DeviceError, UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import ready
from flashladder.tests.support import fake_cuda


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("version", ["02", "16", "02@block_m=128,num_warps=8", "general"])
def test_any_rung_in_any_configuration(version, device, monkeypatch):
    fake_cuda.forget_kernels(monkeypatch)
    problem = Problem(seqlen_q=128, num_heads=2)
    tensors = make_inputs(problem, device)
    o, lse = flashladder.forward(tensors.q, tensors.k, tensors.v, version=version)
    expected = expect(problem, tensors)
    assert (o - expected.exact["o"]).abs().max() <= expected.tolerances["o"]
    assert (lse - expected.exact["lse"]).abs().max() <= expected.tolerances["lse"]
    (found,) = set(ready.by_kind.values())
    assert found.rung == catalog.find(version.partition("@")[0])
    if "@" in version:
        assert (found.artifact.config.block_m, found.artifact.config.num_warps) == (128, 8)


def test_what_a_rung_cannot_do_is_said():
    q = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="02_swizzling has no field edge_n"):
        flashladder.forward(q, q, q, version="02@edge_n=16")
    with pytest.raises(UnsupportedProblemError, match="has no causal mask"):
        flashladder.forward(q, q, q, version="02", causal=True)


def test_the_emulator_has_no_time_to_tell():
    q = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
    with pytest.raises(
        DeviceError, match=re.escape("q is on cpu: a kernel is timed on a GPU. `flashladder run 02` predict")
    ):
        flashladder.forward_timed(q, q, q, version="02")


def test_only_the_kernel_lies_between_the_events(monkeypatch):
    """A run before makes it ready; then the stream is held, and the launch queued behind."""
    driver, order = fake_cuda.for_attention(monkeypatch), []
    driver.on_launch = lambda: order.append("launch")

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("hold"))
    q = torch.zeros(1, 64, 4, 128, dtype=torch.bfloat16)
    o, lse, milliseconds = flashladder.forward_timed(q, q, q, version="24", causal=True)
    assert order == ["launch", "hold", "event", "launch", "event", "wait"]
    assert (o.shape, lse.shape, milliseconds) == (q.shape, (1, 4, 64), 0.25)


@pytest.mark.alone
@pytest.mark.gpu
def test_the_time_of_a_large_kernel_is_its_own():
    """Twice the work takes about twice as long, and no kernel is faster than the tensor cores."""
    times = []
    for seqlen in (4096, 8192):
        q = torch.randn(1, seqlen, 16, 128, dtype=torch.bfloat16, device="cuda")
        times.append(min(flashladder.forward_timed(q, q, q, version="24")[2] for _ in range(5)))
    assert 3 < times[1] / times[0] < 5
    assert times[1] * 1e-3 > 4 * 16 * 8192**2 * 128 / 3e15
