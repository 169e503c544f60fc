"""Any head_dim, any head_dim_v, and attention sinks, as `attention` and `packed_attention` take them."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashladder import attention, flash_attn_func, flash_attn_with_kvcache, packed_attention
from flashladder.common import catalog
from flashladder.common.api import padding
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SINKS = torch.tensor([1.0, -2.0, 5.0, -math.inf])


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def drawn(*shape, device="cpu", dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact(q, k, v, sinks=None, causal=False, window=None):
    """In fp64, of a batch: a sink is a column of the scores that has no V."""
    heads = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    own = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)
    scores.masked_fill_((causal & (key > own)) | (key < own - (window or k.shape[2])), -math.inf)
    logits = torch.full((q.shape[1],), -math.inf) if sinks is None else sinks
    scores = torch.cat((scores, logits.to(scores)[:, None, None].expand(*scores.shape[:3], 1)), 3)
    return (scores.softmax(3).nan_to_num()[..., :-1] @ v).transpose(1, 2), scores.logsumexp(3)


def near(found, expected, dtype=torch.bfloat16):
    for ours, theirs, atol in zip(
        found, expected, ({torch.bfloat16: 0.02, torch.float16: 0.003}[dtype], 1e-5), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=atol)


@settings(max_examples=4, deadline=None)
@given(st.integers(1, 64), st.sampled_from([torch.bfloat16, torch.float16]), st.booleans())
@example(59, torch.bfloat16, True)
@example(111, torch.float16, False)
@pytest.mark.slow
def test_any_head_dim(head_dim, dtype, sinks):
    q = drawn(1, 9, 4, head_dim, dtype=dtype)
    k, v = drawn(2, 1, 30, 2, head_dim, dtype=dtype, seed=1)
    options = {"causal": True, "sinks": SINKS if sinks else None}
    o, lse = attention(q, k, v, return_lse=True, **options)
    near((o, lse), exact(q, k, v, **options), dtype)
    wide = torch.full((1, 30, 2, 8 * (head_dim // 8 + 2)), math.nan, dtype=dtype)[..., :head_dim].copy_(k)
    assert torch.equal(attention(q, wide, v, return_lse=True, **options)[0], o)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 20), (40, 72)])
@pytest.mark.slow
def test_v_of_another_head_dim(head_dim, head_dim_v, device):
    q = drawn(1, 19, 4, head_dim, device=device)
    k, v = drawn(1, 30, 2, head_dim, seed=1, device=device), drawn(1, 30, 2, head_dim_v, seed=2, device=device)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert o.shape == (1, 19, 4, head_dim_v)
    near((o, lse), exact(q, k, v, causal=True))
    out = torch.empty_like(o)
    assert attention(q, k, v, causal=True, out=out) is out
    assert torch.equal(out, o)
    assert torch.equal(flash_attn_func(q, k, v, causal=True), o)
    near(attention(q, k, v, causal=True, window=(5, None), return_lse=True), exact(q, k, v, causal=True, window=5))
    ends = [torch.tensor([0, rows], dtype=torch.int32, device=device) for rows in (19, 30)]
    alone = packed_attention(q[0], k[0], v[0], *ends, 19, 30, causal=True, return_lse=True)
    near(alone, [x[0] for x in exact(q, k, v, causal=True)])


@pytest.mark.slow
def test_sinks_beside_a_window_and_rows_without_keys(device):
    q, (k, v), sinks = (
        drawn(2, 40, 4, 64, device=device),
        drawn(2, 2, 30, 2, 64, device=device, seed=1),
        SINKS.to(device),
    )
    o, lse = attention(q, k, v, causal=True, window=(5, None), sinks=sinks, return_lse=True)
    near((o, lse), exact(q, k, v, sinks, causal=True, window=5))
    assert not o[:, :10].any()
    assert torch.equal(lse[:, :, :10], sinks[:, None].expand(2, 4, 10))
    out = torch.empty_like(q)
    assert attention(q, k, v, causal=True, window=(5, None), sinks=sinks, out=out) is out
    assert torch.equal(out, o)
    half = attention(q, k, v, causal=True, window=(5, None), sinks=sinks.to(torch.bfloat16))
    assert torch.equal(half, o)


def test_packed_sequences_have_them_too(device):
    sinks, dims = SINKS.to(device), (64, 20)
    ends = torch.tensor([0, 20, 20, 57], dtype=torch.int32, device=device)
    for head_dim in dims:
        q, k = drawn(57, 4, head_dim, device=device), drawn(57, 2, head_dim, device=device, seed=1)
        options = {"causal": True, "sinks": sinks, "return_lse": True}
        o, lse = packed_attention(q, k, k, ends, ends, 37, 37, **options)
        for rows in (slice(0, 20), slice(20, 57)):
            alone = exact(q[None, rows], k[None, rows], k[None, rows], sinks, causal=True)
            near((o[rows], lse[:, rows]), [x[0] for x in alone])


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(59, 59), (64, 40), (40, 64), (72, 72)])
def test_gradients_of_head_dims_that_are_filled_up(head_dim, head_dim_v):
    widths = (head_dim, head_dim, head_dim_v)
    inputs = [drawn(1, 16, 2, columns, seed=seed).requires_grad_() for seed, columns in enumerate(widths)]
    attention(*inputs).sum().backward()
    twins = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact(*twins)[0].sum().backward()
    for ours, theirs in zip(inputs, twins, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("place", "widths", "dropout", "columns"),
    [
        *((("sm_90a", False), (each, each), False, (each, each)) for each in range(8, 257, 8)),
        (("sm_90a", False), (192, 128), False, (192, 128)),
        (("sm_90a", False), (192, 128), True, (192, 192)),  # no kernel of the forward pass drops weights of those
        (("sm_90a", False), (64, 128), False, (128, 128)),
        (("sm_90a", False), (155, 20), False, (160, 24)),
        (("sm_90a", False), (512, 512), False, (512, 512)),
        *((("sm_90a", False, True), each, False, (96, 96)) for each in ((72, 72), (96, 40))),  # beside expressions
        (("sm_90a", False, True), (192, 128), False, (256, 256)),
        *((place, (192, 128), False, (256, 256)) for place in (("sm_80", False), ("sm_90a", True))),
        *((place, (40, 40), False, (64, 64)) for place in (("sm_80", False), ("sm_90a", True))),
        *((place, (64, 40), False, (64, 64)) for place in (("sm_80", False), ("sm_90a", True))),
    ],
)
def test_gradients_copy_what_no_rung_of_the_card_takes(place, widths, dropout, columns):
    assert padding.columns(*widths, dropout, catalog.widths("backward", *place)) == columns


@pytest.mark.parametrize(
    ("packed", "head_dim", "wants"),
    [
        (False, 64, (True, True)),
        (False, 64, (False, True)),
        (False, 64, (True, False)),
        (True, 64, (True, True)),
        (False, 40, (True, True)),
    ],
)
def test_gradients_beside_sinks(packed, head_dim, wants, device):
    """Of the inputs and of the sinks, of O and of the log-sum-exp; some rows see no key."""
    inputs = [
        drawn(1, rows, heads, head_dim, seed=i, device=device)
        for i, (rows, heads) in enumerate(((20, 4), (16, 2), (16, 2)))
    ]
    inputs, sinks = [x.requires_grad_(wants[0]) for x in inputs], SINKS.clone().to(device).requires_grad_(wants[1])
    if packed:
        ends = [torch.tensor([0, rows], dtype=torch.int32, device=device) for rows in (20, 16)]
        o, lse = packed_attention(*(x[0] for x in inputs), *ends, 20, 16, causal=True, sinks=sinks, return_lse=True)
        o, lse = o[None], lse[None]
    else:
        o, lse = attention(*inputs, causal=True, sinks=sinks, return_lse=True)
    dout, dlse = drawn(*o.shape, seed=7, device=device), drawn(*lse.shape, seed=8, device=device).float()
    dlse[:, 3, :4] = 0  # of rows without a key and a sink
    torch.autograd.backward([o, lse], [dout, dlse])
    twins = [x.detach().double().requires_grad_() for x in (*inputs, sinks)]
    of_o, of_lse = exact(*twins[:3], sinks=twins[3], causal=True)
    torch.autograd.backward([of_o, of_lse.nan_to_num(neginf=0)], [dout.double(), dlse.double()])
    for ours, theirs, is_wanted in zip((*inputs, sinks), twins, [wants[0]] * 3 + [wants[1]], strict=True):
        assert (ours.grad is not None) == is_wanted
        if is_wanted:
            torch.testing.assert_close(ours.grad.double(), theirs.grad.nan_to_num(), rtol=0.01, atol=0.03)


def test_gradients_ignore_rows_behind_the_last_sequence(device):
    """Also NaN there, in the gradients of O and of the log-sum-exp."""
    inputs = [drawn(9, heads, 64, seed=i, device=device).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    inputs.append(SINKS.clone().to(device).requires_grad_())
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    outputs = packed_attention(*inputs[:3], ends, ends, 4, 4, causal=True, sinks=inputs[3], return_lse=True)
    made = []
    for behind in (0, torch.nan):
        of_o, of_lse = drawn(9, 4, 64, seed=7, device=device), drawn(4, 9, seed=8, device=device).float()
        of_o[6:], of_lse[:, 6:] = behind, behind
        made.append(torch.autograd.grad(outputs, inputs, (of_o, of_lse), retain_graph=True))
    torch.testing.assert_close(*made)


def test_the_gradient_of_sinks_does_not_overflow(device):
    """dO O is beyond fp16."""
    q, k = (
        drawn(1, 9, 4, 64, dtype=torch.float16, device=device),
        drawn(1, 9, 2, 64, dtype=torch.float16, seed=1, device=device),
    )
    sinks, dout = torch.zeros(4, device=device, requires_grad=True), torch.full_like(q, 2000)
    attention(q, k, 100 * k, sinks=sinks).backward(dout)
    twin = sinks.detach().double().requires_grad_()
    exact(q, k, 100 * k, twin)[0].backward(dout.double())
    torch.testing.assert_close(sinks.grad.double(), twin.grad, rtol=0.01, atol=20)


@pytest.mark.parametrize("options", [{}, {"sinks": SINKS}])
@pytest.mark.parametrize("columns", [20, 64])
def test_compiled_in_one_piece(columns, options, device):
    q, options = drawn(1, 20, 4, columns, device=device), {name: x.to(device) for name, x in options.items()}

    def attend(q):
        return attention(q, q, q[..., :24], **options)

    assert torch.equal(torch.compile(attend, backend="aot_eager", fullgraph=True)(q), attend(q))


Q = drawn(1, 9, 4, 20)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((Q, Q[..., :12], Q), {}, r"k is \(1, 9, 4, 12\) .* with the other tensors it is \(1, 9, 4, 20\)"),
        ((Q, Q, Q), {"sinks": 1.0}, "sinks=1.0 is of type float; it should be a torch.Tensor"),
        ((Q, Q, Q), {"sinks": SINKS[:3]}, r"sinks is \(3,\) torch.float32; with q it is \(4,\) torch.float32"),
        ((Q, Q, Q), {"sinks": SINKS.to(torch.int32)}, r"sinks is \(4,\) torch.int32"),
        ((Q, Q, Q), {"sinks": SINKS.to("meta")}, "sinks on meta, q on cpu"),
        ((Q, Q, Q), {"out": torch.empty(1, 9, 4, 24, dtype=Q.dtype)}, "out is .* O is"),
        ((Q.clone().requires_grad_(), Q, Q), {"out": torch.empty_like(Q)}, "backward rungs take no out"),
        ([torch.zeros(1, 9, 4, 604, dtype=Q.dtype)] * 3, {}, "q has head_dim 604, v 604; kernels take up to 512"),
    ],
)
def test_what_it_cannot_do_is_said(arguments, options, words):
    with pytest.raises(UnsupportedProblemError, match=words):
        attention(*arguments, **options)


@pytest.mark.parametrize(
    ("columns", "cut"),
    [
        (128, lambda x: x[..., ::2]),
        (65, lambda x: x[..., :64]),  # rows begin at no multiple of 16 bytes
        (72, lambda x: x[..., 1:65]),  # the address is none
        (64, lambda x: x.transpose(1, 3).contiguous().transpose(1, 3)),
    ],
    ids=["every other", "65", "address", "columns last"],
)
def test_inputs_of_any_strides_are_copied(columns, cut):
    """By every entry point, forward and backward. Caches are refused: a copy would cost more than the call."""
    wide = [drawn(1, 20, heads, columns, seed=heads).requires_grad_() for heads in (2, 1, 1)]
    with_gaps = [cut(each) for each in wide]
    whole = [each.detach().contiguous().requires_grad_() for each in with_gaps]
    expected = attention(*whole, causal=True)
    wanted = torch.autograd.grad(expected.sum(), whole)
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
    packing = cu_seqlens, cu_seqlens, 20, 20
    for call in (attention, flash_attn_func, lambda *x, **o: packed_attention(*(each[0] for each in x), *packing, **o)):
        o = call(*with_gaps, causal=True)
        assert torch.equal(o, expected.view_as(o))
        found = torch.autograd.grad(o.sum(), wide)
        torch.testing.assert_close([cut(each) for each in found], [*wanted])
    with torch.no_grad():
        caches = [torch.zeros(1, 24, 1, 64, dtype=torch.bfloat16) for _ in range(2)]
        cached = flash_attn_with_kvcache(with_gaps[0], *caches, *with_gaps[1:], cache_seqlens=0, causal=True)
        torch.testing.assert_close(cached, expected, rtol=0.01, atol=0.01)
        if with_gaps[1].stride(-1) != 1 or columns % 8:
            with pytest.raises(UnsupportedProblemError, match=r"k_cache has strides .*; kernels need"):
                flash_attn_with_kvcache(whole[0], *with_gaps[1:], causal=True)


MODS = ("mask=k<=q||h<1", "score=s*2.0", "bias:fp32[];score=s+bias[k];gradients=bias")


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("packed", [{}, {"total_q": 128, "total_k": 128}], ids=["one length", "packed"])
def test_gradients_beside_expressions_have_a_rung_for_the_columns_that_tensors_get(mods, packed):
    """Whichever rung a GPU of Hopper launches: some take fewer head_dims than others."""
    card = catalog.Card("sm_90a", load_gpu("h100"))
    trained = catalog.widths("backward", card.arch, mods=True)
    for head_dim in range(8, 257, 8):
        columns, columns_v = padding.columns(head_dim, head_dim, False, trained)
        asked = {"head_dim": columns, "head_dim_v": columns_v, "mods": mods, "extents": ((64,),) * mods.count("[];")}
        problem = Problem(operation="backward", batch=2, seqlen_q=64, seqlen_k=64, dtype="bf16", **asked, **packed)
        assert catalog.choice(problem, card)[0].supports.mods
