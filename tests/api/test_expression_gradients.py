"""Gradients of attention() beside a mask and a score that are expressions."""

import math

import pytest
import torch

from flashladder import create_block_mask, flex_attention
from flashladder.common.api import attention, masks
from flashladder.common.api.packed import packed_attention
from flashladder.common.errors import UnsupportedProblemError

IMAGE = torch.arange(60) // 7 % 3
SIZES = {"seqlen_q": 40, "seqlen_k": 60, "num_heads": 4, "num_heads_k": 2}


def qkv(seqlen_q, seqlen_k, num_heads=4, num_heads_k=2, head_dim=64, dtype=torch.bfloat16, batch=1):
    generator = torch.Generator().manual_seed(0)
    shapes = ((seqlen_q, num_heads), (seqlen_k, num_heads_k), (seqlen_k, num_heads_k))
    drawn = (torch.randn(batch, *shape, head_dim, generator=generator) for shape in shapes)
    return tuple(x.to(dtype).requires_grad_() for x in drawn)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_()


def textbook(q, k, v, mask=None, score=None, sinks=None):
    """By torch, of functions of b, h, q and k that are written anew here: nothing of an expression is parsed."""
    k, v = (x.double().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) / math.sqrt(q.shape[-1])
    places = [torch.arange(size).reshape(-1, *[1] * (3 - axis)) for axis, size in enumerate(s.shape)]
    places[2] = places[2] + k.shape[1] - q.shape[1]
    s = score(s, *places) if score else s
    seen = mask(*places).expand(s.shape) if mask else torch.ones_like(s, dtype=torch.bool)
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    blind = s.isneginf().all(-1, keepdim=True)
    weights = s.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)[..., : v.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), s.logsumexp(-1)


def alike(found, expected, wanted, dlse=False):
    """Gradients by torch of two pairs of O and LSE, for one gradient of each; within what 16 bits leave."""
    given = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype) for x in found]
    used = slice(2 if dlse else 1)
    pairs = [
        torch.autograd.grad(
            outputs[used], wanted, [g.to(x.dtype) for g, x in zip(given, outputs, strict=True)][used], retain_graph=True
        )
        for outputs in (found, expected)
    ]
    for ours, exact in zip(*pairs, strict=True):
        assert (ours.double() - exact.double()).abs().max() < 0.04 * max(1, exact.abs().max())
    return pairs[0]


def with_lse(*inputs, **options):
    return attention(*inputs, **options, return_lse=True)


@pytest.mark.slow
def test_a_mask_and_slopes_that_learn():
    """The issue's own example, in groups, in two sequences; LSE has a gradient too."""
    inputs, slope = qkv(**SIZES, batch=2), torch.tensor([0.1, 0.2, 0.3, 0.4]).requires_grad_()
    asked = {"mask": "k <= q || image[q] == image[k]", "score": "s + slope[h] * (k - q)"}
    found = with_lse(*inputs, **asked, tensors={"image": IMAGE, "slope": slope})
    expected = textbook(
        *inputs, lambda b, h, q, k: (k <= q) | (IMAGE[q] == IMAGE[k]), lambda s, b, h, q, k: s + slope[h] * (k - q)
    )
    alike(found, expected, (*inputs, slope), dlse=True)
    found = with_lse(*inputs, **asked, tensors={"image": IMAGE, "slope": slope.detach()})
    alike(found, expected, inputs[:1])
    frozen = tuple(x.detach() for x in inputs)
    alike(with_lse(*frozen, **asked, tensors={"image": IMAGE, "slope": slope}), expected, (slope,))


@pytest.mark.slow
def test_a_table_of_biases_by_distance():
    inputs, table = qkv(**SIZES, dtype=torch.float16), random(4, 130, dtype=torch.bfloat16)
    found = with_lse(*inputs, score="s + table[h][q - k + 64]", tensors={"table": table})
    expected = textbook(*inputs, score=lambda s, b, h, q, k: s + table.double()[h, q - k + 64])
    gradient = alike(found, expected, (*inputs, table))[-1]
    assert gradient.dtype == torch.bfloat16
    assert not gradient[:, :5].any()  # of distances that there are not


@pytest.mark.slow
def test_a_softcap_by_text_is_the_built_in_one():
    inputs = qkv(**SIZES)
    built_in = with_lse(*inputs, softcap=2.0)
    alike(with_lse(*inputs, score="2 * tanh(s / 2)"), built_in, inputs)
    w = random(60)
    found = with_lse(*inputs, softcap=2.0, score="s * w[k]", tensors={"w": w})
    expected = textbook(*inputs, score=lambda s, b, h, q, k: 2 * torch.tanh(s / 2) * w[k])
    alike(found, expected, (*inputs, w))


@pytest.mark.slow
def test_masks_with_names_and_sinks_and_rows_without_keys():
    inputs, sinks = qkv(**SIZES), random(4)
    document = torch.arange(60) // 16
    found = with_lse(*inputs, **masks.documents(document), sinks=sinks)
    own = textbook(*inputs, lambda b, h, q, k: (k <= q) & (document[q] == document[k]), sinks=sinks)
    alike(found, own, (*inputs, sinks))
    found = with_lse(*inputs, **masks.sinks_and_window(sinks=4, left=9), sinks=sinks)
    own = textbook(*inputs, lambda b, h, q, k: (k <= q) & ((k < 4) | (q - k <= 9)), sinks=sinks)
    alike(found, own, (*inputs, sinks))
    w = random(60)
    found = with_lse(*inputs, mask="q % 3 == 0 && k > 40", score="s * w[k]", tensors={"w": w})
    own = textbook(*inputs, lambda b, h, q, k: (q % 3 == 0) & (k > 40), lambda s, b, h, q, k: s * w[k])
    alike(found, own, (*inputs, w))


