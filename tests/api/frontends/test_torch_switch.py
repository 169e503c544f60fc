"""torch's own switch: registered, activated and taken back; ours where it can, torch's where it refuses, said once."""

import inspect
import logging
import re
import textwrap

import pytest
import torch
from torch.nn import attention as switch
from torch.nn.functional import scaled_dot_product_attention

import flashladder
from flashladder.common.api.frontends import fallback, torch_switch
from flashladder.common.api.frontends.fallback import FallbackWarning
from flashladder.common.errors import DeviceError, ToolchainError
from flashladder.common.paths import ROOT

pytestmark = pytest.mark.skipif(
    not hasattr(switch, "register_flash_attention_impl"), reason="torch has no registry of flash implementations"
)
operator = torch.ops.aten._scaled_dot_product_flash_attention
backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
TORCHS = 7.0  # what the stand-in for torch's kernel says of everything


def stand_in(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    states = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
    return torch.full_like(query, TORCHS), lse, None, None, query.shape[2], key.shape[2], *states, query.new_empty(0)


def backward_stand_in(dout, query, key, value, *_, scale=None):
    return tuple(torch.full_like(x, TORCHS) for x in (query, key, value))


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Nothing was said before, and nothing stays registered or activated."""
    monkeypatch.setattr(fallback, "_said", set())
    monkeypatch.setattr(switch._registry, "_FLASH_ATTENTION_IMPLS", dict(switch._registry._FLASH_ATTENTION_IMPLS))
    yield
    switch.restore_flash_attention_impl(_raise_warn=False)


def packed_stand_in(query, key, value, *_, **__):
    states = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    return torch.full_like(query, TORCHS), query.new_zeros(query.shape[1::-1]).float(), *states, query.new_empty(0)


def packed_backward_stand_in(dout, query, key, value, *_, **__):
    return tuple(torch.full_like(x, TORCHS) for x in (query, key, value))


def packed_out_stand_in(out, query, *_, **__):
    out.fill_(TORCHS)
    return query.new_zeros(query.shape[1::-1]).float()


@pytest.fixture
def cpu(monkeypatch):
    """The operators on the CPU, where torch has none: stand-ins for torch's kernels, overridden as on CUDA."""
    monkeypatch.setattr(torch_switch, "_device", "CPU")
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_flash_attention", stand_in, "CPU")
        library.impl("_scaled_dot_product_flash_attention_backward", backward_stand_in, "CPU")
        library.impl("_flash_attention_forward", packed_stand_in, "CPU")
        library.impl("_flash_attention_backward", packed_backward_stand_in, "CPU")
        if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
            library.impl("_flash_attention_forward_no_dropout_inplace", packed_out_stand_in, "CPU")
        flashladder.register_with_torch()
        yield
        switch.restore_flash_attention_impl(_raise_warn=False)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def is_torchs(outputs):
    return bool((outputs[0] == TORCHS).all())


def test_it_runs_from_activation_to_restoration(cpu):
    q = drawn(1, 1, 16, 64)
    assert "ladder" in switch.list_flash_attention_impls()
    assert is_torchs(operator(q, q, q))
    for _ in range(2):
        switch.activate_flash_attention_impl("ladder")
        switch.activate_flash_attention_impl("ladder")
        assert switch.current_flash_attention_impl() == "ladder"
        assert not is_torchs(operator(q, q, q))
        switch.restore_flash_attention_impl()
        assert switch.current_flash_attention_impl() is None
        assert is_torchs(operator(q, q, q))


def test_the_lines_of_the_docs_activate_it(cpu):
    lines = re.search(
        r"^    import flashladder\n.*?\n\n(?=\S)", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE | re.DOTALL
    )
    exec(textwrap.dedent(lines[0]), names := {})
    assert switch.current_flash_attention_impl() == "ladder"
    names["restore_flash_attention_impl"]()
    assert switch.current_flash_attention_impl() is None


@pytest.mark.parametrize("packed_by", ["head", "row"])
def test_it_gives_what_torch_expects(cpu, packed_by):
    """Values, and also the shapes and strides that torch.compile takes for granted."""
    q, k, v = drawn(2, 4, 24, 64), *drawn(2, 2, 2, 24, 64)
    if packed_by == "row":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    switch.activate_flash_attention_impl("ladder")
    arguments, options = (q, k, v, 0.0, True), {"scale": 0.3}
    outputs = operator(*arguments, **options)
    expected = scaled_dot_product_attention(*arguments[:3], is_causal=True, enable_gqa=True, **options)
    torch.testing.assert_close(outputs[0], expected, rtol=0, atol=0.02)
    shaped = operator(*(tensor.to("meta") for tensor in arguments[:3]), *arguments[3:], **options)
    for given, meta in zip(outputs, shaped, strict=True):
        if isinstance(given, torch.Tensor):
            dtype = torch.int64 if meta.shape == (2,) else meta.dtype  # by which backward knows our random state
            assert (given.shape, given.stride(), given.dtype) == (meta.shape, meta.stride(), dtype)
        else:
            assert given == meta
    scores = 0.3 * q.double() @ k.double().repeat_interleave(2, 1).mT
    scores.masked_fill_(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(outputs[1].double(), scores.logsumexp(-1), rtol=0, atol=1e-4)


def test_what_is_refused_runs_on_torchs_and_is_said_once(cpu, recwarn):
    q = drawn(1, 1, 16, 64)
    switch.activate_flash_attention_impl("ladder")
    refused = (
        ((q.float(),) * 3, "q is torch.float32; kernels take torch.bfloat16, torch.float16"),
        ((q, q, q, 1.0), "dropout_p=1.0: must be at least 0 and less than 1"),
        ((q, q, q, 0.0, False, True), "return_debug_mask: kernels keep no probabilities"),
        ((drawn(1, 1, 16, 520),) * 3, "head_dim"),
        ((drawn(1, 1, 16, 264).requires_grad_(),) * 3, "head_dim"),
    )
    for arguments, reason in refused:
        with pytest.warns(FallbackWarning, match="torch's FlashAttention-2 runs instead of FlashLadder: ") as warned:
            assert is_torchs(operator(*arguments))
        assert reason in str(warned[0].message)
        assert is_torchs(operator(*arguments))
    assert is_torchs(operator(q, q, q, 2.0)), "the same reason with another number"
    assert not recwarn.list
    operator(*refused[-1][0])[0].sum().backward()
    assert bool((refused[-1][0][0].grad == 3 * TORCHS).all()), "its gradients are torch's too"


@pytest.mark.parametrize(
    ("dropout_p", "packed_by", "head_dim"),
    [
        (0.0, "head", 64),
        pytest.param(0.0, "row", 80, marks=pytest.mark.slow),
        pytest.param(0.3, "head", 72, marks=pytest.mark.slow),
        (0.3, "row", 64),
    ],
)
def test_it_trains(cpu, dropout_p, packed_by, head_dim):
    """As `attention` does, with the same mask after the same seed; gradients are strided as torch expects them."""
    inputs = [x.clone() for x in drawn(3, 2, 2, 24, head_dim)]
    if packed_by == "row":
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    switch.activate_flash_attention_impl("ladder")
    torch.manual_seed(0)
    o, lse, *rest = operator(*inputs, dropout_p, True)
    made = torch.autograd.grad(o, inputs, torch.ones_like(o).cumsum(-1))
    torch.manual_seed(0)
    ours = flashladder.attention(*(x.transpose(1, 2) for x in inputs), causal=True, dropout_p=dropout_p)
    expected = torch.autograd.grad(ours, inputs, torch.ones_like(ours).cumsum(-1))
    assert torch.equal(o, ours.transpose(1, 2))
    for given, other, x in zip(made, expected, inputs, strict=True):
        torch.testing.assert_close(given, other, rtol=2**-7, atol=2**-7)
        assert given.stride() == x.stride()
    shaped = [x.to("meta") for x in (o, *inputs, o, lse)]
    meta = backward(*shaped, *rest[:4], dropout_p, True, *(x.to("meta") for x in rest[4:6]))
    assert [x.stride() for x in meta] == [x.stride() for x in made]


varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch has no varlen_attn")
STARTS, KEYS = torch.tensor([0, 5, 25], dtype=torch.int32), torch.tensor([0, 20, 50], dtype=torch.int32)
has_varlen = pytest.mark.skipif(
    "num_splits" not in inspect.signature(varlen.varlen_attn).parameters, reason="torch has an older varlen_attn"
)


def packed(**options):
    """q, k and v of two sequences, and how varlen_attn takes them."""
    q, k, v = drawn(25, 4, 64), *drawn(2, 50, 2, 64)
    return (q, k, v), (STARTS, KEYS, 20, 30), {"enable_gqa": True, **options}


@has_varlen
@pytest.mark.parametrize(
    "window_size", [(-1, 0), *(pytest.param(x, marks=pytest.mark.slow) for x in ((-1, -1), (7, 0), (7, 2)))]
)
def test_varlen_attn(cpu, window_size):
    (q, k, v), lengths, options = packed(window_size=window_size, scale=0.3, return_aux=varlen.AuxRequest(lse=True))
    assert is_torchs(varlen.varlen_attn(q, k, v, *lengths, **options))
    switch.activate_flash_attention_impl("ladder")
    o, lse = varlen.varlen_attn(q, k, v, *lengths, **options)
    expected = flashladder.flash_attn_varlen_func(
        q, k, v, *lengths, window_size=window_size, softmax_scale=0.3, return_attn_probs=True
    )
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])
    out = torch.empty_like(q)
    options.pop("return_aux")
    varlen.varlen_attn_out(out, q, k, v, *lengths, **options)
    assert torch.equal(out, o)


