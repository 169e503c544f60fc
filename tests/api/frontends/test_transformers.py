"""transformers' real models under attn_implementation="ladder": small and random, on the emulator or a GPU."""

import copy
import inspect
import itertools
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
from flashladder.common.packages import OLDEST
from flashladder.common.paths import ROOT
from flashladder.common.studies.models import model_trial

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

from flashladder.common.api.frontends import transformers as ours  # noqa: E402

pytestmark = pytest.mark.slow

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
PADDED = {
    "left": torch.tensor([[0] * 5 + [1] * 7, [1] * 12]),
    "right": torch.tensor([[1] * 7 + [0] * 5, [1] * 12]),
    "within": torch.tensor([[1] * 4 + [0] * 3 + [1] * 5, [0] * 2 + [1] * 10]),
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Nothing was said before; what falls back unasked fails the test."""
    monkeypatch.setattr(fallback, "_said", set())
    flashladder.register_with_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def made(name, device="cpu", dtype=torch.bfloat16, **sizes):
    """A random model of an architecture."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    kind = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}Model")
    return kind(config).to(device, dtype).eval()


@torch.no_grad()
def logits(model, implementation, *arguments, **options):
    model.set_attn_implementation(implementation)
    outputs = model(*arguments, **options)
    return outputs[0].double()


def near(given, model, ids, real=slice(None), **options):
    """The error rule: at most twice as far from the exact answer as eager attention in 16 bits is."""
    exact = logits(copy.deepcopy(model).float(), "eager", ids, **options)
    eager = logits(model, "eager", ids, **options)
    allowed = 2 * (eager - exact)[real].abs().max() + 1e-5
    return (given - exact)[real].abs().max() <= allowed


def test_logits(device, monkeypatch):
    calls = []

    def noted(q, *arguments, **options):
        calls.append((tuple(q.shape), options["causal"]))
        return flashladder.attention(q, *arguments, **options)

    monkeypatch.setattr(ours, "attention", noted)
    model, ids = made("Llama", device), IDS.to(device)
    assert near(logits(model, "ladder", ids), model, ids)
    assert calls == [((2, 12, 4, 64), True)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_real_sizes_on_a_gpu(dtype):
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2048}
    model = made("Llama", "cuda", dtype, **sizes, hidden_size=2048)
    ids = torch.randint(0, 64, (2, 1500), generator=torch.Generator().manual_seed(0)).cuda()
    assert near(logits(model, "ladder", ids), model, ids)
    mask = torch.ones_like(ids)
    mask[0, :700] = 0
    assert near(logits(model, "ladder", ids, attention_mask=mask), model, ids, mask.bool(), attention_mask=mask)


@pytest.mark.parametrize("side", PADDED)
def test_padding_changes_nothing(side, device):
    model, ids, mask = made("Llama", device), IDS.to(device), PADDED[side].to(device)
    padded = logits(model, "ladder", ids, attention_mask=mask)
    assert near(padded, model, ids, mask.bool(), attention_mask=mask)
    assert padded.isfinite().all()


def test_generation_with_a_cache(device):
    """Each step's logits, of a batch padded to the left, are near those of the whole sequence at once."""
    model, ids, mask = made("Llama", device), IDS.to(device), PADDED["left"].to(device)
    model.set_attn_implementation("ladder")
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    steps = torch.stack(generated.logits, 1).double()
    whole, seen = generated.sequences[:, :-1], torch.nn.functional.pad(mask, (0, 2), value=1)
    placed = torch.zeros(2, 14, 64, dtype=torch.float64, device=device)
    placed[:, 11:] = steps
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    last = (slice(None), slice(11, None))
    assert near(placed, model, whole, last, attention_mask=seen, position_ids=positions)


