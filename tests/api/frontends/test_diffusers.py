"""diffusers' real models under set_attention_backend("ladder"): small and random, on the emulator or a GPU."""

import copy
import re
import sys
import textwrap
import warnings

import pytest
import torch

import flashladder
from flashladder.common.api.frontends import fallback
from flashladder.common.api.frontends.fallback import FallbackWarning
from flashladder.common.errors import ToolchainError, UnsupportedProblemError
from flashladder.common.paths import ROOT

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install diffusers")

from diffusers.models import attention_dispatch as theirs  # noqa: E402

from flashladder.common.api.frontends import diffusers as ours  # noqa: E402

pytestmark = pytest.mark.slow

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Nothing was said before; what falls back unasked fails the test."""
    monkeypatch.setattr(fallback, "_said", set())
    flashladder.register_with_diffusers()
    registry = theirs._AttentionBackendRegistry
    before = registry._active_backend
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield
    registry.set_active_backend(before)


def drawn(*shape, seed=0, device="cpu", dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def attend(q, k, v, backend=ours.NAME, **options):
    return theirs.dispatch_attention_fn(q, k, v, backend=theirs.AttentionBackendName(backend), **options)


def flux():
    """Text and image in one attention, and rotary embeddings."""
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(16, 24, 24),
    )
    ids = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(6.0), torch.arange(5.0), indexing="ij"), -1)
    inputs = {
        "hidden_states": drawn(2, 30, 4),
        "encoder_hidden_states": drawn(2, 7, 32, seed=1),
        "pooled_projections": drawn(2, 32, seed=2),
        "timestep": torch.tensor([0.5, 0.1]),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return model, inputs


def wan():
    """Of video, with attention across to the text."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=1,
    )
    inputs = {
        "hidden_states": drawn(1, 4, 2, 8, 6),
        "encoder_hidden_states": drawn(1, 9, 32, seed=1),
        "timestep": torch.tensor([3]),
    }
    return model, inputs


@torch.no_grad()
def output(model, inputs, backend, dtype=torch.bfloat16):
    model = copy.deepcopy(model).to(dtype)
    model.set_attention_backend(backend)
    given = {
        name: x.to(next(model.parameters()).device, dtype if x.dtype == torch.bfloat16 else x.dtype)
        for name, x in inputs.items()
    }
    return model(**given, return_dict=False)[0].double()


@pytest.mark.parametrize("made", [flux, wan])
def test_models(made, device, monkeypatch):
    """The error rule: at most twice as far from the exact answer as torch's attention in 16 bits is."""
    calls, torchs = [], theirs._native_attention

    def noted(q, *arguments, **options):
        calls.append(tuple(q.shape))
        return flashladder.attention(q, *arguments, **options)

    torch.manual_seed(0)
    model, inputs = made()
    model = model.to(device).eval()
    exact = output(model, inputs, "native", torch.float32)
    native = output(model, inputs, "native")
    monkeypatch.setattr(ours, "attention", noted)
    monkeypatch.setattr(theirs, "_native_attention", lambda *_, **__: pytest.fail("torch's ran"))
    given = output(model, inputs, "ladder")
    monkeypatch.setattr(theirs, "_native_attention", torchs)
    assert (given - exact).abs().max() <= 2 * (native - exact).abs().max() + 1e-5
    assert calls == {flux: [(2, 37, 2, 64)] * 2, wan: [(1, 24, 2, 64)] * 2}[made]


def test_the_lines_of_the_docs(monkeypatch):
    text = (ROOT / "docs" / "models.md").read_text()
    lines = textwrap.dedent(re.search(r"^    import flashladder\n\n    flashladder.register_with_diffusers.*?\n\n", text, re.M | re.S)[0])  # fmt: skip  # noqa: E501
    torch.manual_seed(0)
    model, inputs = flux()
    names = {"model": model.to(torch.bfloat16)}
    exec(lines, names)
    with torch.no_grad():
        assert model(**inputs, return_dict=False)[0].isfinite().all()
    assert model.transformer_blocks[0].attn.processor._attention_backend.value == "ladder"


def test_it_can_be_registered_again_and_left():
    member = theirs.AttentionBackendName("ladder")
    flashladder.register_with_diffusers()
    assert theirs.AttentionBackendName("ladder") is member is theirs.AttentionBackendName.LADDER
    assert (member.value, member == "ladder", member.name) == ("ladder", True, "LADDER")
    q = drawn(1, 16, 1, 64)
    with theirs.attention_backend("ladder"):
        given = theirs.dispatch_attention_fn(q, q, q)
    assert torch.equal(given, flashladder.attention(q, q, q))
    assert theirs._AttentionBackendRegistry.get_active_backend()[0].value == "native"


@pytest.mark.parametrize("shape", [(2, 23), (2, 1, 1, 23), (1, 23)], ids=str)
def test_keys_that_are_hidden_from_all(shape, device):
    q, k, v = drawn(2, 20, 2, 64, device=device), *drawn(2, 2, 23, 2, 64, device=device, seed=1)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    mask[0, ..., 15:] = mask[-1, ..., 3] = False
    given = attend(q, k, v, attn_mask=mask)
    exact = attend(*(x.double() for x in (q, k, v)), "native", attn_mask=mask)
    assert (given - exact).abs().max() <= 0.02