@has_varlen
def test_varlen_attn_of_pages(cpu):
    (q, *_), _, options = packed(window_size=(-1, 0))
    pages, table, keys = drawn(2, 4, 16, 2, 64), torch.tensor([[2, 0], [3, 1]]).int(), torch.tensor([20, 30]).int()
    options |= {"block_table": table, "seqused_k": keys, "num_splits": 1}
    switch.activate_flash_attention_impl("ladder")
    o = varlen.varlen_attn(q, *pages, STARTS, None, 20, 32, **options)
    options = {"block_table": table, "seqused_k": keys, "num_splits": 1, "causal": True}
    assert torch.equal(o, flashladder.flash_attn_varlen_func(q, *pages, STARTS, None, 20, 32, **options))
    out = torch.empty_like(q)
    options = {"block_table": table, "seqused_k": keys, "enable_gqa": True, "window_size": (-1, 0)}
    varlen.varlen_attn_out(out, q, *pages, STARTS, None, 20, 32, **options)
    torch.testing.assert_close(out, o, rtol=0, atol=0.01)


@has_varlen
@pytest.mark.slow
def test_varlen_attn_trains(cpu):
    (q, k, v), lengths, options = packed(window_size=(-1, 0))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    switch.activate_flash_attention_impl("ladder")
    o = varlen.varlen_attn(*inputs, *lengths, **options)
    ours = flashladder.flash_attn_varlen_func(*inputs, *lengths, causal=True)
    assert torch.equal(o, ours)
    dout = torch.ones_like(o).cumsum(-1)
    for given, expected in zip(
        torch.autograd.grad(o, inputs, dout), torch.autograd.grad(ours, inputs, dout), strict=True
    ):
        torch.testing.assert_close(given, expected, rtol=2**-7, atol=2**-7)