@pytest.mark.slow
def test_each_packed_sequence_by_itself():
    lengths, w = [(5, 9), (0, 4), (40, 40), (7, 0)], random(4, 40)
    q, k, v = (x[0] for x in qkv(seqlen_q=60, seqlen_k=53))
    starts = [torch.tensor([0, *each]).cumsum(0).int() for each in zip(*lengths, strict=True)]
    asked = {"mask": "k <= q || k % 3 == b", "score": "s * w[b, k] - k / 8.0", "tensors": {"w": w}}
    found = packed_attention(q, k, v, *starts, 40, 40, **asked)
    dout = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = torch.autograd.grad(found, (q, k, v, w), dout)
    o = torch.zeros(found.shape, dtype=torch.float64)
    for number, ((row, rows), (key, keys)) in enumerate(
        zip(*(x.unfold(0, 2, 1).tolist() for x in starts), strict=True)
    ):
        if rows > row and keys > key:
            o[row:rows] = textbook(
                q[None, row:rows],
                k[None, key:keys],
                v[None, key:keys],
                lambda b, h, q, k, number=number: (k <= q) | (k % 3 == number),
                lambda s, b, h, q, k, number=number: s * w[number, k] - k / 8,
            )[0][0]
    for ours, exact in zip(gradients, torch.autograd.grad(o, (q, k, v, w), dout.double()), strict=True):
        assert (ours.double() - exact.double()).abs().max() < 0.02 * max(1, exact.abs().max())
    nobody = torch.zeros(5, dtype=torch.int32)
    blind = packed_attention(q, k, v, nobody, nobody, 0, 0, **asked)
    assert not any(x.any() for x in torch.autograd.grad(blind, (q, k, v, w), dout))


@pytest.mark.slow
def test_under_torchs_name():
    inputs, bias = qkv(40, 40), random(4, 80)

    def learned(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx - kv_idx + 40]

    block_mask = create_block_mask(lambda b, h, q, k: (q >= k) & (k >= 0), None, None, 40, 40, device="cpu")
    heads_first = (x.transpose(1, 2) for x in inputs)
    o, lse = flex_attention(*heads_first, learned, block_mask, enable_gqa=True, return_lse=True)
    expected = textbook(*inputs, lambda b, h, q, k: k <= q, lambda s, b, h, q, k: s + bias[h, q - k + 40])
    alike((o.transpose(1, 2), lse), expected, (*inputs, bias))


@pytest.mark.slow
def test_no_weight_is_larger_than_1_where_all_scores_of_a_row_are_large():
    """Their log-sum-exp is rounded by more than a score is good for."""
    inputs, low = qkv(**SIZES), 1e9 * random(60).detach().abs()
    o = attention(*inputs, score="s - low[q]", tensors={"low": low})
    *others, dv = torch.autograd.grad(o, inputs, torch.ones_like(o))
    assert all(x.isfinite().all() for x in others)
    assert dv.abs().max() <= 2 * 40  # of two heads the rows


@pytest.mark.slow
def test_compiled_in_one_graph():
    inputs, slope = qkv(**SIZES), random(4)

    def called(q, k, v, slope):
        return attention(
            q, k, v, mask="k <= q && k >= 0", score="s * slope[h]", tensors={"slope": slope}, return_lse=True
        )

    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    dout = torch.ones(1, 40, 4, 64).bfloat16()
    wanted = (*inputs, slope)
    ours, theirs = (torch.autograd.grad(each(*wanted)[0], wanted, dout) for each in (called, compiled))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    frozen = tuple(x.detach() for x in inputs)
    (alone,) = torch.autograd.grad(compiled(*frozen, slope)[0], slope, dout)
    assert torch.equal(alone, ours[-1])


@pytest.mark.slow
def test_what_no_score_grows_with_has_no_gradient():
    inputs, level = qkv(**SIZES), random(4)
    asked = {"mask": "level[h] > k - 50", "score": "s + floor(level[h])", "tensors": {"level": level}}
    o = attention(*inputs, **asked, deterministic=True)
    found = torch.autograd.grad(o, (inputs[0], level), torch.ones_like(o), allow_unused=True)
    assert found[0].any()
    assert found[1] is None


@pytest.mark.slow
def test_a_gradient_of_a_gradient_is_refused():
    inputs, w = qkv(**SIZES), random(4)
    o = attention(*inputs, score="s * w[h]", tensors={"w": w})
    first = torch.autograd.grad(o, (inputs[0], w), torch.ones_like(o), create_graph=True)
    for gradient in first:
        with pytest.raises(UnsupportedProblemError, match="double backward"):
            torch.autograd.grad(gradient.sum(), inputs[0], retain_graph=True)


def test_what_is_summed_in_any_order_is_refused_where_the_same_bits_are_asked_for():
    inputs = tuple(x.detach() for x in qkv(**SIZES))
    asked = {"score": "s * w[h] + t[k]", "tensors": {"w": random(4), "t": torch.ones(60)}}
    with pytest.raises(UnsupportedProblemError, match="deterministic=true: gradients of w, which a score reads"):
        attention(*inputs, **asked, deterministic=True)
    with pytest.raises(UnsupportedProblemError, match="no out: leave it out"):
        attention(*inputs, **asked, out=torch.empty_like(inputs[0]))


def test_a_derivative_of_forward_mode_is_refused():
    inputs = tuple(x.detach() for x in qkv(**SIZES))
    with torch.autograd.forward_ad.dual_level():
        w = torch.autograd.forward_ad.make_dual(torch.ones(4), torch.ones(4))
        with pytest.raises(UnsupportedProblemError, match=r"tensors\['w'\] have derivatives of forward mode"):
            attention(*inputs, score="s * w[h]", tensors={"w": w})
