"""attention under torch.autograd: the gradients of a model, on the emulator and on a GPU."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashladder
from flashladder.common import catalog
from flashladder.common.api import backward
from flashladder.common.api.options import Options
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.tests.support import fake_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {"seqlen_q": 20, "seqlen_k": 36, "num_heads": 2, "num_heads_k": 1, "head_dim": 64}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def drawn(device, **sizes):
    """A problem of the backward pass, its tensors, and q, k and v of them that want gradients."""
    problem = Problem(**(SIZES | sizes), operation=backward.OPERATION)
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


def test_whoever_looks_on_sees_operators_of_both_passes(device):
    """Others see none, and have the same gradients."""
    _, tensors, inputs = drawn(device)

    def both():
        return torch.autograd.grad(flashladder.attention(*inputs), inputs, tensors.dout)

    with torch.profiler.profile() as profile:
        seen = both()
    assert {"flashladder::attention", "flashladder::attention_backward"} <= {
        each.key for each in profile.key_averages()
    }
    assert "flashladder" not in type(flashladder.attention(*inputs).grad_fn).__name__
    assert all(map(torch.equal, seen, both()))


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


@pytest.mark.parametrize("wanted", ["v", "q", "kv"])
def test_only_gradients_that_are_asked_for(wanted, device):
    """As where only some of a model's parameters are trained, such as LoRA's."""
    problem, tensors, inputs = drawn(device)
    q, k, v = (x if name in wanted else x.detach() for name, x in zip("qkv", inputs, strict=True))
    o, lse = flashladder.attention(q, k, v, return_lse=True)
    asked = {f"d{name}": x for name, x in zip("qkv", (q, k, v), strict=True) if name in wanted}
    made = torch.autograd.grad(o, tuple(asked.values()), tensors.dout)
    require_right(problem, tensors, **dict(zip(asked, made, strict=True)))
    assert lse.shape == (1, 2, 20)


def test_a_gradient_of_other_strides(device):
    problem, tensors, (q, k, v) = drawn(device)
    dout = tensors.dout.transpose(1, 3).contiguous().transpose(1, 3)
    assert dout.stride(-1) != 1
    grads = torch.autograd.grad(flashladder.attention(q, k, v), (q, k, v), dout)
    require_right(problem, tensors, **dict(zip(("dq", "dk", "dv"), grads, strict=True)))


def test_a_gradient_at_any_address(device, monkeypatch):
    """That of O is copied. The emulator has no need to: launches are looked at in its place."""
    if device == "cpu":
        fake_cuda.for_attention(monkeypatch)
    _, tensors, inputs = drawn(device)
    o, lse = flashladder.attention(*inputs, return_lse=True)
    found = []
    for shift in (0, 1):
        dout, dlse = (x.new_empty(x.numel() + shift)[shift:].view_as(x).copy_(x) for x in (tensors.dout, tensors.lse))
        found.append(torch.autograd.grad((o, lse), inputs, (dout, dlse), retain_graph=True))
    assert device == "cpu" or all(map(torch.equal, *found))


@pytest.mark.slow
def test_gradients_of_several_directions(device):
    """torch then has one tensor stand for several, which has no memory."""
    _, tensors, (q, k, v) = drawn(device)
    sinks = torch.zeros(2, device=device, requires_grad=True)
    outputs = flashladder.attention(q, k, v, sinks=sinks, return_lse=True)
    both = [torch.stack((x, -2 * x)) for x in (tensors.dout, tensors.lse)]
    made = torch.autograd.grad(outputs, (q, k, v, sinks), both, is_grads_batched=True, retain_graph=True)
    for number in range(2):
        one = torch.autograd.grad(outputs, (q, k, v, sinks), [x[number] for x in both], retain_graph=True)
        assert all(torch.equal(x[number], y) for x, y in zip(made, one, strict=True))
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)

    def of_packed(x):
        return flashladder.flash_attn_varlen_func(x, x, x, starts, starts, 3, 3)[0, 0, :2]

    x = q[0, :5].detach()
    found = [torch.autograd.functional.jacobian(of_packed, x, vectorize=vectorize) for vectorize in (False, True)]
    assert torch.equal(*found)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_row_without_keys_adds_nothing_to_the_gradient_of_sinks(packed, device):
    """Its O is 0, whatever its dO says. The log-sum-exp is the sink."""
    _, tensors, inputs = drawn(device, seqlen_k=8)
    sinks = torch.zeros(2, device=device, requires_grad=True)
    starts = [torch.tensor([0, end], dtype=torch.int32, device=device) for end in (20, 8)]
    dlse, found = torch.ones(2, 20, device=device), []
    for value in (0.0, math.nan):
        dout = tensors.dout.detach().clone()
        dout[:, :12] = value
        if packed:
            o, lse = flashladder.packed_attention(
                *(x[0] for x in inputs), *starts, 20, 8, causal=True, sinks=sinks, return_lse=True
            )
        else:
            o, lse = flashladder.attention(*inputs, causal=True, sinks=sinks, return_lse=True)
        found += torch.autograd.grad((o, lse), sinks, (dout.view_as(o), dlse.view_as(lse)))
    assert torch.equal(*found)
    assert (found[0] > 11).all()


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
    options = Options(sinks=torch.zeros(2, device=device))
    given = tensors.dout, *(tensor.detach() for tensor in inputs), o, lse, None, *options.flat()
    for wanted in ((True, True, True), (True, False, False), (False, True, True), (False, False, True)):
        torch.library.opcheck(torch.ops.flashladder.attention_backward.default, (*given, *wanted))
        made = torch.ops.flashladder.attention_backward(*given, *wanted)
        assert [bool(gradient.numel()) for gradient in made] == [wanted[0], wanted[1], wanted[1], wanted[2]]
    fake = [tensor.detach().to("meta").requires_grad_() for tensor in inputs]
    flashladder.attention(*fake).sum().backward()
    assert fake[0].grad.is_meta


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ({"head_dim": 264}, {}, "want a gradient, and backward/11_any_attention takes head_dim .*, not 264"),
        ({}, {"alibi_slopes": torch.ones(2, requires_grad=True)}, "alibi_slopes want a gradient"),
        ({}, {"out": torch.empty(1, 20, 2, 64, dtype=torch.bfloat16)}, "backward rungs take no out"),
    ],
)
def test_what_no_rung_computes_is_refused_before_anything_is_computed(sizes, options, words):
    _, _, inputs = drawn("cpu", **sizes)
    with pytest.raises(UnsupportedProblemError, match=words):
        flashladder.attention(*inputs, **options)


@pytest.fixture
def same_bits():
    """torch's switch, on."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def asked_for(monkeypatch):
    """Problems for which a rung was looked for."""
    found, choice_for = [], backward.choice_for
    monkeypatch.setattr(backward, "choice_for", lambda problem, q: found.append(problem) or choice_for(problem, q))
    return found


