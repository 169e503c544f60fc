"""transformers' DeepSeek models with their projections absorbed: small and random, on the emulator or a GPU."""

import copy
import re
import textwrap
import warnings

import pytest
import torch

from flashladder.common.api import operator
from flashladder.common.api.frontends import fallback
from flashladder.common.api.frontends.fallback import FallbackWarning
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.paths import ROOT
from flashladder.tests.support import triton_process

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

from flashladder.common.api.frontends import mla_layer  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {  # DeepSeek's heads, few of them; all layers are dense
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # scores are far apart, and what attention adds is large
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "V3": ("DeepseekV3", {"num_hidden_layers": 2}),
    "V3, yarn, halves turn together": ("DeepseekV3", {"rope_interleave": False, "rope_parameters": YARN}),
    "V2, q not compressed": ("DeepseekV2", {"q_lora_rank": None}),
}
IDS = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
TOKENS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "eos_token_id": None}
TOLD = {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch):
    """What falls back unasked fails the test."""
    monkeypatch.setattr(fallback, "_said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


@pytest.fixture
def steps(monkeypatch):
    """Of how many keys, at most, sequences were that kernels attended to in latents."""
    seen, usual = [], mla_layer.mla.compute
    monkeypatch.setattr(
        mla_layer.mla, "compute", lambda *given, **more: seen.append(int(given[3].max())) or usual(*given, **more)
    )
    return seen


def made(name="V3", device="cpu", dtype=torch.bfloat16, **sizes):
    """A random model that runs on transformers' own eager attention."""
    torch.manual_seed(0)
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more, **sizes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device, dtype).eval()
    model.set_attn_implementation("eager")
    return model


def cache_of(kind, model, room):
    return mla_layer.LatentCache(model.config, room) if kind == "latents" else transformers.DynamicCache()


