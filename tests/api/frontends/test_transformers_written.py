"""Models of transformers whose masks are expressions: images and prefixes seen both ways, chunks of packed rows."""

import copy
import itertools
import warnings

import pytest
import test_transformers
import torch
from test_transformers import IDS, PADDED, SIZES, logits, made, near
from test_transformers_training import require_near, trained_by

from flashladder import attention
from flashladder.common.api.frontends.fallback import FallbackWarning

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

from flashladder.common.api.frontends import transformers as ours  # noqa: E402

device, registered = test_transformers.device, test_transformers._registered  # fixtures

IMAGES = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]])
SUFFIX = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
EYE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16,
    "patch_size": 8, "projection_dim": 64, "vision_use_head": False,
}  # fmt: skip


def seeing(name, device="cpu", **sizes):
    """A random model of images and text; what is tested needs no image."""
    torch.manual_seed(0)
    text = {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 64, **sizes}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=EYE)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).to(device, torch.bfloat16).eval()


def gemma(device):
    """Of layers with a window, and without one."""
    return seeing("Gemma3", device, layer_types=["sliding_attention", "full_attention"])


@pytest.fixture
def asked(monkeypatch):
    """What `attention` is asked for."""
    calls = []

    def noted(*tensors, **options):
        calls.append(options)
        return attention(*tensors, **options)

    monkeypatch.setattr(ours, "attention", noted)
    return calls


@pytest.mark.parametrize("side", [None, *PADDED])
def test_images_see_both_ways(side, device, asked):
    """Gemma 3. A row of padding sees what it will: its logits are not compared."""
    model, ids = gemma(device), IDS.to(device)
    mask = None if side is None else PADDED[side].to(device)
    options = {"token_type_ids": IMAGES.to(device), "attention_mask": mask}
    real = slice(None) if mask is None else mask.bool()
    found = logits(model, "ladder", ids, **options)
    assert near(found, model, ids, real, **options)
    assert ["k<=q" in each["mask"] and "m0[b][q]==m0[b][k]" in each["mask"] for each in asked] == [True, True]
    of_text = logits(model, "ladder", ids, **options | {"token_type_ids": torch.zeros_like(ids)})
    assert not torch.equal(of_text[real], found[real])


def test_a_prefix_sees_both_ways(device, asked):
    """PaliGemma."""
    model, ids = seeing("PaliGemma", device, model_type="gemma2"), IDS.to(device)
    options = {"token_type_ids": SUFFIX.to(device)}
    assert near(logits(model, "ladder", ids, **options), model, ids, **options)
    assert len(asked) == 2
    assert all("mask" in each for each in asked)


def test_generation_behind_images(device):
    """A prompt with images is one call, and tokens behind it see all of it."""
    model, ids = gemma(device), IDS.to(device)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    sequences = []
    for implementation in ("eager", "ladder"):
        model.set_attn_implementation(implementation)
        found = model.generate(ids, token_type_ids=IMAGES.to(device), **options, return_dict_in_generate=True)
        sequences.append(found.sequences)
    assert torch.equal(*sequences)


def test_chunks_in_packed_sequences(device, asked):
    """Llama 4: chunks count from the start of each sequence, as if it were alone."""
    sizes = {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 64}
    kind = transformers.Llama4TextConfig
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(kind(**SIZES, **sizes)).to(device, torch.bfloat16).eval()
    ids = IDS.reshape(1, 24).to(device)
    positions = torch.cat((torch.arange(7), torch.arange(17)))[None].to(device)
    packed = logits(model, "ladder", ids, position_ids=positions, use_cache=False)
    assert [(each["causal"], "/4" in each["mask"]) for each in asked if "mask" in each] == [(True, True)] * 2
    for begin, end in itertools.pairwise((0, 7, 24)):
        assert near(packed[:, begin:end], model, ids[:, begin:end])


def test_a_window_with_padding_amid_a_sequence(device, asked):
    """Distances count what is padding too."""
    model, ids, mask = made("Mistral", device, sliding_window=5), IDS.to(device), PADDED["within"].to(device)
    given = logits(model, "ladder", ids, attention_mask=mask)
    assert near(given, model, ids, mask.bool(), attention_mask=mask)
    assert [each["causal"] for each in asked] == [True, True]


def test_gradients_of_images(device):
    """Of all parameters, beside those of eager attention."""
    options = {"labels": IDS.to(device), "token_type_ids": IMAGES.to(device)}
    theirs, found = (trained_by(gemma(device), name, IDS.to(device), **options) for name in ("eager", "ladder"))
    require_near(found, theirs)


def test_what_attention_refuses_is_drawn_for_sdpa():
    """By a call that knows nothing of the function any more."""
    model = gemma("cpu").float()
    options = {"token_type_ids": IMAGES}
    expected = logits(copy.deepcopy(model), "sdpa", IDS, **options)
    with pytest.warns(FallbackWarning, match=r"q is torch.float32"):
        assert torch.equal(logits(model, "ladder", IDS, **options), expected)


def test_a_mask_that_no_expression_says_is_said_by_its_operation(monkeypatch):
    from transformers import masking_utils

    model = made("Llama", num_hidden_layers=1)
    coprime = lambda batch, head, q, k: (torch.gcd(q, k) == 1) | (q == k)  # noqa: E731
    usual = masking_utils.create_causal_mask
    module = transformers.models.llama.modeling_llama
    monkeypatch.setattr(module, "create_causal_mask", lambda **of: usual(**of, and_mask_function=coprime))
    expected = logits(model, "sdpa", IDS)
    with pytest.warns(FallbackWarning, match="the mask's function uses gcd of torch: no expression has it"):
        assert torch.equal(logits(model, "ladder", IDS), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(model, "ladder", IDS)