def test_beam_search():
    model, sequences = made("Llama", num_hidden_layers=1), []
    for implementation in ("eager", "ladder"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 3, "num_beams": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        sequences.append(model.generate(IDS, attention_mask=PADDED["left"], **options))
    assert torch.equal(*sequences)


def test_a_prompt_in_parts_and_a_cache_with_room(device):
    model, ids = made("Llama", device), IDS.to(device)
    parts = ids.split((5, 6, 1), 1)
    caches = (transformers.DynamicCache(), transformers.StaticCache(model.config, max_cache_len=20))
    for cache in caches:
        given = [logits(model, "ladder", part, past_key_values=cache) for part in parts]
        assert near(torch.cat(given, 1), model, ids)


def test_all_see_all_in_an_encoder(device):
    model, ids = made("Bert", device, num_attention_heads=1), IDS.to(device)
    assert near(logits(model, "ladder", ids), model, ids)
    mask = PADDED["right"].to(device)
    assert near(logits(model, "ladder", ids, attention_mask=mask), model, ids, attention_mask=mask)
    shared = mask[:1, None, None].bool()  # of all rows
    expected = logits(model, "ladder", ids, attention_mask=mask[:1].expand(2, -1))
    assert torch.equal(logits(model, "ladder", ids, attention_mask=shared), expected)


def test_packed_sequences_in_one_row(device):
    model = made("Llama", device)
    ids = IDS.reshape(1, 24).to(device)
    positions = torch.cat((torch.arange(7), torch.arange(17)))[None].to(device)
    cu_seqlens = torch.tensor([0, 7, 24], dtype=torch.int32, device=device)
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 17, "max_length_k": 17}
    for options in (lengths, {"use_cache": False}, lengths | {"use_cache": False}):
        packed = logits(model, "ladder", ids, position_ids=positions, **options)
        for begin, end in itertools.pairwise((0, 7, 24)):
            assert near(packed[:, begin:end], model, ids[:, begin:end])


def test_torch_sees_through_it(device):
    """A prompt, a token after it and a part of three, each in one graph; under autocast a model of fp32."""
    model, ids = made("Llama", device, num_hidden_layers=1), IDS[:1].to(device)
    model.set_attn_implementation("ladder")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        whole, parts = model(ids).logits, []
        cache = transformers.DynamicCache()
        for part in ids.split((8, 1, 3), 1):
            parts.append(compiled(part, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=0.01)
        with torch.autocast(device, torch.bfloat16):
            torch.testing.assert_close(model.float()(ids).logits.float(), whole.float(), rtol=0, atol=0.01)


def test_what_it_refuses_runs_on_sdpa_and_is_said_once():
    def same(model, words, ids=IDS, **options):
        expected = logits(model, "sdpa", ids, **options)
        with pytest.warns(FallbackWarning, match=rf'transformers\' "sdpa" runs instead of FlashLadder: .*{words}'):
            given = logits(model, "ladder", ids, **options)
        assert torch.equal(given, expected)
        assert torch.equal(logits(model, "ladder", ids, **options), expected), "a second warning is an error"

    llama = made("Llama")
    masked = torch.ones(2, 1, 12, 12).tril().bool().roll(1, -1)
    same(llama, "a mask that is more than causal, padding and a window", attention_mask=masked)
    same(made("Llama", head_dim=520), "kernels take head_dim up to 512, not 520")
    same(made("Llama", dtype=torch.float32), "q is torch.float32")
    with pytest.warns(FallbackWarning, match=r"dropout_p=1.0: must be at least 0 and less than 1"), torch.no_grad():
        made("Llama", attention_dropout=1.0, attn_implementation="ladder").train()(IDS)


@pytest.mark.parametrize("padded", [False, True])
def test_a_sliding_window(padded, device):
    """Of a prompt, and of tokens after it, whose cache holds no more than the window."""
    model, ids = made("Mistral", device, sliding_window=5), IDS.to(device)
    mask = PADDED["left"].to(device) if padded else None
    real = slice(None) if mask is None else mask.bool()
    assert near(logits(model, "ladder", ids, attention_mask=mask), model, ids, real, attention_mask=mask)
    cache, given = transformers.DynamicCache(config=model.config), []
    for begin, end in ((0, 8), (8, 9), (9, 12)):
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        given.append(logits(model, "ladder", ids[:, begin:end], past_key_values=cache, **seen))
    assert near(torch.cat(given, 1), model, ids, real, attention_mask=mask, position_ids=None)


def test_a_sliding_window_in_a_static_cache(device):
    """Which keeps as many keys as a window has, and drops the oldest. A prompt that is shorter runs on SDPA."""
    model, ids = made("Mistral", device, sliding_window=5), IDS.to(device)
    cache, given = transformers.StaticCache(model.config, max_cache_len=20), []
    for part in ids.split((8, 1, 3), 1):
        given.append(logits(model, "ladder", part, past_key_values=cache))
    assert near(torch.cat(given, 1), model, ids)


def test_a_softcap(device):
    sizes = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64, "sliding_window": 5}
    model, ids = made("Gemma2", device, **sizes), IDS.to(device)
    assert near(logits(model, "ladder", ids), model, ids)


