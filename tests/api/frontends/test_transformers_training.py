"""Training under attn_implementation="ladder": gradients of small random models, on the emulator or a GPU."""

import copy

import pytest
import test_transformers
import torch
from test_transformers import IDS, PADDED, logits, made

import flashladder
from flashladder.common.api import operator
from flashladder.common.api.frontends import transformers as ours
from flashladder.common.problem.dropout import quantised

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

device, registered = test_transformers.device, test_transformers._registered  # fixtures


def trained_by(model, implementation, ids, **options):
    """The gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    model(ids, **options).loss.backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters() if parameter.grad is not None}


def require_near(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 0.03 * gradient.abs().max(), name


@pytest.mark.parametrize("mask", [None, PADDED["left"]], ids=["whole", "padded"])
def test_a_model_trains(mask, device):
    """Its gradients are those with transformers' own attention, but for rounding; of tokens that follow no padding.

    What a row of padding attends to is undefined, and the first token behind it is predicted from it.
    """
    labels = IDS if mask is None else IDS.masked_fill(mask * mask.roll(1, 1) == 0, -100)
    options = {"labels": labels.to(device), "attention_mask": mask if mask is None else mask.to(device)}
    theirs, ours = (trained_by(made("Llama", device), name, IDS.to(device), **options) for name in ("sdpa", "ladder"))
    require_near(ours, theirs)


@pytest.mark.parametrize(
    ("name", "case", "operation"),
    [
        ("Llama", "whole", "forward"),
        ("Qwen3", "ones", "forward"),
        ("Qwen3", "left", "packed"),
        ("Llama", "within", "packed"),
        ("Mistral", "packed", "packed"),
    ],
)
def test_a_compiled_model_trains(name, case, operation, device, monkeypatch):
    """Without a cache, in one graph, on ours: where nothing is hidden but by a causal mask, on its plain kernels."""
    options = {"use_cache": False}
    mask = {"ones": torch.ones_like(IDS), **PADDED}.get(case)
    if mask is not None:
        options["attention_mask"] = mask.to(device)
    if case == "packed":
        options["position_ids"] = torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1).contiguous().to(device)
    hidden = torch.zeros_like(IDS).bool() if mask is None else mask * mask.roll(1, 1) == 0
    options["labels"] = IDS.masked_fill(hidden, -100).to(device)
    model, ids, ran = made(name, device, num_hidden_layers=1, sliding_window=4), IDS.to(device), []
    theirs = trained_by(model, "sdpa", ids, **options)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.set_attn_implementation("ladder")
    model.zero_grad()
    monkeypatch.setattr(operator, "watch", lambda problem, *_: ran.append(problem))
    compiled(ids, **options).loss.backward()
    require_near({name: parameter.grad.float() for name, parameter in model.named_parameters()}, theirs)
    assert [problem.operation for problem in ran] == [operation]
    assert ran[0].window_left == (3 if name == "Mistral" else None)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 72), (80, 80), (192, 128)])
def test_heads_of_any_width_train(head_dim, head_dim_v):
    """On ours, as near to exact attention as rounding lets them; what no backward rung takes is padded."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 16, columns).bfloat16() for columns in (head_dim, head_dim, head_dim_v)]
    twins = [x.double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    o, _ = ours._attend(torch.nn.Module(), *inputs, None, is_causal=True)
    exact = torch.nn.functional.scaled_dot_product_attention(*twins, is_causal=True).transpose(1, 2)
    for outputs in (o, exact):
        outputs.backward(torch.ones_like(outputs).cumsum(-1) / head_dim_v)
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=0.02)
    for x, twin in zip(inputs, twins, strict=True):
        torch.testing.assert_close(x.grad.double(), twin.grad, rtol=0, atol=0.03)


def test_a_model_trains_with_attention_sinks(device):
    """gpt-oss learns its sinks: as near to fp32's gradients as eager attention in 16 bits is, but for a factor of 2."""
    model = made("GptOss", device, num_local_experts=2, num_experts_per_tok=2, sliding_window=5, pad_token_id=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, -1.0, 0.0, 3.0]))
    ids = IDS.to(device)
    exact = trained_by(copy.deepcopy(model).float(), "eager", ids, labels=ids)
    eager, ours = (trained_by(model, name, ids, labels=ids) for name in ("eager", "ladder"))
    assert ours.keys() == exact.keys()
    assert any("sinks" in name for name in ours)
    for name, gradient in exact.items():
        allowed = 2 * (eager[name] - gradient).abs().max() + 1e-5
        assert (ours[name] - gradient).abs().max() <= allowed, name


def test_a_model_trains_with_dropout(device):
    """Its gradients are those of the mask applied by hand in each layer; without training nothing is dropped."""

    def by_hand(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
        kept = flashladder.dropout_mask(query.transpose(1, 2), key.transpose(1, 2), dropout) / (1 - quantised(dropout))
        group = query.shape[1] // key.shape[1]
        scores = scaling * query.float() @ key.float().repeat_interleave(group, 1).mT
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1) * kept
        o = weights.float() @ value.float().repeat_interleave(group, 1)
        return o.to(query.dtype).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("by_hand", by_hand)
    found, ids = [], IDS.to(device)
    for name in ("by_hand", "ladder"):
        model = made("Llama", device, attention_dropout=0.4).train()
        torch.manual_seed(0)
        found.append(trained_by(model, name, ids, labels=ids))
    theirs, ours = found
    require_near(ours, theirs)
    assert torch.equal(logits(model.eval(), "ladder", ids), logits(made("Llama", device), "ladder", ids))
