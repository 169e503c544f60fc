"""ALiBi through the functions that people call, on the emulator and on a GPU; and rungs that are asked for by name."""

import pytest
import torch

import flashladder
from flashladder import attention, packed_attention
from flashladder.common import catalog
from flashladder.common.api.operator import attention_general
from flashladder.common.api.options import Options
from flashladder.common.compiler import build_one
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.problem import Problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def drawn(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


@pytest.mark.slow
def test_registers_suffice():
    """In bytes of spill stores."""
    rung = catalog.find("24")
    spilled = {}
    for head_dim in (64, 128):
        config = rung.config_for(Problem(head_dim=head_dim, causal=True, alibi=True))
        spilled[head_dim] = build_one(rung, config, "sm_90a").spill_store_bytes
    assert spilled[64] <= 124, "with the log-sum-exp"
    assert spilled[128] == 0


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


def test_a_rung_without_it_is_refused():
    with pytest.raises(UnsupportedProblemError, match="has no ALiBi"):
        attention(Q, Q, Q, alibi_slopes=torch.ones(4), version="35")


def test_torch_sees_an_operator(device):
    q, slopes = Q.to(device), torch.ones(4, device=device)
    options = Options(causal=True, alibi_slopes=slopes.expand(2, 4).contiguous(), version="24")
    torch.library.opcheck(
        attention_general, (q, q, q, *options.flat(), True), test_utils=("test_schema", "test_faketensor")
    )
    compiled = torch.compile(lambda q: attention(q, q, q, alibi_slopes=slopes) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), attention(q, q, q, alibi_slopes=slopes) * 2)


@pytest.mark.slow
def test_a_rung_can_be_asked_for_by_name():
    q, k, v = torch.randn(3, 150, 2, 64).bfloat16()
    starts = torch.tensor((0, 70, 70, 140), dtype=torch.int32)
    for call, given in (
        (attention, (q[None], k[None], v[None])),
        (packed_attention, (q, k, v, starts, starts, 70, 70)),
    ):
        options = {"causal": True, "window": (40, None), "softcap": 20.0}
        o, expected = call(*given, **options, version="47"), call(*given, **options)
        written = slice(None) if call is attention else slice(140)
        torch.testing.assert_close(o[written], expected[written], rtol=0.02, atol=0.02)
    assert not o[140:].any()
