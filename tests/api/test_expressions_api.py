"""attention() with a mask and a score that are expressions."""

import math

import pytest
import torch

from flashladder.common.api import attention, differentiable, expressions
from flashladder.common.api.packed import packed_attention
from flashladder.common.errors import ExpressionError, UnsupportedProblemError
from flashladder.common.expression import Mods
from flashladder.common.runtime import ready

IMAGES = "k <= q || image[q] == image[k]"


def qkv(batch=1, seqlen_q=40, seqlen_k=60, num_heads=4, num_heads_k=2, head_dim=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((seqlen_q, num_heads), (seqlen_k, num_heads_k), (seqlen_k, num_heads_k))
    return tuple(torch.randn(batch, *shape, head_dim, generator=generator).to(dtype) for shape in shapes)


def textbook(q, k, v, mask=None, score=None):
    """By torch, of functions of b, h, q and k that are written anew here: nothing of an expression is parsed."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) / math.sqrt(q.shape[-1])
    places = [torch.arange(size) for size in s.shape]
    places[2] += k.shape[1] - q.shape[1]
    at = [x.reshape(-1, *[1] * (3 - dimension)) for dimension, x in enumerate(places)]
    if score:
        s = score(s, *at)
    if mask:
        s = s.masked_fill(~mask(*at), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1).nan_to_num(0), v)


def close(found, expected):
    return torch.allclose(found.double(), expected, rtol=0, atol=0.02)


def test_images_that_see_both_ways_at_any_length_with_one_kernel(monkeypatch):
    """The issue's own example: what is compiled is for all lengths, batches, heads and sizes of tensors."""
    slope = torch.tensor([0.1, 0.2, 0.3, 0.4])
    for number, sizes in enumerate(
        ({}, {"batch": 2, "seqlen_q": 70, "seqlen_k": 130}, {"seqlen_q": 1, "num_heads_k": 4})
    ):
        q, k, v = qkv(**sizes)
        image = torch.arange(k.shape[1]) // 7 % 3
        o = attention(q, k, v, mask=IMAGES, score="s + slope[h] * (k - q)", tensors={"image": image, "slope": slope})
        expected = textbook(
            q,
            k,
            v,
            lambda b, h, q, k, image=image: (k <= q) | (image[q] == image[k]),
            lambda s, b, h, q, k: s + slope.double()[h] * (k - q),
        )
        assert close(o, expected)
        if number == 0:
            monkeypatch.setattr(ready, "translate", None)
            monkeypatch.setattr(ready, "translated", None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask": "k <= q || imag[q] == 1"}, "did you mean image?"),
        ({"mask": "k - q"}, "a mask is a truth value, and this is a whole number"),
        ({"score": "k <= q"}, "a score is a number, and this is a truth value"),
        (
            {"mask": "image[q + 1] == 1"},
            "image has 60 elements along its only dimension, and at b=0, h=0, q=59, k=0",
        ),
        (
            {"mask": "image[q - 30] == 1"},
            "q=20, k=0 its index is -10\n  image[q - 30] == 1\n        ^~~~~~",
        ),
        ({"mask": "k == 0 || image[k * (image[k] + 1)] == 1"}, "at b=0, h=0, q=20, k=30 its index is 60"),
        ({"mask": "image[q][k]"}, "image has 1 dimension, and this names 2"),
        ({"mask": "k <= q"}, "no expression reads image of the tensors"),
        ({"mask": ""}, "mask is empty; leave it out"),
        ({"mask": "k < q ||" * 600 + "true"}, "mask has 4,804 letters; an expression has at most 4,000"),
        ({"mask": True}, "mask=True is of type bool; it should be text"),
        ({}, "no expression reads image of the tensors"),
    ],
)
def test_what_is_no_expression_is_refused_before_anything_runs(options, said, monkeypatch):
    monkeypatch.setattr(ready, "translate", None)
    monkeypatch.setattr(ready, "translated", None)
    with pytest.raises(UnsupportedProblemError) as refused:
        attention(*qkv(), **options, tensors={"image": torch.ones(60, dtype=torch.int32)})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([torch.ones(60)], "it should be a dict"),
        ({1: torch.ones(60)}, "tensors has 1 for a name, of type int; give text"),
        ({"t": 3}, "tensors['t']=3 is of type int"),
        ({"t": torch.ones(60, device="meta")}, "tensors['t'] is on meta, q on cpu"),
        (
            {"t": torch.ones(60).to(torch.float8_e4m3fn)},
            "tensors['t'] is torch.float8_e4m3fn; expressions read torch.bool",
        ),
        ({"t": torch.ones(0)}, "no element to read"),
        ({"q": torch.ones(60)}, "q has a meaning in every expression"),
        ({"t;": torch.ones(60)}, "'t;' is no name of a tensor"),
        ({"t": torch.ones(1, 1, 1, 1, 60)}, "t has 5 dimensions; expressions take up to 4"),
    ],
)
def test_tensors_that_no_expression_reads_are_refused(tensors, said):
    with pytest.raises(UnsupportedProblemError) as refused:
        attention(*qkv(), score="s + t[k]", tensors=tensors)
    assert said in str(refused.value)


