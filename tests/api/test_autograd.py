"""attention under torch.autograd: the gradients of a model, on the emulator and on a GPU."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashladder
from flashladder.common import catalog
from flashladder.common.api import differentiable
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {"seqlen_q": 20, "seqlen_k": 36, "num_heads": 2, "num_heads_k": 1, "head_dim": 64}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def drawn(device, **sizes):
    """A problem of the backward pass, its tensors, and q, k and v of them that want gradients."""
    problem = Problem(**(SIZES | sizes), operation=differentiable.LADDER)
    tensors = make_inputs(problem, device)
    return problem, tensors, [tensors.by_name[name].detach().requires_grad_() for name in "qkv"]


def require_right(problem, tensors, **gradients):
    expected = expect(problem, tensors)
    for name, gradient in gradients.items():
        error = (gradient - expected.exact[name]).abs().max()
        assert error <= expected.tolerances[name], name


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_exact_ones_rounded(causal, device):
    problem, tensors, (q, k, v) = drawn(device, causal=causal)
    o = flashladder.attention(q, k, v, causal=causal)
    o.backward(tensors.dout)
    require_right(problem, tensors, dq=q.grad, dk=k.grad, dv=v.grad)
    with torch.no_grad():
        assert torch.equal(o, flashladder.attention(q, k, v, causal=causal))


def test_as_torchs_own(device):
    """Inputs that are views, of which two are one tensor's; and the sum, whose gradient has no strides."""
    _, tensors, _ = drawn(device, num_heads_k=2, seqlen_k=20)
    found = []
    for ours in (True, False):
        x, y = (tensors.by_name[name].detach().clone().requires_grad_() for name in ("q", "k"))
        parts = (x * 1.5).transpose(1, 2), y.transpose(1, 2), y.transpose(1, 2)
        if ours:
            o = flashladder.flash_attn_func(*(part.transpose(1, 2) for part in parts), causal=True).transpose(1, 2)
        else:
            o = scaled_dot_product_attention(*(part.float() for part in parts), is_causal=True)
        o.sum().backward()
        found.append((x.grad, y.grad))
    for given, exact in zip(*found, strict=True):
        torch.testing.assert_close(given, exact, rtol=2**-6, atol=2**-6)


def test_only_gradients_that_are_asked_for(device):
    problem, tensors, (q, k, v) = drawn(device)
    o, lse = flashladder.attention(q.detach(), k.detach(), v, return_lse=True)
    (dv,) = torch.autograd.grad(o, (v,), tensors.dout)
    require_right(problem, tensors, dv=dv)
    assert lse.shape == (1, 2, 20)


def test_a_gradient_of_other_strides(device):
    problem, tensors, (q, k, v) = drawn(device)
    dout = tensors.dout.transpose(1, 3).contiguous().transpose(1, 3)
    assert dout.stride(-1) != 1
    grads = torch.autograd.grad(flashladder.attention(q, k, v), (q, k, v), dout)
    require_right(problem, tensors, **dict(zip(("dq", "dk", "dv"), grads, strict=True)))


def test_expanded_keys(device):
    """Their gradient is the sum over those who share them."""
    problem, tensors, (q, k, v) = drawn(device)
    dk, dv = torch.autograd.grad(
        flashladder.attention(q, k.expand(1, 36, 2, 64), v.expand(1, 36, 2, 64)), (k, v), tensors.dout
    )
    torch.testing.assert_close(dk, flashladder_gradient(q, k, v, tensors.dout), rtol=2**-6, atol=2**-6)
    assert dv.shape == v.shape
    assert problem.num_heads_k == 1


def flashladder_gradient(q, k, v, dout):
    return torch.autograd.grad(flashladder.attention(q, k, v), (k,), dout)[0]


def test_torch_compiles_both_passes(device):
    _, tensors, inputs = drawn(device)

    def model(q, k, v):
        return flashladder.attention(q * 2, k, v, causal=True).transpose(1, 2) * 3

    dout = tensors.dout.transpose(1, 2)
    expected = torch.autograd.grad(model(*inputs), inputs, dout)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, torch.autograd.grad(compiled(*inputs), inputs, dout), expected))


def test_its_operators_are_what_torch_expects(device):
    _, tensors, inputs = drawn(device, seqlen_q=8, seqlen_k=8)
    o, lse = (tensors.by_name[name] for name in ("o", "lse"))
    given = tensors.dout, *(tensor.detach() for tensor in inputs), o, lse, False, None
    torch.library.opcheck(torch.ops.flashladder.attention_backward.default, given)
    fake = [tensor.detach().to("meta").requires_grad_() for tensor in inputs]
    flashladder.attention(*fake).sum().backward()
    assert fake[0].grad.is_meta


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ({"head_dim": 40}, {}, "want a gradient, and backward/00_minimal takes head_dim .*, not 40"),
        ({}, {"window": (3, None)}, "want a gradient, and backward rungs take no window: leave it out, or"),
        ({}, {"softcap": 20.0, "alibi_slopes": torch.ones(2)}, "backward rungs take no softcap, alibi_slopes"),
        ({}, {"out": torch.empty(1, 20, 2, 64, dtype=torch.bfloat16)}, "backward rungs take no out"),
    ],
)
def test_what_no_rung_computes_is_refused_before_anything_is_computed(sizes, options, words):
    _, _, inputs = drawn("cpu", **sizes)
    with pytest.raises(UnsupportedProblemError, match=words):
        flashladder.attention(*inputs, **options)


def test_where_torch_wants_the_same_bits_each_time_it_is_refused():
    _, _, inputs = drawn("cpu")
    with pytest.raises(UnsupportedProblemError, match="backward rungs take no deterministic"):
        flashladder.flash_attn_func(*inputs, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedProblemError, match="sum dQ in any order"):
            flashladder.attention(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_of_gradients_are_refused(device):
    _, tensors, (q, k, v) = drawn(device)
    (dq,) = torch.autograd.grad(flashladder.attention(q, k, v), (q,), tensors.dout, create_graph=True)
    with pytest.raises(UnsupportedProblemError, match="double backward"):
        dq.sum().backward()


def test_the_gradient_of_the_log_sum_exp_is_refused(device):
    _, _, inputs = drawn(device)
    o, lse = flashladder.attention(*inputs, return_lse=True)
    with pytest.raises(UnsupportedProblemError, match="a gradient of the log-sum-exp is wanted"):
        (o.sum() + lse.sum()).backward()


def test_the_highest_rung_that_takes_the_problem():
    finished = [rung for rung in catalog.versions(ladder=differentiable.LADDER) if not rung.draft]
    for sizes in ({"seqlen_q": 128, "seqlen_k": 128, "num_heads_k": 2}, {}):
        problem = Problem(**(SIZES | sizes), operation=differentiable.LADDER)
        able = [rung for rung in finished if rung.takes(problem)]
        assert differentiable.rung_for(problem, "sm_80") == able[-1]