@pytest.mark.slow
def test_where_flash_attns_argument_asks_for_the_same_bits(device, asked_for):
    problem, tensors, (q, k, v) = drawn(device, causal=True)
    o = flashladder.flash_attn_func(q, k, v, causal=True, deterministic=True)
    o.backward(tensors.dout)
    require_right(problem, tensors, dq=q.grad, dk=k.grad, dv=v.grad)
    assert torch.equal(o, flashladder.flash_attn_func(*(x.detach() for x in (q, k, v)), causal=True))
    starts = (torch.tensor([0, end], dtype=torch.int32, device=device) for end in (20, 36))
    packed = flashladder.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 20, 36, causal=True, deterministic=True)
    again = torch.autograd.grad(packed, (q, k, v), tensors.dout[0])
    require_right(problem, tensors, **dict(zip(("dq", "dk", "dv"), again, strict=True)))
    assert len(asked_for) == 4
    assert all(each.deterministic for each in asked_for)


@pytest.mark.usefixtures("same_bits")
def test_where_torchs_switch_asks_for_the_same_bits(device, asked_for):
    problem, tensors, (q, k, v) = drawn(device)
    flashladder.attention(q, k, v).backward(tensors.dout)
    require_right(problem, tensors, dq=q.grad, dk=k.grad, dv=v.grad)
    assert [each.deterministic for each in asked_for] == [True, True]
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert not backward.problem_of(q, k, k, Options(), dlse=False).deterministic