def test_what_a_condition_keeps_from_a_tensor_is_not_refused():
    """Under a causal mask no row sees a key before the first, and q - k is never negative."""
    q, k, v = qkv(seqlen_q=60, seqlen_k=40)
    found = {"t": torch.zeros(40)}
    for options in (
        {"score": "q >= 0 ? s + t[q] : s", "tensors": found},
        {"score": "s + t[q]", "tensors": found, "causal": True},
        {"score": "s + t[q - k]", "tensors": found, "causal": True},
        {"score": "s + t[q - k]", "tensors": {"t": torch.zeros(6)}, "causal": True, "window": (5, None)},
    ):
        with pytest.raises(UnsupportedProblemError, match="24_woven_general takes no mask and no score"):
            attention(q, k, v, version="24", **options)
    with pytest.raises(ExpressionError, match="q=-20, k=0 its index is -20"):
        attention(q, k, v, score="s + t[q]", tensors=found)


def test_only_the_letters_that_are_given_count():
    """As a configuration spells it, a text may be longer."""
    q, k, v = qkv()
    score = "+".join(["s", *["(" + "+".join([".1"] * 50) + ")"] * 26])
    assert 3900 < len(score) < 4000 < len(Mods.of(score=score).spelled)
    with pytest.raises(UnsupportedProblemError, match="24_woven_general takes no mask and no score"):
        attention(q, k, v, score=score, version="24")


@pytest.mark.parametrize("can_look", [True, False])
def test_indices_are_checked_on_the_host_whatever_the_default_device(monkeypatch, can_look):
    monkeypatch.setattr(expressions.validate, "can_look_at", lambda tensor: can_look)
    q, k, v = qkv()
    found = torch.zeros(60)
    with torch.device("meta"), pytest.raises(ExpressionError, match="its index is 60"):
        attention(q, k, v, score="s + t[k + 1]", tensors={"t": found})


def test_tensors_without_memory():
    q, k, v, t = (x.to("meta") for x in (*qkv(), torch.ones(60)))
    assert attention(q, k, v, score="s + t[k]", tensors={"t": t}).shape == q.shape
    starts = torch.tensor([0, 40], dtype=torch.int32).to("meta")
    o = packed_attention(q[0], k[0, :40], v[0, :40], starts, starts, 40, 40, score="s + t[k]", tensors={"t": t})
    assert o.shape == q[0].shape


