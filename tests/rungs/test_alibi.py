"""ALiBi of the general rung: on the emulator under the race detector, and through the functions that people call."""

import itertools

import pytest
import torch
from general_problems import GENERAL
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_problems import emulated

import flashladder
from flashladder import attention, packed_attention
from flashladder.common import catalog
from flashladder.common.api import general
from flashladder.common.compiler import build_one
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def drawn(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (6, 6)])
def test_the_exact_answer_has_flash_attentions_bias(seqlen_q, seqlen_k):
    """As flash-attn documents it: -alibi_slope * |i + seqlen_k - seqlen_q - j|."""
    problem = Problem(batch=2, num_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16, alibi=True)
    tensors = make_inputs(problem)
    exact = expect(problem, tensors).exact
    for b, h in itertools.product(range(2), range(2)):
        slope = float(tensors.alibi_slopes[b, h])
        bias = [[-slope * abs(i + seqlen_k - seqlen_q - j) for j in range(seqlen_k)] for i in range(seqlen_q)]
        scores = tensors.q[b, :, h].double() @ tensors.k[b, :, h].double().T / 4 + torch.tensor(bias).double()
        torch.testing.assert_close(exact["o"][b, :, h], scores.softmax(-1) @ tensors.v[b, :, h].double())
        torch.testing.assert_close(exact["lse"][b, h], scores.logsumexp(-1))


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    causal=st.booleans(),
    left=st.sampled_from([None, None, 0, 31, 33, 100]),
    softcap=st.sampled_from([0.0, 0.0, 20.0]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    seed=st.integers(0, 100),
)
def test_any_mask(lengths, causal, left, softcap, dtype, seed):
    seqlen_q, seqlen_k = lengths
    bounds = {"causal": causal, "window_left": left, "softcap": softcap, "alibi": True}
    emulated(Problem(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, dtype=dtype, seed=seed, **bounds))


@pytest.mark.parametrize("slope", [-0.3, 0.0, 4.0])
@pytest.mark.parametrize("causal", [False, True])
def test_slopes_of_any_size_and_sign(slope, causal):
    """Without a mask, the scores of a row far from the last key grow by 128 nats from block to block."""
    problem = Problem(seqlen_q=200, seqlen_k=400, head_dim=64, causal=causal, alibi=True)
    tensors = make_inputs(problem)
    tensors.alibi_slopes.fill_(slope)
    emulated(problem, tensors)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_have_slopes_of_their_own(causal):
    seqlens = {"seqlens_q": (70, 0, 33, 1, 130), "seqlens_k": (20, 10, 33, 0, 200)}
    bounds = {"window_left": 40, "causal": causal, "softcap": 20.0, "alibi": True}
    emulated(Problem(operation="packed", num_heads=2, num_heads_k=1, head_dim=64, **seqlens, **bounds))


def test_nothing_is_read_beyond_the_slopes():
    """The memory of the slopes is guarded by NaNs, and the emulator knows its bounds."""
    tensors, _ = emulated(Problem(batch=3, num_heads=4, num_heads_k=2, seqlen_q=33, head_dim=64, alibi=True))
    assert tensors.o.isfinite().all()


def test_registers_suffice():
    """In bytes of spill stores, by head_dim and mask."""
    spilled = {}
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        problem = Problem(head_dim=head_dim, causal=causal, alibi=True)
        artifact = build_one(GENERAL, GENERAL.config_for(problem), "sm_90a")
        spilled[head_dim, causal] = artifact.kernels[0].spill_store_bytes
    assert spilled.pop((64, True)) <= 124, "with the log-sum-exp"
    assert not any(spilled.values())


# -- the functions