def test_dropout_has_deterministic_gradients(device):
    """The same bits in two runs of one mask."""
    _, tensors, inputs = drawn(device)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        o = flashladder.flash_attn_func(*inputs, 0.1, deterministic=True)
        found.append(torch.autograd.grad(o, inputs, tensors.dout))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_gradients_of_gradients_are_refused(device):
    _, tensors, (q, k, v) = drawn(device)
    (dq,) = torch.autograd.grad(flashladder.attention(q, k, v), (q,), tensors.dout, create_graph=True)
    with pytest.raises(UnsupportedProblemError, match="double backward"):
        dq.sum().backward()
    (dq,) = torch.autograd.grad(flashladder.attention(q, k, v, softcap=9.0), (q,), tensors.dout, create_graph=True)
    with pytest.raises(UnsupportedProblemError, match="double backward"):
        dq.sum().backward()


def test_gradients_of_torchs_transforms_are_refused(device):
    """torch has none of a library's operator. What vmap calls keeps a log-sum-exp only where it is asked for."""
    _, _, (q, k, v) = drawn(device)
    k, v = k.detach(), v.detach()
    with pytest.raises(UnsupportedProblemError, match=r"torch\.autograd\.grad gives them"):
        torch.func.grad(lambda x: flashladder.flash_attn_func(x, k, v).sum())(q.detach())
    for options in ({}, {"window": (3, 3)}):
        with pytest.raises(UnsupportedProblemError, match="return_lse=True, or without vmap"):
            torch.vmap(lambda x, options=options: flashladder.attention(x, k, v, **options))(q[None])
    o, _ = torch.vmap(lambda x: flashladder.attention(x, k, v, return_lse=True))(q[None])
    expected = torch.autograd.grad(flashladder.attention(q, k, v).sum(), q)
    torch.testing.assert_close(torch.autograd.grad(o.sum(), q), expected)


@pytest.mark.parametrize("of_o", [True, False])
def test_the_log_sum_exp_has_a_gradient(of_o, device):
    """Beside that of O, and alone."""
    problem, tensors, inputs = drawn(device, options={"dlse": True})
    o, lse = flashladder.attention(*inputs, return_lse=True)
    if not of_o:
        tensors.dout.zero_()
    outputs, given = ([o, lse], [tensors.dout, tensors.dlse]) if of_o else ([lse], [tensors.dlse])
    made = torch.autograd.grad(outputs, inputs[: 3 if of_o else 2], given)
    require_right(problem, tensors, **dict(zip(("dq", "dk", "dv"), made, strict=False)))


@pytest.mark.parametrize(
    ("bounds", "arguments"),
    [
        ({"window_left": 9, "window_right": 4}, {"window_size": (9, 4)}),
        ({"softcap": 1.5, "alibi": True, "causal": True}, {"softcap": 1.5, "causal": True}),
    ],
)
def test_gradients_of_flash_attns_options(bounds, arguments, device):
    problem, tensors, inputs = drawn(device, **bounds)
    slopes = {"alibi_slopes": tensors.alibi_slopes} if problem.alibi else {}
    flashladder.flash_attn_func(*inputs, **arguments, **slopes).backward(tensors.dout)
    require_right(problem, tensors, **{f"d{name}": x.grad for name, x in zip("qkv", inputs, strict=True)})


def test_gradients_of_packed_sequences(device):
    """With rows and keys of no sequence behind the last one, which have no gradient."""
    lengths = {"seqlens_q": (20, 0, 33), "seqlens_k": (36, 7, 0)}
    problem, tensors, _ = drawn(device, **lengths, seqlen_q=None, seqlen_k=None, causal=True)
    q, k, v, dout = (
        torch.cat([x, x[:, :3]], 1)[0].detach().requires_grad_()
        for x in map(tensors.by_name.get, ("q", "k", "v", "dout"))
    )
    starts = tensors.cu_seqlens_q, tensors.cu_seqlens_k, 33, 36
    flashladder.flash_attn_varlen_func(q, k, v, *starts, causal=True).backward(dout)
    found = {f"d{name}": x.grad for name, x in zip("qkv", (q, k, v), strict=True)}
    require_right(problem, tensors, **{name: gradient[None, :-3] for name, gradient in found.items()})
    assert not any(gradient[-3:].any() for gradient in found.values())