@torch.no_grad()
def check_generation(model, cache, ids, mask, absorbed):
    """Logits at most twice as far from fp32 as eager attention's in 16 bits, of the same tokens; then the next tokens
    are those of fp32, wherever two are not as near to each other as that.

    Absorbed, a layer rounds q W^UK and P C where it rounds W^UK c and W^UV c else: as often, and numbers as large.
    """
    ids, mask = ids.to(model.device), mask.to(model.device)
    given = absorbed.generate(ids, **TOKENS, **TOLD, attention_mask=mask, past_key_values=cache)
    seen = torch.nn.functional.pad(mask, (0, 2), value=1)
    options = {"attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp(min=0), "logits_to_keep": 3}
    eager, exact = (
        each(given.sequences[:, :-1], **options).logits.double() for each in (model, copy.deepcopy(model).float())
    )
    allowed = 2 * (eager - exact).abs().max()
    assert (torch.stack(given.logits, 1).double() - exact).abs().max() <= allowed
    best, second = exact.topk(2).values.unbind(-1)
    is_sure = best - second > 2 * allowed
    assert is_sure.any()
    assert torch.equal(given.sequences[:, -3:][is_sure], exact.argmax(-1)[is_sure])
    return given.sequences


@pytest.mark.parametrize(
    ("name", "cache"),
    [("V3", "latents"), ("V3, yarn, halves turn together", "growing"), ("V2, q not compressed", "latents")],
)
def test_a_padded_batch_generates(name, cache, device, steps):
    model = made(name, device)
    absorbed = mla_layer.absorb(copy.deepcopy(model))
    found = check_generation(model, cache_of(cache, model, 20), IDS, LEFT, absorbed)
    if device == "cpu":  # elsewhere other roundings may make another choice of two tokens that are as good
        assert torch.equal(found, model.generate(IDS, attention_mask=LEFT, **TOKENS))
    assert steps == sorted([13, 14] * model.config.num_hidden_layers)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cache", ["latents", "growing"])
def test_real_heads_on_a_gpu(heads, cache, steps):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 512, "q_lora_rank": 256}
    model = made("V3", "cuda", **sizes, initializer_range=0.08)
    ids = torch.randint(2, 64, (3, 900), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :333] = 0
    check_generation(model, cache_of(cache, model, 1000), ids, mask, mla_layer.absorb(copy.deepcopy(model)))
    assert len(steps) == 4


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_makes_steps():
    """The same graph, replayed, makes one token after the other."""
    model = mla_layer.absorb(made("V3", "cuda"))
    ids, caches = IDS.cuda(), [mla_layer.LatentCache(model.config, 40) for _ in range(2)]
    mask = torch.nn.functional.pad(LEFT, (0, 28), value=1).cuda()
    token, position = ids[:, :1].clone(), LEFT.sum(1, keepdim=True).cuda()

    def step(cache):
        return model(token, attention_mask=mask, position_ids=position, past_key_values=cache).logits

    for cache in caches:
        model(ids, attention_mask=LEFT.cuda(), past_key_values=cache)
        step(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(caches[1])  # which does nothing yet
    for place in range(1, 4):
        token.copy_(ids[:, place : place + 1])
        position += 1
        expected = step(caches[0])
        graph.replay()
        torch.testing.assert_close(logits, expected, rtol=0, atol=0.05)


@pytest.mark.gpu
def test_generate_compiles_its_steps():
    """As transformers does with a static cache on a GPU: in a process in which Triton compiles."""
    triton_process.run(__file__, check=True)


def require_compiled_steps_as_others():
    """Up to the first token that differs: compiled, all else of the model is rounded elsewhere."""
    model = mla_layer.absorb(made("V3", "cuda"))
    eager, compiled = (
        model.generate(
            IDS.cuda(),
            attention_mask=LEFT.cuda(),
            **TOKENS | TOLD | {"disable_compile": flag},
            past_key_values=mla_layer.LatentCache(model.config, 40),
        ).logits
        for flag in (True, False)
    )
    for wanted, given in zip(eager, compiled, strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=0.02 * wanted.abs().max().item())
        if not torch.equal(given.argmax(-1), wanted.argmax(-1)):
            return


@torch.no_grad()
def test_a_step_compiles_in_one_graph():
    model = mla_layer.absorb(made(num_hidden_layers=1))
    caches = [mla_layer.LatentCache(model.config, 20) for _ in range(2)]
    logits = []
    for cache, compiled in zip(caches, (model, torch.compile(model, backend="aot_eager", fullgraph=True)), strict=True):
        model(IDS[:, :-1], past_key_values=cache)
        logits.append(compiled(IDS[:, -1:], past_key_values=cache).logits)
    assert torch.equal(*logits)
    assert torch.equal(*(cache.layers[0].keys for cache in caches))


@torch.no_grad()
@pytest.mark.parametrize("cache", ["latents", "growing"])
def test_a_step_waits_for_nothing(cache, monkeypatch):
    asked = []
    model = mla_layer.absorb(made())
    cache = cache_of(cache, model, 20)
    model(IDS, attention_mask=LEFT, past_key_values=cache)
    monkeypatch.setattr(mla_layer, "can_look_at", lambda tensor: False)
    monkeypatch.setattr(operator, "launch", lambda *given: None)
    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero"):
        usual = getattr(torch.Tensor, name)
        answer = lambda *given, name=name, usual=usual: asked.append(name) or usual(*given)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, answer)
    mask = torch.nn.functional.pad(LEFT, (0, 1), value=1)
    model(IDS[:, :1], attention_mask=mask, past_key_values=cache, position_ids=LEFT.sum(1, keepdim=True))
    assert not asked


