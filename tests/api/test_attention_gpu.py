"""Attention as a function on a GPU: captured, from threads, on several devices."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from test_attention import qkv

from flashladder.common import catalog
from flashladder.common.api import attention
from flashladder.common.errors import DeviceError
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import fast_path
from flashladder.common.runtime.gpu import device_arch
from flashladder.tests.support import fake_cuda, triton_process

pytestmark = pytest.mark.gpu
USUAL = Problem(batch=2, seqlen_q=200, num_heads=4, head_dim=64, causal=True)
LAUNCHED = [launch.rung for launch in catalog.ladder_of("forward").launches if catalog.find(launch.rung).takes(USUAL)]


@pytest.mark.parametrize("version", [*LAUNCHED, "any_attention"])
def test_a_replay_reads_what_the_tensors_hold_then(version):
    if not catalog.find(version).runs_on(device_arch()):
        pytest.skip(f"{version} has no instructions for this GPU")
    _, (q, k, v) = qkv(USUAL, "cuda")
    out = torch.empty_like(q)
    attention(q, k, v, causal=True, version=version, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, k, v, causal=True, version=version, out=out)
    q.copy_(torch.randn_like(q))
    out.zero_()
    graph.replay()
    assert torch.equal(out, attention(q, k, v, causal=True, version=version))


@pytest.mark.parametrize("version", [*LAUNCHED, "any_attention"])
def test_both_ways_of_a_call_give_the_same(version, monkeypatch):
    if not catalog.find(version).runs_on(device_arch()):
        pytest.skip(f"{version} has no instructions for this GPU")
    fast_path.load()
    assert fast_path.extension, fast_path.missing
    extension, done = fast_path.extension, []
    straight = lambda *given: done.append(made := extension.straight(*given)) or made  # noqa: E731
    monkeypatch.setattr(fast_path, "extension", SimpleNamespace(**{**vars(extension), "straight": straight}))
    for problem in (
        Problem(batch=2, seqlen_q=200, seqlen_k=333, num_heads=4, num_heads_k=2, head_dim=64, causal=True),
        Problem(seqlen_q=1, seqlen_k=1000, num_heads=8, layout="bhsd"),
        Problem(batch=3, seqlen_q=77, num_heads=2, head_dim=128, layout="padded", dtype="fp16"),
        Problem(batch=3, seqlen_q=77, num_heads=2, head_dim=96, layout="padded", dtype="fp16"),
    ):
        if not catalog.find(version).takes(problem):
            continue  # head_dim 96 is the next rung's
        _, inputs = qkv(problem, "cuda")
        attention(*inputs, causal=problem.causal, return_lse=True, version=version)
        o, lse = attention(*inputs, causal=problem.causal, return_lse=True, version=version)
        assert done.pop() is not None
        with monkeypatch.context() as patch:
            patch.setattr(fast_path, "extension", None)
            slow_o, slow_lse = attention(*inputs, causal=problem.causal, return_lse=True, version=version)
        assert torch.equal(o, slow_o)
        assert torch.equal(lse, slow_lse)


def test_a_first_call_amid_a_capture_is_refused(monkeypatch):
    fake_cuda.forget_kernels(monkeypatch)
    q = torch.zeros(1, 64, 4, 64, dtype=torch.bfloat16, device="cuda")
    with (
        pytest.raises(DeviceError, match="call attention once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        attention(q, q, q)


def test_threads_and_streams():
    """Each thread on a stream of its own, new to the GPU; all outputs are right."""
    _, (q, k, v) = qkv(Problem(batch=2, seqlen_q=300, num_heads=4, head_dim=64), "cuda")
    expected = attention(q, k, v)
    torch.cuda.synchronize()

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [attention(q, k[:, : 300 - n], v[:, : 300 - n]) for n in range(20)]
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(8) as pool:
        several = list(pool.map(work, range(16)))
    for found in several:
        assert torch.equal(found[0], expected)
        assert all(torch.equal(a, b) for a, b in zip(found, several[0], strict=True))


def test_a_thread_that_has_not_used_the_gpu():
    _, (q, k, v) = qkv(Problem(seqlen_q=100, num_heads=2, head_dim=64), "cuda")
    expected, out = attention(q, k, v), torch.empty_like(q)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(attention, q, k, v, out=out).result()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_another_device_than_the_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    _, inputs = qkv(Problem(seqlen_q=100, num_heads=2, head_dim=64), "cuda:1")
    o = attention(*inputs)
    assert torch.cuda.current_device() == 0
    assert o.device == inputs[0].device
    assert torch.equal(o.cpu(), attention(*(tensor.to("cuda:0") for tensor in inputs)).cpu())


CAPTURED = """
import torch
from flashladder.common.api import attention

def model(q, k, v):
    return attention(q * 2, k, v, causal=True) * 2  # neither product is rounded

inputs = torch.randn(3, 1, 64, 2, 64, device="cuda", dtype=torch.bfloat16).unbind()
compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
for _ in range(4):
    assert torch.equal(compiled(*inputs).clone(), model(*inputs))
"""


def test_compiled_for_a_gpu_and_captured():
    """Inductor takes a model in one piece, and captures it in CUDA graphs: in a process in which Triton compiles."""
    triton_process.run("-c", CAPTURED, check=True)