def test_packed_sequences_of_which_nobody_sees_a_key(device):
    x = torch.ones(5, 1, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    starts = (torch.tensor([0, end], dtype=torch.int32, device=device) for end in (5, 0))
    flashladder.packed_attention(x, x, x, *starts, 5, 0).sum().backward()
    assert not x.grad.any()


def test_views_of_one_packed_tensor(device):
    """qkv, whose gradient is one tensor too; equal lengths are a batch."""
    _, tensors, _ = drawn(device, num_heads_k=2, seqlen_k=20)
    together = torch.stack([tensors.by_name[name][0] for name in "qkv"], 1).detach().requires_grad_()
    starts = torch.tensor([0, 20], dtype=torch.int32, device=device)
    flashladder.flash_attn_varlen_qkvpacked_func(together, starts, 20).backward(tensors.dout[0])
    apart = together.detach()[None].requires_grad_()
    flashladder.flash_attn_qkvpacked_func(apart).backward(tensors.dout)
    torch.testing.assert_close(together.grad[None], apart.grad, rtol=0, atol=2**-7)


def chosen(problem, arch):
    gpu = load_gpu("h100" if arch == "sm_90a" else "a100")
    return catalog.choice(problem, catalog.Card(arch, gpu))[0]


@pytest.mark.parametrize(
    ("more", "arch", "rung"),
    [
        ({}, "sm_80", "backward/11"),
        ({}, "sm_90a", "backward/20"),
        ({"head_dim": 128, "num_heads_k": 1, "causal": True}, "sm_90a", "backward/20"),
        ({"head_dim": 96}, "sm_90a", "backward/20"),
        ({"head_dim": 256}, "sm_90a", "backward/21"),
        ({"head_dim": 256, "softcap": 5.0}, "sm_90a", "backward/21"),
        ({"head_dim": 160, "head_dim_v": 72, "window_left": 9, "alibi": True}, "sm_90a", "backward/22"),
        ({"head_dim": 192, "head_dim_v": 128, "dropout_p": 0.1}, "sm_90a", "backward/22"),
        ({"head_dim": 224, "window_left": 9, "window_right": 3, "options": {"dlse": True}}, "sm_90a", "backward/21"),
        ({"head_dim": 256, "options": {"wants_dq": False}}, "sm_90a", "backward/21"),
        ({"softcap": 5.0}, "sm_80", "backward/11"),
        ({"softcap": 5.0}, "sm_90a", "backward/20"),
        ({"dropout_p": 0.1}, "sm_80", "backward/11"),
        ({"dropout_p": 0.1}, "sm_90a", "backward/20"),
    ],
)
def test_the_first_rung_that_takes_the_problem(more, arch, rung):
    problem = Problem(**{**SIZES, **more}, operation=backward.OPERATION)
    assert chosen(problem, arch) == catalog.find(rung)


@pytest.mark.parametrize(
    ("more", "split"),
    [
        ({"causal": True}, True),
        ({}, False),
        ({"causal": True, "num_heads_k": 2}, False),
        ({"causal": True, "options": {"deterministic": True}}, False),
    ],
)
def test_heads_of_a_group_have_their_ctas_under_a_causal_mask(more, split):
    problem = Problem(**{**SIZES, **more}, operation=backward.OPERATION)
    _, config = catalog.choice(problem, catalog.Card("sm_90a", load_gpu("h100")))[:2]
    assert config.split_heads == split


@pytest.mark.parametrize(
    ("arch", "more", "rung"),
    [
        ("sm_80", {}, "backward/11"),
        ("sm_90a", {}, "backward/20"),
        ("sm_90a", {"head_dim": 128}, "backward/20"),
        ("sm_90a", {"softcap": 5.0}, "backward/20"),
        ("sm_90a", {"head_dim": 96}, "backward/20"),
        ("sm_90a", {"dropout_p": 0.1}, "backward/20"),
        ("sm_90a", {"head_dim": 192, "window_left": 9}, "backward/22"),
        ("sm_90a", {"head_dim": 200}, "backward/21"),
    ],
)
def test_the_first_rung_that_gives_the_same_bits(arch, more, rung):
    problem = Problem(**(SIZES | more), options={"deterministic": True}, operation=backward.OPERATION)
    assert chosen(problem, arch) == catalog.find(rung)