@pytest.mark.parametrize("shape", [(20, 23), (2, 1, 20, 23), (1, 2, 20, 23), (2, 2, 1, 23), (2, 1, 20, 1)], ids=str)
def test_masks_of_rows_and_keys(shape, device):
    """As of text and image in one row, without their padding: (batch, 1, rows, keys). Each row here sees a key."""
    q, k, v = drawn(2, 20, 2, 64, device=device), *drawn(2, 2, 23, 2, 64, device=device, seed=1)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device) < 0.7
    mask[..., 0] = True
    given = attend(q, k, v, attn_mask=mask)
    exact = attend(*(x.double() for x in (q, k, v)), "native", attn_mask=mask)
    assert (given - exact).abs().max() <= 0.02


def test_gradients_beside_a_mask_of_rows_and_keys(device):
    """Of a joint sequence: what is no padding sees what is none, as Chroma and HunyuanVideo have it."""
    real = torch.ones(2, 20, dtype=torch.bool, device=device)
    real[0, 15:] = real[1, 3:5] = False
    mask = real[:, None, None, :] & real[:, None, :, None]
    found = []
    for backend, dtype in (("ladder", torch.bfloat16), ("native", torch.float64)):
        q, k, v = (drawn(2, 20, 2, 64, device=device, seed=i).to(dtype).requires_grad_() for i in range(3))
        o = attend(q, k, v, backend, attn_mask=mask)
        found.append(torch.autograd.grad(o[real].square().sum(), (q, k, v)))
    for ours_, exact in zip(*found, strict=True):
        assert (ours_ - exact).abs().max() <= 0.02 * exact.abs().max()


def test_options(device):
    q, k = drawn(1, 20, 4, 64, device=device), drawn(1, 20, 2, 64, device=device, seed=1)
    given = attend(q, k, k, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(given, flashladder.attention(q, k, k, causal=True, softmax_scale=0.3))
    o, lse = attend(q, k, k, enable_gqa=True, attention_kwargs={"return_lse": True})
    assert all(map(torch.equal, (o, lse), flashladder.attention(q, k, k, return_lse=True)))
    torch.manual_seed(0)
    given = attend(q, k, k, enable_gqa=True, dropout_p=0.3)
    torch.manual_seed(0)
    assert torch.equal(given, flashladder.attention(q, k, k, dropout_p=0.3))
    with torch.autocast(device, dtype=torch.bfloat16):
        given = attend(q.float(), k.float(), k.float(), enable_gqa=True)
    assert torch.equal(given, flashladder.attention(q, k, k))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q: {"query": q.float(), "key": q.float(), "value": q.float()}, "q is torch.float32; kernels take"),
        (
            lambda q: dict.fromkeys(("query", "key", "value"), q.repeat(1, 1, 1, 9)),
            "kernels take head_dim up to 512, not 576",
        ),
        (lambda q: {"dropout_p": 1.0}, "dropout_p=1.0: must be at least 0 and less than 1"),
        (lambda q: {"key": q[:, :9], "value": q[:, :9], "is_causal": True}, "which is to the upper left there"),
        (lambda q: {"attn_mask": torch.zeros(1, 20, dtype=q.dtype)}, "a mask of torch.bfloat16: kernels take bool"),
    ],
)
def test_what_is_refused_runs_on_torch_and_is_said_once(change, reason):
    q = drawn(1, 20, 2, 64)
    given = {"query": q, "key": q, "value": q, **change(q)}
    for warns in (True, False):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", FallbackWarning)
            found = theirs.dispatch_attention_fn(**given, backend=theirs.AttentionBackendName("ladder"))
        words = [str(each.message) for each in said if each.category is FallbackWarning]
        assert len(words) == warns
        assert all(reason in word and 'diffusers\' "native" runs instead' in word for word in words)
        torch.manual_seed(0)
        assert torch.equal(found, theirs.dispatch_attention_fn(**given))


def test_what_torch_has_not_either_is_refused():
    q = drawn(1, 20, 2, 64)
    with pytest.raises(UnsupportedProblemError, match=r'dropout_p=1.0.*; with return_lse, which "native" has'):
        attend(q, q, q, dropout_p=1.0, attention_kwargs={"return_lse": True})


def test_compiled_in_one_piece(device):
    q = drawn(1, 20, 2, 64, device=device)
    compiled = torch.compile(lambda q: attend(q, q, q) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), attend(q, q, q) + 1)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool, device=device).tril()
    masked = torch.compile(lambda q: attend(q, q, q, attn_mask=mask) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(masked(q), attend(q, q, q, attn_mask=mask) + 1)
    with pytest.warns(FallbackWarning, match="kernels take head_dim up to 512, not 576"):
        assert compiled(q.repeat(1, 1, 1, 9)).isfinite().all()


def test_without_diffusers_or_with_another(monkeypatch):
    monkeypatch.delattr(theirs, "_AttentionBackendRegistry")
    with pytest.raises(ToolchainError, match="keeps backends in another way"):
        flashladder.register_with_diffusers()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ToolchainError, match=r"diffusers is missing or too old .*: pip install -U diffusers"):
        flashladder.register_with_diffusers()