@torch.no_grad()
def test_a_prompt_in_parts_and_beams(steps):
    """A part of several tokens runs on `attention`; a sequence of a cache may move."""
    model = made(num_hidden_layers=1)
    whole = model(IDS).logits.double()
    exact = copy.deepcopy(model).float()(IDS).logits.double()
    absorbed, cache = mla_layer.absorb(copy.deepcopy(model)), mla_layer.LatentCache(model.config, 12)
    parts = [absorbed(IDS[:, begin:end], past_key_values=cache).logits for begin, end in ((0, 1), (1, 5), (5, 11))]
    assert steps == [1]
    cache.reorder_cache(torch.tensor([1, 0]))
    parts.append(absorbed(IDS.flip(0)[:, 11:], past_key_values=cache).logits.flip(0))
    assert steps == [1, 12]
    assert (torch.cat(parts, 1).double() - exact).abs().max() <= 2 * (whole - exact).abs().max()
    for more, message in (
        (IDS[:, :1], "13 keys: the LatentCache has room for max_cache_len=12"),
        (IDS[:1, :1], "of 2 seq"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            absorbed(more, past_key_values=cache)
    assert int(cache.get_seq_length()) == 12


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_implementation_can_be_set_back(implementation, steps):
    """And then runs on the same cache."""
    model = made()
    absorbed, cache = mla_layer.absorb(copy.deepcopy(model)), mla_layer.LatentCache(model.config, 20)
    for each in (model, absorbed):
        each.set_attn_implementation(implementation)
    given = [absorbed(part, past_key_values=cache).logits for part in IDS.split((5, 6, 1), 1)]
    torch.testing.assert_close(torch.cat(given, 1), model(IDS).logits, rtol=0, atol=0.05)
    assert not steps


def test_what_is_not_absorbed(steps):
    """A wanted gradient: heads are padded and `attention` runs. A model of 32 bits: transformers' "sdpa" does."""
    model = made()
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    absorbed = mla_layer.absorb(copy.deepcopy(model))
    (expected,) = torch.autograd.grad(model(IDS[:, :1]).logits.sum(), weight)
    with warnings.catch_warnings(action="error", category=FallbackWarning):
        logits = absorbed(IDS[:, :1]).logits
    (found,) = torch.autograd.grad(logits.sum(), absorbed.model.layers[0].self_attn.kv_b_proj.weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    model = made(dtype=torch.float32)
    with torch.no_grad(), pytest.warns(FallbackWarning, match="q is torch.float32"):
        torch.testing.assert_close(mla_layer.absorb(copy.deepcopy(model))(IDS[:, :1]).logits, model(IDS[:, :1]).logits)
    assert not steps


def test_padding_amid_a_sequence_is_refused(monkeypatch):
    """By name; or, where that would wait for a GPU, by NaN in its row."""
    model = mla_layer.absorb(made(num_hidden_layers=1)).requires_grad_(False)
    mask = torch.nn.functional.pad(LEFT.flip(1), (0, 1), value=1)
    for is_seen in (True, False):
        cache = transformers.DynamicCache()
        model(IDS, attention_mask=mask[:, :-1], past_key_values=cache)
        if is_seen:
            with pytest.raises(UnsupportedProblemError, match="padding amid a sequence"):
                model(IDS[:, :1], attention_mask=mask, past_key_values=cache)
            monkeypatch.setattr(mla_layer, "can_look_at", lambda tensor: False)
    logits = model(IDS[:, :1], attention_mask=mask, past_key_values=cache).logits
    assert logits.isnan().flatten(1).all(1).tolist() == [True, False]


def test_what_cannot_be_absorbed_is_refused():
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(UnsupportedProblemError, match="LlamaModel has no layer whose latents kernels take: Deep"):
        mla_layer.absorb(transformers.LlamaModel(config))
    with pytest.raises(
        UnsupportedProblemError, match="kv_lora_rank=256 and qk_rope_head_dim=64; kernels take 512 and 64"
    ):
        mla_layer.absorb(made(kv_lora_rank=256))
    with pytest.raises(UnsupportedProblemError, match="kv_lora_rank=None and qk_rope_head_dim=None"):
        mla_layer.LatentCache(config, 12)
    model = made()
    with pytest.raises(UnsupportedProblemError, match="max_cache_len=0: must be at least 1"):
        mla_layer.LatentCache(model.config, 0)
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises(UnsupportedProblemError, match=r"kv_b_proj is of type Sequential.*plain Linear"):
        mla_layer.absorb(model)
    assert model.config._attn_implementation == "eager"


def test_the_lines_of_the_docs_generate(tmp_path):
    made().save_pretrained(tmp_path)
    text = (ROOT / "docs" / "models.md").read_text()
    lines = re.search(
        r"^    import flashladder\n    from transformers[^`]*?absorb.*?\n\n(?=\S)", text, re.MULTILINE | re.DOTALL
    )
    exec(textwrap.dedent(lines[0]), names := {"NAME": tmp_path, "tokens": {"input_ids": IDS, "max_new_tokens": 1}})
    assert names["model"].config._attn_implementation == mla_layer.NAME
    assert names["cache"].get_seq_length() == 12


if __name__ == "__main__":
    require_compiled_steps_as_others()