def test_what_nobody_but_eager_has_is_refused():
    capped = made("Gemma2", attn_logit_softcapping=30.0, head_dim=520)
    words = r'not 520; with a softcap, which "sdpa" has not, attn_implementation="eager" works'
    with pytest.raises(UnsupportedProblemError, match=words):
        logits(capped, "ladder", IDS)
    tensor = torch.zeros(1, 1, 4, 64)
    with pytest.raises(
        UnsupportedProblemError, match=r'q is torch.float32.*; with attention sinks, which "sdpa" has not'
    ):
        ours._attend(torch.nn.Module(), tensor, tensor, tensor, None, s_aux=torch.zeros(1))


@pytest.mark.parametrize("padded", [False, True])
def test_attention_sinks(padded, device):
    """gpt-oss: layers with a window and without one, and a sink of each head."""
    model = made("GptOss", device, num_local_experts=2, num_experts_per_tok=1, sliding_window=5, pad_token_id=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, -1.0, 0.0, 3.0]))
    ids, mask = IDS.to(device), PADDED["left"].to(device) if padded else None
    real = slice(None) if mask is None else mask.bool()
    given = logits(model, "ladder", ids, attention_mask=mask)
    expected = logits(model, "eager", ids, attention_mask=mask)
    torch.testing.assert_close(given[real].double(), expected[real].double(), rtol=0, atol=0.01)


def test_the_lines_of_the_docs_give_a_model(tmp_path):
    made("Llama", num_hidden_layers=1).save_pretrained(tmp_path)
    text = (ROOT / "docs" / "models.md").read_text()
    lines = re.search(r"^    import flashladder\n    from transformers.*?\n\n(?=\S)", text, re.MULTILINE | re.DOTALL)
    exec(textwrap.dedent(lines[0]), names := {"NAME": tmp_path})
    assert names["model"].config._attn_implementation == "ladder"


def test_the_command_takes_no_token_for_padding(monkeypatch):
    """Where generate() is given no mask, an id that is pad_token_id is one."""
    model, masks = made("Llama", attn_implementation="ladder"), []
    usual = ours._attend
    monkeypatch.setattr(ours, "attention", lambda q, *_, **__: torch.zeros_like(q))
    noted = lambda *given, **options: masks.append(given[4]) or usual(*given, **options)  # noqa: E731
    transformers.AttentionInterface.register("ladder", noted)
    assert (IDS == 0).any()
    model_trial._generate(model, IDS, torch.ones_like(IDS), 2)
    assert masks == [None] * 4


def test_another_transformers_is_refused(monkeypatch):
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    said = rf"transformers \S+ makes masks or calls flash-attn in another way; {OLDEST['transformers']} or later works"
    with pytest.raises(ToolchainError, match=said):
        flashladder.register_with_transformers()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ToolchainError, match="transformers is missing or too old: pip install -U transformers"):
        flashladder.register_with_transformers()


def test_it_takes_what_attention_modules_are_called_with():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    theirs = [name for name in inspect.signature(sdpa_attention_forward).parameters if name != "kwargs"]
    mine = inspect.signature(ours._attend).parameters
    assert list(mine)[:8] == theirs[:8]
