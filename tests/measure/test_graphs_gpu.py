"""CUDA graphs of launches on a real GPU (`pytest -m gpu`)."""

from dataclasses import replace

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.measure import baselines, contest
from flashladder.common.measure.timing import TimingSettings, measure
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

PROBLEM = Problem(batch=4, num_heads=16, seqlen_q=2048)


@pytest.fixture
def field():
    """Official FlashAttention-2 beside rung 02."""
    instance, rung = contest.ProblemInstance(PROBLEM, "cuda"), catalog.find("02")
    kernel = build_one(rung, rung.config_for(PROBLEM), gpu.device_arch())
    return [instance.official(baselines.find("fa2", "forward")), instance.ours("ours", kernel, timed=True)]


def test_a_long_kernel_takes_as_long_in_a_graph(field):
    graph, hot = (measure(field, TimingSettings(mode, 16)) for mode in ("graph", "hot"))
    for name in ("fa2", "ours"):
        assert graph.time_us(name) == pytest.approx(hot.time_us(name), rel=0.03)


def test_an_official_kernel_that_waits_for_the_gpu_is_absent(field):
    """And the process goes on: torch may take and give back memory, and capture others."""
    official, ours = field

    def waiting():
        torch.cuda.synchronize()
        return official.launch()

    result = measure([replace(official, name="waits", launch=waiting), official, ours], TimingSettings("graph", 4))
    assert "waits cannot be captured in a CUDA graph: CUDA error: " in result.absent["waits"]
    assert (result.baseline, {*result.checks}) == ("fa2", {"fa2", "ours"})
    torch.cuda.empty_cache()
    assert torch.randn(8, device="cuda").isfinite().all()


def test_a_cache_that_l2_holds_takes_longer_where_it_is_cold():
    """32 MiB of keys and values: all of them from L2, or none."""
    problem = Problem(operation="decode", batch=8, num_heads=32, num_heads_k=8, seqlen_q=1, seqlen_k=1024)
    instance, rung = contest.ProblemInstance(problem, "cuda"), catalog.find("decode/06")
    kernel = build_one(rung, rung.config_for(problem), gpu.device_arch())
    field = [instance.official(baselines.find("fa2", "decode")), instance.ours("ours", kernel, timed=True)]
    warm, cold, single = (measure(field, TimingSettings(mode, 16)) for mode in ("graph", "cold_graph", "cold"))
    for name in ("fa2", "ours"):
        assert cold.time_us(name) > 1.1 * warm.time_us(name)
        assert cold.time_us(name) < single.time_us(name) < 1.1 * cold.time_us(name) + 4  # two events, about 2 us