@has_varlen
def test_packed_sequences_that_are_refused_run_on_torchs(cpu):
    (q, k, v), lengths, options = packed()
    switch.activate_flash_attention_impl("ladder")
    with pytest.warns(FallbackWarning, match="seqused_k is given, but no block_table"):
        assert is_torchs([varlen.varlen_attn(q, k, v, *lengths, **options, seqused_k=KEYS.diff())])
    with pytest.warns(FallbackWarning, match=r"dropout_p=0\.5 in packed sequences"):
        assert is_torchs(torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.5, False, False))


def test_dense_rows_of_torchs_own_kernels_are_torchs(cpu, recwarn):
    """Which call the operators of packed sequences, after they were asked for what ours refused."""
    q = drawn(1, 16, 2, 64)
    switch.activate_flash_attention_impl("ladder")
    assert is_torchs(torch.ops.aten._flash_attention_forward(q, q, q, None, None, 16, 16, 0.0, False, False))
    assert not recwarn.list


def test_other_implementations_follow_and_go_before(cpu):
    q = drawn(1, 1, 16, 64)
    taken = []
    switch.register_flash_attention_impl("other", register_fn=lambda: taken.append("other"))
    switch.activate_flash_attention_impl("ladder")
    switch.activate_flash_attention_impl("other")
    assert taken == ["other"]
    assert is_torchs(operator(q, q, q))


