"""A training step in C++ is one of torch's: hooks, checkpoints, errors, whoever looks on; nothing outlives its use."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashladder.common.api import attention, backward, differentiable, operator, padding
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.runtime import fast_path
from flashladder.tests.support import fake_cuda
from flashladder.tests.support.training_calls import QKV, asked_of, for_training, launches_of, qkv, step, wanting


@pytest.fixture(params=["node", "function"])
def driver(monkeypatch, request):
    return for_training(monkeypatch, request.param == "node")


@pytest.fixture
def asked(monkeypatch):
    return asked_of(monkeypatch)


@pytest.mark.parametrize(
    ("card", "columns", "is_copied"),
    [
        ("h100", (40, 40), False),
        *(pytest.param("h100", each, False, marks=pytest.mark.slow) for each in ((160, 160), (192, 192), (192, 128))),
        *(("a100", columns, True) for columns in ((40, 40), (64, 40))),
    ],
)
def test_what_a_card_takes_is_not_copied(monkeypatch, card, columns, is_copied):
    """Neither for O nor for the gradients."""
    fake_cuda.for_attention(monkeypatch, card)
    filled = []
    monkeypatch.setattr(padding, "pad", lambda x, by: filled.append(by) or torch.nn.functional.pad(x, by))
    q, v = (wanting(1, 64, 2, each) for each in columns)
    step([q, q.detach().requires_grad_(), v])
    assert bool(filled) == is_copied


@pytest.mark.parametrize("of_all", [False, True])
def test_no_rung_for_the_same_bits_is_said_before_anything_is_computed(driver, monkeypatch, of_all):
    step()
    usual = backward.choice_for

    def choice_for(problem, device):
        if problem.deterministic:
            raise UnsupportedProblemError("no such rung")
        return usual(problem, device)

    monkeypatch.setattr(backward, "choice_for", choice_for)
    driver.launches.clear()
    torch.use_deterministic_algorithms(of_all)
    try:
        with pytest.raises(UnsupportedProblemError, match="want a gradient, and no such rung"):
            attention(*QKV, deterministic=not of_all)
        torch.use_deterministic_algorithms(of_all, warn_only=True)
        assert not driver.launches
        attention(*QKV)
    finally:
        torch.use_deterministic_algorithms(False)


def test_torchs_switch_decides_in_the_backward_pass(driver):
    """What was known before it was turned is of other kernels."""
    usual, same_bits = (launches_of(driver, partial(step, deterministic=each)) for each in (False, True))
    assert usual != same_bits
    o = attention(*QKV)
    driver.launches.clear()
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(o, QKV, torch.zeros_like(o))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [each.function for each in driver.launches] == [function for function, *_ in same_bits[1:]]


def test_hooks_see_each_tensor_once_and_may_fail(driver):
    step()
    packed, unpacked = [], []
    with saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: unpacked.append(x) or x):
        o = attention(*QKV)
    torch.autograd.grad(o, QKV, torch.zeros_like(o))
    assert (len(packed), len(unpacked)) == (5, 5)
    asked_for = []

    def refuse(x):
        asked_for.append(x)
        raise ValueError("no room")

    with saved_tensors_hooks(refuse, lambda x: x), pytest.raises(ValueError, match="no room"):
        attention(*QKV)
    assert len(asked_for) == 1


def test_checkpoints_compute_again(driver):
    step()
    for early in (False, True):
        driver.launches.clear()
        o = checkpoint(lambda *x: attention(*x), *QKV, use_reentrant=False, early_stop=early)
        torch.autograd.grad(o, QKV, torch.zeros_like(o))
        assert sum("forward" in each.function for each in driver.launches) == 2
    o = checkpoint(lambda *x: attention(*x), *QKV, use_reentrant=True)
    o.backward(torch.zeros_like(o))
    assert QKV[0].grad is not None


def test_gradients_out_of_the_ordinary(driver, asked):
    for _ in range(3):
        step()
    o, lse = attention(*QKV, return_lse=True)
    for given in (torch.zeros_like(o), torch.zeros(1, dtype=o.dtype).expand_as(o), torch.zeros_like(o.mT).mT):
        assert all(x.is_contiguous() for x in torch.autograd.grad(o, QKV, given, retain_graph=True))
    (dq,) = torch.autograd.grad(lse, QKV[:1], torch.zeros_like(lse), retain_graph=True)
    many = torch.zeros(3, *o.shape, dtype=o.dtype)
    assert len(torch.autograd.grad(o, QKV[:1], many, is_grads_batched=True, retain_graph=True)[0]) == 3
    (dq,) = torch.autograd.grad(o, QKV[:1], torch.zeros_like(o), create_graph=True)
    with pytest.raises(UnsupportedProblemError, match="double backward"):
        dq.sum().backward()
    with torch.inference_mode():
        frozen = torch.zeros(2, 64, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        attention(QKV[0], frozen, frozen)


def test_it_is_the_node_that_differentiates(driver):
    for _ in range(2):
        step()
    assert attention(*QKV).grad_fn.name() == ("FlashLadderAttentionBackward" if fast_path.node else "_DirectBackward")


def test_compiled_autograd_records_the_operator():
    """Of a node of the uncompiled forward pass."""
    attach = differentiable._attach_of(fast_path.made_node())
    inputs, ran = [torch.randn(1, 16, 1, 64).bfloat16().requires_grad_() for _ in range(3)], []
    with torch.no_grad():
        outputs = attention(*inputs, return_lse=True)
    expected = torch.autograd.grad(attention(*inputs), inputs, torch.ones_like(outputs[0]))
    o = attach(*inputs, outputs, False, None, "fastest", False, False)

    def compiler(graph):
        return lambda *given, **named: ran.append(graph.code) or graph(*given, **named)

    with compiled_autograd._enable(compiler):
        o.backward(torch.ones_like(o))
    assert ["flashladder.attention_backward" in code for code in ran] == [True]
    assert all(map(torch.equal, [x.grad for x in inputs], expected))


def test_errors_of_torch(driver):
    for _ in range(3):
        step()
    inputs = [x.detach().clone().requires_grad_() for x in QKV]
    o = attention(*inputs)
    o.backward(torch.zeros_like(o))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        o.backward(torch.zeros_like(o))
    for changed in range(2):
        between = [x * 1 for x in inputs]
        o = attention(*between)
        (o.detach() if changed else between[1]).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(o, inputs, torch.zeros_like(o))
    with saved_tensors_hooks(lambda x: x, lambda x: 1 / 0):
        o = attention(*inputs)
    with pytest.raises(ZeroDivisionError):
        o.backward(torch.zeros_like(o))
    with torch.autograd.detect_anomaly(check_nan=False):
        o = attention(*inputs)
        o.backward(torch.zeros_like(o))


def test_gradients_that_are_not_there(driver):
    """Of what nobody wants, and of outputs that have none."""
    for wanting_q, wanting_k, wanting_v in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)):
        inputs = [
            x.detach().requires_grad_(bool(of)) for x, of in zip(QKV, (wanting_q, wanting_k, wanting_v), strict=True)
        ]
        for _ in range(3):
            o, lse = attention(*inputs, return_lse=True)
            torch.autograd.backward((o, lse), (torch.zeros_like(o), torch.zeros_like(lse)))
        assert [x.grad is not None for x in inputs] == [wanting_q, wanting_k, wanting_v]

    class Nothing(torch.autograd.Function):
        forward = staticmethod(lambda ctx, *x: tuple(each.clone() for each in x))
        backward = staticmethod(lambda ctx, *x: (None,) * len(x))

    o, _ = Nothing.apply(*attention(*QKV, return_lse=True))
    driver.launches.clear()
    assert torch.autograd.grad(o, QKV, torch.zeros_like(o), allow_unused=True) == (None,) * 3
    assert not driver.launches


def test_a_failed_backward_pass_says_why(driver, monkeypatch):
    """What C++ leaves goes through Python, whose error is the call's."""

    def refuse(*_):
        raise UnsupportedProblemError("no such rung")

    for _ in range(3):
        step()
    o = attention(*QKV)
    monkeypatch.setattr(backward, "planned", {})
    monkeypatch.setattr(backward, "choice_for", refuse)
    with pytest.raises(UnsupportedProblemError, match="no such rung"):
        torch.autograd.grad(o, QKV, torch.zeros_like(o))