def test_it_is_flash_attentions(device):
    q, k, v = drawn(2, 30, 4, 64, device=device), *drawn(2, 2, 50, 2, 64, device=device, seed=1)
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], device=device)
    options = {"causal": True, "softmax_scale": 0.1}
    o, lse = attention(q, k, v, alibi_slopes=slopes, return_lse=True, **options)
    heads = (x.double().repeat_interleave(n, 2).transpose(1, 2) for x, n in ((q, 1), (k, 2), (v, 2)))
    exact_q, exact_k, exact_v = heads
    own, key = torch.arange(30, device=device)[:, None] + 20, torch.arange(50, device=device)
    scores = 0.1 * exact_q @ exact_k.transpose(2, 3) - slopes.double()[:, None, None] * (own - key).abs()
    scores.masked_fill_(key > own, -torch.inf)
    torch.testing.assert_close(o.double(), (scores.softmax(-1) @ exact_v).transpose(1, 2), rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-4)
    theirs = flashladder.flash_attn_func(q, k, v, 0.0, 0.1, True, alibi_slopes=slopes, return_attn_probs=True)
    assert torch.equal(theirs[0], o)
    assert torch.equal(theirs[1], lse)
    assert torch.equal(attention(q, k, v, alibi_slopes=slopes.expand(2, 4), **options), o)
    other = attention(q, k, v, alibi_slopes=torch.stack((slopes, slopes.flip(0))), **options)
    assert torch.equal(other[0], o[0])
    assert torch.equal(other[1:], attention(q[1:], k[1:], v[1:], alibi_slopes=slopes.flip(0), **options))


def test_sequences_alone_and_among_others(device):
    q, slopes = drawn(57, 2, 64, device=device), torch.tensor([[0.5, 0.1], [1.0, 0.2], [0.0, 3.0]], device=device)
    ends = torch.tensor([0, 20, 20, 57], dtype=torch.int32, device=device)
    among = packed_attention(q, q, q, ends, ends, 37, 37, causal=True, alibi_slopes=slopes)
    for number, rows in ((0, slice(0, 20)), (2, slice(20, 57))):
        alone = attention(*[q[None, rows]] * 3, causal=True, alibi_slopes=slopes[number])
        assert torch.equal(among[rows], alone[0])
    theirs = flashladder.flash_attn_varlen_func(q, q, q, ends, ends, 37, 37, causal=True, alibi_slopes=slopes)
    assert torch.equal(theirs, among)


Q = drawn(2, 16, 4, 64)


@pytest.mark.parametrize(
    ("alibi_slopes", "words"),
    [
        (0.5, r"alibi_slopes=0.5 is of type float; it should be a torch.Tensor"),
        (torch.ones(2), r"alibi_slopes is \(2,\) torch.float32; with q it is \(4,\) or \(2, 4\) torch.float32"),
        (torch.ones(3, 4), r"alibi_slopes is \(3, 4\) torch.float32; with q it is \(4,\) or \(2, 4\) torch.float32"),
        (torch.ones(4).double(), r"alibi_slopes is \(4,\) torch.float64; with q it is \(4,\) or \(2, 4\)"),
        (torch.ones(4, device="meta"), "alibi_slopes on meta, q on cpu; kernels take one device"),
        (torch.ones(4).requires_grad_(), "alibi_slopes want a gradient, and kernels compute none"),
    ],
)
def test_what_are_no_slopes_is_refused(alibi_slopes, words):
    ends = torch.tensor([0, 16, 16], dtype=torch.int32)
    with pytest.raises(UnsupportedProblemError, match=words):
        attention(Q, Q, Q, alibi_slopes=alibi_slopes)
    with pytest.raises(UnsupportedProblemError, match=words):
        packed_attention(Q[0], Q[0], Q[0], ends, ends, 16, 16, alibi_slopes=alibi_slopes)


def test_rungs_without_it_say_so():
    for name in ("16", "23", "35"):
        with pytest.raises(UnsupportedProblemError, match=r"has no ALiBi; the nearest rung .* is 24_woven_general"):
            catalog.find(name).config_for(Problem(alibi=True))
    with pytest.raises(UnsupportedProblemError, match="has no ALiBi"):
        attention(Q, Q, Q, alibi_slopes=torch.ones(4), version="35")


def test_torch_sees_an_operator(device):
    q, slopes = Q.to(device), torch.ones(4, device=device)
    arguments = (q, q, q, None, None, 0, 0, True, 0.125, None, None, 0.0, slopes.expand(2, 4).contiguous(), "24", True)
    torch.library.opcheck(general.forward, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda q: attention(q, q, q, alibi_slopes=slopes) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), attention(q, q, q, alibi_slopes=slopes) * 2)
