"""Generation under attn_implementation="ladder": what is done once a token, not in each layer, and what is compiled."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from test_transformers import IDS, PADDED, made, near

import flashladder
from flashladder.common import catalog
from flashladder.common.api import caches, packed
from flashladder.common.api.frontends import fallback
from flashladder.common.api.frontends.fallback import FallbackWarning
from flashladder.common.errors import ToolchainError
from flashladder.common.runtime import ready
from flashladder.tests.support import triton_process

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

from flashladder.common.api.frontends import transformers as ours  # noqa: E402

TOKENS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
REAL = torch.ones_like(IDS)
STATIC = {"cache_implementation": "static", "disable_compile": True}
AFTER = (  # an unpadded call: generation in all its ways
    {"attention_mask": PADDED["left"]},
    {"attention_mask": REAL, **STATIC},
    {"attention_mask": PADDED["left"], **STATIC},
    {"attention_mask": PADDED["left"], "num_beams": 2},
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Nothing was called before; what falls back unasked fails the test."""
    monkeypatch.setattr(fallback, "_said", set())
    monkeypatch.setattr(ours, "_foreseen", set())
    flashladder.register_with_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


@pytest.fixture
def stock(monkeypatch):
    """Kernels that compute nothing: which problems one was made ready for. CPU tensors are taken for ones on a GPU."""
    problems = []

    def prepare(kind, problem):
        problems.append(problem)
        ready.by_kind[kind] = SimpleNamespace(
            rung=catalog.find("woven_general"),
            launch=lambda *_, **__: None,
            call=SimpleNamespace(plan=None, planned=lambda *_, **__: None),
        )
        return ready.by_kind[kind]

    for name, value in {
        "by_kind": {},
        "_prepare": prepare,
        "is_gpu": lambda tensor: True,
    }.items():
        monkeypatch.setattr(ready, name, value)
    monkeypatch.setattr(caches, "can_look_at", lambda tensor: False)
    return problems


@pytest.fixture
def waits(monkeypatch):
    """What the host asked tensors for, which would wait for a GPU."""
    asked = []
    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero"):
        usual = getattr(torch.Tensor, name)
        answer = lambda *given, name=name, usual=usual: asked.append(name) or usual(*given)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, answer)
    return asked


def noted(monkeypatch, holder, name):
    """What a function returned, from now on."""
    usual, answers = getattr(holder, name), []
    monkeypatch.setattr(holder, name, lambda *given, **options: answers.append(usual(*given, **options)) or answers[-1])
    return answers


def random_model(name, **sizes):
    return made(name, **(sizes | ({"sliding_window": 5} if name == "Mistral" else {})), attn_implementation="ladder")


def steps(model, mask=None, cache=None):
    """A prompt of 10 tokens and two more, one by one; a forward pass at each step."""
    cache = cache or transformers.DynamicCache(config=model.config)
    for begin, end in ((0, 10), (10, 11), (11, 12)):
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        yield lambda begin=begin, end=end, seen=seen: model(IDS[:, begin:end], past_key_values=cache, **seen)


@pytest.mark.parametrize("inference", [True, False], ids=["inference_mode", "no_grad"])
@pytest.mark.parametrize(
    ("name", "mask", "room", "times"),
    [
        ("Llama", None, False, (0, 0, 0)),
        ("Llama", REAL, False, (1, 1, 1)),  # whether nothing is padding
        ("Llama", PADDED["left"], False, (2, 2, 2)),  # that, and how long sequences are
        ("Llama", None, True, (0, 0, 0)),  # only the GPU reads how much of the cache is taken
        ("Llama", PADDED["left"], True, (2, 2, 2)),
        ("Mistral", None, False, (0, 0, 0)),
        ("Mistral", PADDED["left"], False, (3, 1, 1)),  # also whether padding is within; then it is out of the window
    ],
)
def test_what_waits_does_so_once_for_all_layers(name, mask, room, times, inference, stock, waits):
    counts = []
    for layers in (1, 3):
        model = random_model(name, num_hidden_layers=layers)
        cache = transformers.StaticCache(model.config, max_cache_len=20) if room else None
        for step in steps(model, mask, cache):
            waits.clear()
            with torch.inference_mode() if inference else torch.no_grad():
                step()
            counts.append(len(waits))
    assert counts == [*times] * 2


@pytest.mark.parametrize("options", [{}, STATIC], ids=["growing", "static"])
def test_without_padding_nothing_is_packed(options, stock, monkeypatch):
    packings = noted(monkeypatch, packed, "packed_attention")
    model = random_model("Llama")
    model.generate(IDS, attention_mask=REAL, **options, **TOKENS)
    assert not packings