def test_vmap_is_refused_by_name():
    q, k, v = qkv()
    with pytest.raises(UnsupportedProblemError, match=r"torch\.vmap does not batch attention with a mask"):
        torch.vmap(lambda q: attention(q, k, v, mask="k <= q"))(q[None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options", "mask", "score"),
    [
        ({"head_dim": 128}, {"mask": "k <= q && q - k < 9 && k >= 0"}, lambda b, h, q, k: (k <= q) & (q - k < 9), None),
        ({"head_dim": 80}, {"mask": "k < 16 || k <= q", "causal": False}, lambda b, h, q, k: (k < 16) | (k <= q), None),
        ({"head_dim": 30}, {"score": "s * 2 + h"}, None, lambda s, b, h, q, k: s * 2 + h),
        ({"head_dim": 256}, {"mask": "(q - k) % 3 == 0"}, lambda b, h, q, k: (q - k).abs() % 3 == 0, None),
        ({"seqlen_q": 60, "seqlen_k": 40}, {"mask": "k <= q && k >= 0"}, lambda b, h, q, k: k <= q, None),
        ({"batch": 3}, {"mask": "k % 3 == b || h == 0"}, lambda b, h, q, k: (k % 3 == b) | (h == 0), None),
        (
            {"dtype": torch.float16},
            {"mask": "k % 2 == 0", "causal": True, "window": (30, None)},
            lambda b, h, q, k: (k % 2 == 0) & (k <= q) & (q - k <= 30),
            None,
        ),
    ],
)
def test_masks_and_scores_of_any_width(sizes, options, mask, score):
    q, k, v = qkv(**sizes)
    assert close(attention(q, k, v, **options), textbook(q, k, v, mask, score))


@pytest.mark.slow
def test_packed_sequences_have_positions_of_their_own():
    lengths = [(5, 9), (0, 4), (40, 40), (7, 0)]
    q, k, v = (x[0] for x in qkv(seqlen_q=52, seqlen_k=53))
    starts = [torch.tensor([0, *each]).cumsum(0).int() for each in zip(*lengths, strict=True)]
    image = torch.arange(160).view(4, 40) // 7 % 2
    asked = {"mask": "k <= q || image[b, k] == b % 2", "score": "s - (seqlen_k - k) / 8.0", "tensors": {"image": image}}
    o = packed_attention(q, k, v, *starts, 40, 40, **asked)
    for number, ((row, rows), (key, keys)) in enumerate(
        zip(*(x.unfold(0, 2, 1).tolist() for x in starts), strict=True)
    ):
        expected = textbook(
            q[None, row:rows],
            k[None, key:keys],
            v[None, key:keys],
            lambda b, h, q, k, number=number: (k <= q) | (image[number, k] == number % 2),
            lambda s, b, h, q, k: s - (s.shape[-1] - k) / 8,
        )
        assert close(o[None, row:rows], expected)
    with pytest.raises(ExpressionError, match="image has 30 elements along its second dimension, and at b=2"):
        packed_attention(q, k, v, *starts, 40, 40, **asked | {"tensors": {"image": image[:, :30]}})


@pytest.mark.slow
def test_outputs_and_a_tensor_that_is_a_view():
    q, k, v = qkv()
    bias = torch.randn(60, 4, 60, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    options = {"score": "s + bias[h, q, k]", "tensors": {"bias": bias}}
    expected = textbook(q, k, v, score=lambda s, b, h, q, k: s + bias.double()[h, q, k])
    out = torch.empty_like(q)
    o, lse = attention(q, k, v, **options, out=out, return_lse=True)
    assert o is out
    assert close(o, expected)
    assert lse.shape == (1, 4, 40)
    assert torch.equal(attention(q, k, v, **options), o)


@pytest.mark.parametrize(
    ("options", "mask", "bounds"),
    [
        ({}, "k <= q", (True, None, None)),
        ({}, "k <= q && q - k < 8", (True, 7, None)),
        ({"window": (5, 9)}, "k - q <= 3", (False, 5, 3)),
        ({"causal": True}, "q - k <= 11 && k - q <= 2", (True, 11, None)),
    ],
)
@pytest.mark.parametrize("score", [None, "s + slope * (k - q)"])
def test_a_mask_that_is_a_window_is_asked_for_as_one(options, mask, bounds, score, monkeypatch):
    """All kernels have windows: none is compiled for the text. A score beside it stays one."""
    q, k, v = qkv()
    asked = []
    attend = differentiable.attend
    monkeypatch.setattr(differentiable, "attend", lambda *given: asked.append(given[3]) or attend(*given))
    tensors = {"slope": torch.tensor(0.25)} if score else None
    o = attention(q, k, v, mask=mask, score=score, tensors=tensors, **options)
    assert (asked[0].causal, asked[0].window_left, asked[0].window_right) == bounds
    assert getattr(asked[0], "mods", "") == (f"slope:fp32;score={score}" if score else "")
    far = 100
    left, right = (far if side is None else side for side in bounds[1:])
    right = 0 if bounds[0] else right
    expected = textbook(
        q,
        k,
        v,
        lambda b, h, q, k: (q - k <= left) & (k - q <= right),
        (lambda s, b, h, q, k: s + 0.25 * (k - q)) if score else None,
    )
    assert close(o, expected)


@pytest.mark.slow
def test_compiled_in_one_graph():
    q, k, v = qkv()
    image = torch.arange(60) // 7
    windowed = torch.compile(lambda q: attention(q, k, v, mask="k <= q"), fullgraph=True, backend="aot_eager")
    assert torch.equal(windowed(q), attention(q, k, v, causal=True))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(q, k, v, image):
        return 2 * attention(q, k, v, mask=IMAGES, tensors={"image": image})

    assert torch.equal(twice(q, k, v, image), 2 * attention(q, k, v, mask=IMAGES, tensors={"image": image}))
    with pytest.raises(Exception, match="no name imag"):
        torch.compile(lambda q: attention(q, k, v, mask="imag[q] == 1"), fullgraph=True, backend="aot_eager")(q)
    with pytest.raises(ExpressionError, match=r"q=20, k=21 its index is 20\n  k <= q \|\|"):
        twice(q, k, v, image[:9])


def test_tensors_of_a_gpu_are_checked_by_sizes(monkeypatch):
    """What a causal mask, a window and packed lengths leave is known there too; what tensors hold is not."""
    monkeypatch.setattr(expressions.validate, "can_look_at", lambda tensor: tensor.dtype != torch.float32)
    monkeypatch.setattr(ready, "translate", None)
    q, k, v = qkv(seqlen_q=60, seqlen_k=40)
    found = {"t": torch.zeros(40)}
    for options in (
        {"score": "s + t[q - k]", "causal": True},
        {"score": "s + t[q - k + 3]", "window": (5, 3), "tensors": {"t": torch.zeros(9)}},
        {"score": "s + t[int(t[k]) + 70]"},
    ):
        with pytest.raises(UnsupportedProblemError, match="24_woven_general takes no mask and no score"):
            attention(q, k, v, version="24", **{"tensors": found, **options})
    with pytest.raises(ExpressionError, match="its index is -39"):
        attention(q[:, :40], k, v, score="s + t[q - k]", tensors=found)
    with pytest.raises(ExpressionError, match=r"t has 40 elements .* its index is 40"):
        attention(q, k, v, score="s + t[q + 1]", causal=True, tensors=found)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)
    with pytest.raises(ExpressionError, match=r"t has 1 elements .* at b=1"):
        packed_attention(q[0, :40], k[0], v[0], starts, starts, 20, 20, score="s + t[b]", tensors={"t": torch.zeros(1)})
