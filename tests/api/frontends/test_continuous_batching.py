"""transformers' continuous batching by our functions, under flash-attn's names for their arguments."""

from types import SimpleNamespace

import pytest
import torch

import flashladder

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

from transformers import AttentionInterface, modeling_flash_attention_utils  # noqa: E402

from flashladder.common.api.frontends.transformers import FLASH  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(getattr(transformers, "ContinuousBatchingConfig", None), "auto_switch_to_flash"),
        reason=f"transformers {transformers.__version__} batches continuously without block tables; 5.24 has them",
    ),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "GptOss": {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}
PROMPTS = (19, 5, 12)
NEW = 4


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _registered():
    for _ in range(2):
        flashladder.register_with_transformers()


def model_of(name, device):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model({"GptOss": "gpt_oss"}.get(name, name.lower()), **SIZES, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # so that tokens differ, and attention counts
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def answers(model, implementation):
    """The tokens that continuous batching generates for each prompt."""
    model.set_attn_implementation(implementation)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 64, (length,), generator=generator).tolist() for length in PROMPTS]
    greedy = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16, auto_switch_to_flash=False)
    found = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=batching)
    return [found[request].generated_tokens for request in sorted(found)]


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_continuous_batching(name, device):
    model = model_of(name, device)
    found = answers(model, FLASH)
    assert [len(tokens) for tokens in found] == [NEW] * len(PROMPTS)
    assert found == answers(model, "sdpa")


def test_sinks_go_by_name(device, monkeypatch):
    """gpt-oss's, which "sdpa" has not: tokens are those of "eager". Its class lists the names that it takes."""
    model = model_of("GptOss", device)
    for module in (model, model.model):
        monkeypatch.setattr(type(module), "_compatible_flash_implementations", [FLASH])
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, 3.0)
    assert answers(model, FLASH) == answers(model, "eager")


def test_sinks_of_a_batch_without_padding(device):
    q, k, v = torch.randn(3, 2, 12, 2, 64, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    module, sinks = SimpleNamespace(config=SimpleNamespace(_attn_implementation=FLASH), is_causal=True), q[0, 0, :, 0]
    o, _ = AttentionInterface()[FLASH](module, *(x.transpose(1, 2) for x in (q, k, v)), None, scaling=0.3, s_aux=sinks)
    expected = flashladder.attention(q, k, v, causal=True, softmax_scale=0.3, sinks=sinks)
    assert torch.equal(o, expected)
    assert not torch.equal(o, flashladder.attention(q, k, v, causal=True, softmax_scale=0.3))


def test_a_batch_is_padded_as_flash_attn_has_it(device):
    model = model_of("Llama", device)
    tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    logits = []
    for implementation in (FLASH, "sdpa"):
        model.set_attn_implementation(implementation)
        logits.append(model(tokens, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*logits, rtol=0, atol=0.3)


def test_steps_write_pages_and_read_them(device):
    """What transformers calls on a GPU where all requests have one new token."""
    heads, page, lengths = (2, 64), 16, torch.tensor([20, 3])
    pages = torch.randn(2, 5, page, *heads, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    q, k, v = torch.randn(3, 1, 2, *heads, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    table = torch.tensor([[4, 1], [2, -1]], dtype=torch.int32, device=device)
    keys, values = ([pages[i][table[b].clamp(min=0)].flatten(0, 1)[: lengths[b]] for b in range(2)] for i in range(2))
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=FLASH), is_causal=True)
    starts = torch.tensor([0, 21, 25], dtype=torch.int32, device=device)
    o, _ = AttentionInterface()[FLASH](
        module,
        *(x.transpose(1, 2) for x in (q, k, v)),
        None,
        scaling=0.3,
        cu_seq_lens_q=torch.arange(3, dtype=torch.int32, device=device),
        cu_seq_lens_k=starts,
        max_length_q=1,
        max_length_k=21,
        block_table=table,
        k_cache=pages[0],
        v_cache=pages[1],
    )
    for b in range(2):
        both = (torch.cat((cached[b], new[0, b][None])) for cached, new in ((keys, k), (values, v)))
        one, two = (x.float().transpose(0, 1)[None] for x in both)
        expected = torch.nn.functional.scaled_dot_product_attention(q[0, b].float()[None, :, None], one, two, scale=0.3)
        torch.testing.assert_close(o[0, b].float(), expected[0, :, 0], rtol=0, atol=0.03)
        assert torch.equal(pages[0][table[b, lengths[b] // page], lengths[b] % page], k[0, b])


def test_other_implementations_are_asked_as_before():
    with pytest.raises(Exception, match=r"flash_attn|kernels"):
        modeling_flash_attention_utils._lazy_imports("flash_attention_2")