@pytest.mark.parametrize("options", [{}, STATIC], ids=["growing", "static"])
def test_padding_is_found_once_a_forward_pass(options, stock, monkeypatch):
    found, packings = noted(monkeypatch, ours, "padding_of"), noted(monkeypatch, packed, "packed_attention")
    model = random_model("Llama", num_hidden_layers=4)
    model.generate(IDS, attention_mask=PADDED["left"], **options, **TOKENS)
    assert (len(found), len(packings)) == (3, 12)


def test_a_mask_of_somebody_elses_is_read_each_time(stock, monkeypatch):
    """Who knows who writes to it."""
    found = noted(monkeypatch, ours, "padding_of")
    model = random_model("Llama")
    with torch.inference_mode():
        model(IDS[:, :1], attention_mask=torch.ones(2, 1, 1, 1, dtype=torch.bool))
    assert len(found) == 2


@pytest.mark.parametrize(("name", "kernels"), [("Llama", 3), ("Mistral", 5)])
def test_nothing_is_compiled_after_an_unpadded_call(name, kernels, stock):
    model = random_model(name)
    model.generate(IDS, attention_mask=REAL, **TOKENS)
    kinds = {(problem.operation, problem.window) for problem in stock}
    assert len(stock) == len(kinds) == kernels
    for options in AFTER:
        model.generate(IDS, **options, **TOKENS)
    assert len(stock) == kernels


def test_what_cannot_be_made_ready_is_told_when_it_is_needed(stock, monkeypatch):
    prepare = ready._prepare

    def unable(kind, problem, *others):
        if problem.packed:
            raise ToolchainError("no nvcc")
        return prepare(kind, problem, *others)

    monkeypatch.setattr(ready, "_prepare", unable)
    model = random_model("Llama")
    model.generate(IDS, attention_mask=REAL, **TOKENS)
    with pytest.raises(ToolchainError, match="no nvcc"):
        model.generate(IDS, attention_mask=PADDED["left"], **TOKENS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_left_padding_with_a_static_cache(device):
    model, ids, mask = made("Llama", device), IDS.to(device), PADDED["left"].to(device)
    model.set_attn_implementation("ladder")
    cache, given = transformers.StaticCache(model.config, max_cache_len=20), []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for begin, end in ((0, 10), (10, 11), (11, 12)):
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        with torch.no_grad():
            given.append(model(ids[:, begin:end], past_key_values=cache, **options).logits.double())
    exact = {"attention_mask": mask, "position_ids": positions}
    assert near(torch.cat(given, 1), model, ids, mask.bool(), **exact)


@pytest.mark.gpu
def test_generate_compiles_its_steps():
    """As transformers does with a static cache on a GPU: into CUDA graphs."""
    triton_process.run(__file__, check=True)


def require_compiled_steps_as_others():
    """Up to the first token that differs: compiled, all else of the model is rounded elsewhere."""
    flashladder.register_with_transformers()
    model = made("Llama", "cuda", attn_implementation="ladder")
    options = {"cache_implementation": "static", "return_dict_in_generate": True, "output_logits": True}
    eager, compiled = (
        model.generate(IDS.cuda(), attention_mask=REAL.cuda(), **TOKENS, **options, disable_compile=flag).logits
        for flag in (True, False)
    )
    for wanted, given in zip(eager, compiled, strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=0.02 * wanted.abs().max().item())
        if not torch.equal(given.argmax(-1), wanted.argmax(-1)):
            return


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_a_gpu_waits_once_for_all_layers(padded):
    """torch tells of what waits."""
    mask, counts = (PADDED["left"] if padded else REAL).cuda(), []
    for layers in (1, 3):
        model = made("Llama", "cuda", num_hidden_layers=layers, attn_implementation="ladder")
        ids, cache = IDS.cuda(), transformers.DynamicCache(config=model.config)
        with torch.inference_mode():
            for begin, end in ((0, 10), (10, 11), (11, 12)):
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")  # or else python tells of each line once
                    torch.cuda.set_sync_debug_mode("warn" if end == 12 else "default")
                    model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
                    torch.cuda.set_sync_debug_mode("default")
        assert not [each for each in told if each.category is FallbackWarning]
        counts.append(len([each for each in told if "synchronizing CUDA operation" in str(each.message)]))
    assert counts[0] == counts[1] > 0


if __name__ == "__main__":
    require_compiled_steps_as_others()