def test_who_looks_on_at_either_pass_sees_its_operator(driver):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        step()
    o, dout, seen = attention(*QKV), torch.zeros(2, 64, 4, 64, dtype=torch.bfloat16), []
    with Watch():
        torch.autograd.grad(o, QKV, dout)
    assert "flashladder.attention_backward.default" in seen
    with Watch():
        attention(*QKV)
    assert "flashladder.attention.default" in seen


def test_another_device_is_left(driver, monkeypatch, asked):
    for _ in range(3):
        step()
    o = attention(*QKV)
    for run in (lambda: attention(*QKV), lambda: torch.autograd.grad(o, QKV, torch.zeros_like(o))):
        asked.clear()
        driver.launches.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: 5)
            run()
        assert asked
        assert driver.launches


def test_what_is_kept_is_bounded(driver, monkeypatch):
    monkeypatch.setattr(operator, "PROBLEMS_KEPT", 2)
    for rows in (64, 65, 66, 67):
        for _ in range(3):
            step(qkv(rows=rows))
    assert len(backward.planned) == 2


def test_nothing_outlives_its_use(driver):
    """No cycle holds tensors until Python collects garbage; a backward pass lets go of what was kept for it, and so do
    outputs that nobody wants.
    """
    for _ in range(3):
        step()
    inputs = [x * 1 for x in QKV]
    o, lse = attention(*inputs, return_lse=True)
    kept, outputs = [weakref.ref(x) for x in inputs], [weakref.ref(x) for x in (o, lse)]
    gc.disable()
    try:
        del inputs, lse
        o.backward(torch.zeros_like(o))
        assert [each() for each in kept] == [None] * 3
        del o
        assert [each() for each in outputs] == [None] * 2
        inputs = [x * 1 for x in QKV]
        kept, o = [weakref.ref(x) for x in inputs], attention(*inputs)
        del inputs
        assert None not in [each() for each in kept]
        del o
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()