def test_a_torch_without_its_kernel_for_cuda_is_refused(monkeypatch, caplog):
    def none(*_):
        raise RuntimeError("no kernel for CUDA")

    monkeypatch.setattr(torch.library, "get_kernel", none)
    flashladder.register_with_torch()
    with pytest.raises(DeviceError, match=r"has no FlashAttention-2 for CUDA.*; a torch with CUDA works"):
        switch.activate_flash_attention_impl("ladder")
    assert switch.current_flash_attention_impl() is None
    with caplog.at_level(logging.ERROR):
        switch.restore_flash_attention_impl()


def test_a_torch_without_the_registry_is_refused(monkeypatch):
    monkeypatch.delattr(switch, "register_flash_attention_impl")
    with pytest.raises(ToolchainError, match=r"has no registry of flash implementations; torch 2\.11 or later works"):
        flashladder.register_with_torch()


@pytest.mark.gpu
def test_on_a_gpu_models_change_nothing(monkeypatch):
    calls = []

    def noted(*arguments, **options):
        calls.append(arguments[0].shape)
        return flashladder.attention(*arguments, **options)

    monkeypatch.setattr(torch_switch, "attention", noted)
    flashladder.register_with_torch()
    q, k, v = drawn(2, 8, 200, 64).cuda(), *drawn(2, 2, 2, 200, 64).cuda()

    def model(q, k, v):
        return scaled_dot_product_attention(q * 2, k, v, is_causal=True, enable_gqa=True) + 1

    with switch.sdpa_kernel(switch.SDPBackend.FLASH_ATTENTION):
        expected = model(q, k, v)
        switch.activate_flash_attention_impl("ladder")
        torch.testing.assert_close(model(q, k, v), expected, rtol=2**-7, atol=0.01)
        assert calls == [(2, 200, 8, 64)]
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), expected, rtol=2**-7, atol=0.01)
        assert len(calls) == 2
        switch.restore_flash_attention_impl()
        torch.testing.assert_close(model(q, k, v), expected, rtol=0, atol=0)
        assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_on_a_gpu_models_train(dropout_p):
    """Compiled too, where the random state goes from a compiled forward pass to a compiled backward pass."""
    inputs = [x.requires_grad_() for x in drawn(3, 2, 8, 200, 64).cuda().unbind()]

    def model(q, k, v):
        return scaled_dot_product_attention(q * 2, k, v, dropout_p=dropout_p, is_causal=True) + 1

    flashladder.register_with_torch()
    with switch.sdpa_kernel(switch.SDPBackend.FLASH_ATTENTION):
        switch.activate_flash_attention_impl("ladder")
        for run in (model, torch.compile(model, fullgraph=True)):
            torch.manual_seed(0)
            made = torch.autograd.grad(run(*inputs).sum(), inputs)
            torch.manual_seed(0)
            q, k, v = (x.transpose(1, 2) for x in inputs)
            exact = flashladder.attention(q * 2, k, v, causal=True, dropout_p=dropout_p)
            for given, expected in zip(made, torch.autograd.grad(exact.sum(), inputs), strict=True):
                torch.testing.assert_close(given, expected, rtol=2**-6, atol=2**-6)
        switch.restore_flash_attention_impl()


@pytest.mark.gpu
@has_varlen
def test_varlen_attn_on_a_gpu():
    """Beside torch's own kernels."""
    flashladder.register_with_torch()
    (q, k, v), (starts, keys, *longest), options = packed(window_size=(-1, 0))
    inputs = [x.cuda().requires_grad_() for x in (q, k, v)]
    found = []
    for name in (None, "ladder"):
        if name:
            switch.activate_flash_attention_impl(name)
        o = varlen.varlen_attn(*inputs, starts.cuda(), keys.cuda(), *longest, **options)
        found.append((o, *torch.autograd.grad(o.float().square().sum(), inputs)))
    for ours, torchs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=2**-6, atol=2**-5)
    assert not torch.equal(found[0][0], found[1][0]), "which of them ran"
