"""Expressions on a GPU: what the emulator computes, at lengths that it takes too long for, and in a CUDA graph."""

import pytest
import torch

from flashladder.common.api import attention
from flashladder.common.runtime import ready

pytestmark = pytest.mark.gpu


def exact(q, k, v, seen, score):
    """By torch in fp64, of one head of K for each of Q."""
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    weights = score(s).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.double())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_images_at_any_length_with_one_kernel_and_in_a_graph(head_dim, monkeypatch):
    slope = torch.tensor([0.5, 0.125], device="cuda")
    text = {"mask": "k <= q || image[q] == image[k]", "score": "s + slope[h] * (k - q)"}
    for number, (rows, keys) in enumerate(((2048, 2048), (1000, 3001), (1, 777))):
        q = torch.randn(2, rows, 2, head_dim, device="cuda").bfloat16()
        k, v = torch.randn(2, 2, keys, 2, head_dim, device="cuda").bfloat16()
        image = torch.arange(keys, device="cuda") // 100 % 3
        row, key = torch.arange(keys - rows, keys, device="cuda")[:, None], torch.arange(keys, device="cuda")
        seen = (key <= row) | (image[row] == image[key])
        expected = exact(q, k, v, seen, lambda s, of=key - row: s + slope.double()[:, None, None] * of)
        read = {"image": image, "slope": slope}
        o = attention(q, k, v, **text, tensors=read)
        assert torch.allclose(o.double(), expected, rtol=0, atol=0.02)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attention(q, k, v, **text, tensors=read)
        graph.replay()
        assert torch.equal(captured, o)
        if number == 0:
            monkeypatch.setattr(ready, "build_one", None)
            monkeypatch.setattr(ready, "cached", None)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("text", ["k <= q && document[q] == document[k]", "k <= q && (h == 1 || q - k < 200)"])
def test_blocks_that_a_mask_hides(head_dim, text):
    rows, keys = 3000, 4100
    q = torch.randn(2, rows, 2, head_dim, device="cuda").bfloat16()
    k, v = torch.randn(2, 2, keys, 2, head_dim, device="cuda").bfloat16()
    document = (torch.arange(keys, device="cuda").float().sqrt() / 8).int()
    row, key = torch.arange(keys - rows, keys, device="cuda")[:, None], torch.arange(keys, device="cuda")
    head = torch.arange(2, device="cuda")[:, None, None]
    reads = "document" in text
    seen = (key <= row) & (document[row] == document[key] if reads else (head == 1) | (row - key < 200))
    o = attention(q, k, v, mask=text, tensors={"document": document} if reads else None)
    assert torch.allclose(o.double(), exact(q, k, v, seen, lambda s: s), rtol=0, atol=0.02)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients(head_dim):
    rows, keys = 700, 1300
    q = torch.randn(2, rows, 2, head_dim, device="cuda").bfloat16()
    k, v = torch.randn(2, 2, keys, 2, head_dim, device="cuda").bfloat16()
    bias = torch.randn(2, 64, device="cuda")
    row, key = torch.arange(keys - rows, keys, device="cuda")[:, None], torch.arange(keys, device="cuda")
    seen, near = (key <= row).expand(2, 2, -1, -1), (row - key).abs().clamp(max=63)
    inputs = [x.requires_grad_() for x in (q, k, v, bias)]
    o = attention(
        *inputs[:3], mask="k <= q && k >= 0", score="s + bias[h][min(abs(q - k), 63)]", tensors={"bias": bias}
    )
    dout = torch.randn_like(o)
    found = torch.autograd.grad(o, inputs, dout)
    doubled = [x.detach().double().requires_grad_() for x in inputs]
    expected = exact(*doubled[:3], seen, lambda s: s + doubled[3][:, near])
    for got, wanted in zip(found, torch.autograd.grad(expected, doubled, dout.double()), strict=True):
        assert (got.double() - wanted).abs().max() < 0.03 * wanted.abs().max()


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("text", ["k <= q && document[q] == document[k]", "k <= q || 4 * k < seqlen_k"])
def test_gradients_beside_blocks_that_a_mask_hides(head_dim, text):
    """On Hopper by lists; without a score, so up to 128 columns."""
    rows, keys = 1500, 2100
    q = torch.randn(2, rows, 2, head_dim, device="cuda").bfloat16()
    k, v = torch.randn(2, 2, keys, 2, head_dim, device="cuda").bfloat16()
    document = (torch.arange(keys, device="cuda").float().sqrt() / 8).int()
    row, key = torch.arange(keys - rows, keys, device="cuda")[:, None], torch.arange(keys, device="cuda")
    reads = "document" in text
    seen = (key <= row) & (document[row] == document[key]) if reads else (key <= row) | (4 * key < keys)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = attention(*inputs, mask=text, tensors={"document": document} if reads else None)
    dout = torch.randn_like(o)
    found = torch.autograd.grad(o, inputs, dout)
    doubled = [x.detach().double().requires_grad_() for x in inputs]
    expected = exact(*doubled, seen, lambda s: s)
    for got, wanted in zip(found, torch.autograd.grad(expected, doubled, dout.double()), strict=True):
        assert (got.double() - wanted).abs().max() < 0.03 * wanted.abs().max()
