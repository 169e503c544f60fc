"""The gradient of attention sinks beside those of q, k and v: a kernel makes what each row adds to it."""

import math

import pytest
import torch

from flashladder import attention, dropout_mask, packed_attention
from flashladder.common.api import backward, beside, differentiable
from flashladder.common.problem import dropout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, KEYS, HEADS, COLUMNS = 20, 16, 4, 64
BLIND = ROWS - KEYS  # rows that see no key, under a causal mask


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def by_kernel(monkeypatch):
    """torch's passes over O and dO fail."""
    monkeypatch.delattr(beside, "of_sinks")


def normal(*shape, seed, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def drawn(device):
    """q, k and v, and sinks, of which one takes nothing; all want gradients."""
    lengths = enumerate((ROWS, KEYS, KEYS))
    inputs = [normal(1, length, HEADS, COLUMNS, seed=seed, device=device) for seed, length in lengths]
    return [x.requires_grad_() for x in (*inputs, torch.tensor([0.5, -1.0, 2.0, -math.inf], device=device))]


def wanted_of(o, lse):
    """dO and dLSE, of which the latter is 0 in rows without a key and a sink."""
    dout, dlse = normal(*o.shape, seed=7, device=o.device), normal(*lse.shape, seed=8, device=o.device).float()
    return dout, dlse.masked_fill(lse == -math.inf, 0)


def exactly(q, k, v, sinks, given, left=KEYS, kept=1.0):
    """Of the sinks, in fp64, under a causal mask; `kept` is what dropout makes of the weights."""
    q, k, v = (x.detach().double().transpose(1, 2) for x in (q, k, v))
    twin = sinks.detach().double().requires_grad_()
    ahead = torch.arange(ROWS)[:, None] + KEYS - ROWS - torch.arange(KEYS)
    is_hidden = ((ahead < 0) | (ahead > left)).to(q.device)
    scores = (q @ k.mT * COLUMNS**-0.5).masked_fill(is_hidden, -math.inf)
    scores = torch.cat((scores, twin[:, None, None].expand(*scores.shape[:3], 1)), 3)
    o = ((scores.softmax(3)[..., :-1].nan_to_num() * kept) @ v).transpose(1, 2)
    outputs = o, scores.logsumexp(3).nan_to_num(neginf=0)
    return torch.autograd.grad(outputs, twin, [x.double() for x in given])[0].nan_to_num()


def near(ours, exact):
    torch.testing.assert_close(ours.double(), exact, rtol=0.01, atol=0.03)


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, KEYS),
        pytest.param({"window": (3, None), "deterministic": True}, 3, marks=pytest.mark.slow),
        pytest.param({"dropout_p": 0.3}, KEYS, marks=pytest.mark.slow),
        pytest.param({"mask": "q - k <= 3 && k >= 0"}, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_is_the_exact_one_rounded(options, left, device):
    """Of O and the log-sum-exp; and the same bits in each run."""
    *inputs, sinks = drawn(device)
    found, kept = [], 1.0
    for _ in range(2):
        torch.manual_seed(0)
        outputs = attention(*inputs, causal=True, sinks=sinks, return_lse=True, **options)
        given = wanted_of(*outputs)
        found.append(torch.autograd.grad(outputs, (sinks, *inputs), given)[0])
    if "dropout_p" in options:
        torch.manual_seed(0)
        kept = dropout_mask(*inputs[:2], 0.3) * dropout.rescale(0.3)
    near(found[0], exactly(*inputs, sinks, given, left, kept))
    assert torch.equal(*found)
    assert found[0].dtype == torch.float32


@pytest.mark.usefixtures("by_kernel")
def test_a_row_without_keys_adds_its_own_alone(device):
    """Whatever its dO says, as its O is 0: what the gradient of its log-sum-exp does."""
    *inputs, sinks = drawn(device)
    outputs = attention(*inputs, causal=True, sinks=sinks, return_lse=True)
    dout, dlse = wanted_of(*outputs)
    found = []
    for value in (0.0, math.nan, math.inf):
        dout[:, :BLIND] = value
        found.append(torch.autograd.grad(outputs, (sinks, inputs[0]), (dout, dlse), retain_graph=True)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    near(found[0], exactly(*inputs, sinks, (dout.nan_to_num(posinf=0), dlse)))


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.slow
def test_rows_of_no_sequence_add_nothing(device):
    """Also with NaN in their dO and dLSE."""
    *inputs, sinks = drawn(device)
    starts = [torch.tensor([0, 9, 9, end], dtype=torch.int32, device=device) for end in (17, 14)]
    dout, found = normal(ROWS, HEADS, COLUMNS, seed=7, device=device), []
    for behind, rows in ((0.0, ROWS), (math.nan, ROWS), (0.0, 17)):
        q, k, v = inputs[0][0, :rows], *(x[0] for x in inputs[1:])
        outputs = packed_attention(q, k, v, *starts, 9, 9, causal=True, sinks=sinks, return_lse=True)
        dlse = torch.ones_like(outputs[1])
        dout[17:], dlse[:, 17:] = behind, behind
        found.append(torch.autograd.grad(outputs, (sinks, inputs[1]), (dout[:rows], dlse))[0])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    assert (found[0][:3] != 0).all()


@pytest.mark.parametrize("beside", [(), (0,)], ids=["alone", "beside dQ"])
def test_where_nobody_sees_a_key(beside, device):
    """A row's log-sum-exp is the sink then; rows behind the last sequence add nothing."""
    *inputs, sinks = drawn(device)
    starts = [torch.tensor([0, end], dtype=torch.int32, device=device) for end in (17, 0)]
    outputs = packed_attention(*(x[0] for x in inputs), *starts, 17, 0, sinks=sinks, return_lse=True)
    dout, dlse = wanted_of(*outputs)
    found = torch.autograd.grad(outputs, (sinks, *(inputs[i] for i in beside)), (dout, dlse))
    torch.testing.assert_close(found[0], dlse[:, :17].sum(1))
    assert not any(gradient.any() for gradient in found[1:])


def test_alone_it_launches_no_kernel(device, monkeypatch):
    """There torch makes it, to what the kernel does."""
    *inputs, sinks = drawn(device)
    found = []
    for q, k, v in (inputs, [x.detach() for x in inputs]):
        outputs = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        found.append(torch.autograd.grad(outputs, sinks, wanted_of(*outputs))[0])
        monkeypatch.setattr(backward, "problem_of", None)  # of which a kernel would be looked for
        monkeypatch.setattr(differentiable, "require_rung", lambda *_: None)
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_beside_a_tensor_that_a_score_reads(device, monkeypatch):
    """Where that alone has a gradient too, a kernel runs."""
    *inputs, sinks = drawn(device)
    q, k, v = (x.detach() for x in inputs)
    ones, found = torch.ones(HEADS, device=device).requires_grad_(), []
    outputs = attention(q, k, v, causal=True, sinks=sinks, score="s * w[h]", tensors={"w": ones}, return_lse=True)
    given = wanted_of(*outputs)
    found.append(torch.autograd.grad(outputs, sinks, given, retain_graph=True)[0])
    monkeypatch.delattr(beside, "of_sinks")
    found.append(torch.autograd.grad(outputs, (sinks, ones), given)[0])
    torch.testing.assert_close(*found)
    near(found[1], exactly(q, k, v, sinks, given))


def test_sinks_of_16_bits_have_one_of_16_bits(device):
    *inputs, sinks = drawn(device)
    rounded = sinks.detach().bfloat16().requires_grad_()
    outputs = attention(*inputs, causal=True, sinks=rounded, return_lse=True)
    found, _ = torch.autograd.grad(outputs, (rounded, inputs[0]), given := wanted_of(*outputs))
    assert found.dtype == torch.bfloat16
    near(found, exactly(*inputs, rounded, given))


def test_torch_computes_nothing_of_o(device):
    """But where sinks alone want a gradient."""
    *inputs, sinks = drawn(device)
    computed = []
    for q, k, v in (inputs, [x.detach() for x in inputs]):
        o = attention(q, k, v, causal=True, sinks=sinks)
        dout = normal(*o.shape, seed=7, device=device)
        with torch.profiler.profile(record_shapes=True) as profile:
            o.backward(dout)
        passes = {each.name for each in profile.events() if list(o.shape) in each.input_shapes}
        assert "flashladder::attention_backward" in passes
        computed.append(passes & {"aten::mul", "aten::sum", "aten::_to_copy", "aten::eq", "aten::bmm"})
    assert not computed[0]
    assert computed[1] >= {"aten::mul", "aten::sum", "aten::eq"}


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"mask": "q - k <= 3 && k >= 0"}, marks=pytest.mark.slow)], ids=str
)
def test_torch_compiles_it(options, device):
    *inputs, sinks = drawn(device)

    def model(q, k, v, sinks):
        return attention(q * 2, k, v, causal=True, sinks=sinks, **options) * 3

    dout = normal(1, ROWS, HEADS, COLUMNS, seed=7, device=device)
    expected = torch.autograd.grad(model(*inputs, sinks), (*inputs, sinks), dout)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, torch.autograd.grad(compiled(*inputs, sinks), (*inputs, sinks), dout), expected))
