"""Architectures of transformers on the ladder: each runs on ours, or elsewhere for a reason that the docs name."""

import copy
import itertools
import re
import warnings

import pytest
import torch
from architectures import ARCHITECTURES, SIZES

import flashladder
from flashladder.common.api.frontends import fallback
from flashladder.common.api.frontends.fallback import FallbackWarning
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.paths import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

from flashladder.common.api.frontends import transformers as ours  # noqa: E402

pytestmark = pytest.mark.slow

IDS = torch.randint(2, 64, (2, 16), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[0] * 5 + [1] * 11, [1] * 16])
ENDS = (0, 13, 32)
POSITIONS = torch.cat([torch.arange(end - begin) for begin, end in itertools.pairwise(ENDS)])[None]
INPUTS = {
    "prefill": (IDS, {}),
    "left": (IDS, {"attention_mask": LEFT}),
    "right": (IDS, {"attention_mask": LEFT.flip(1)}),
    "packed": (IDS.reshape(1, -1), {"position_ids": POSITIONS, "use_cache": False}),
}
TOKENS = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
FACTOR, FLOOR = 2, 1e-3  # at most so much further from fp32 than eager attention in bf16, and this much


@pytest.fixture(scope="module", autouse=True)
def _registered():
    flashladder.register_with_transformers()


def made(name):
    """A random model of an architecture."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **ARCHITECTURES[name].sizes})
    kind = getattr(transformers, ARCHITECTURES[name].head.format(name))
    return kind(config).bfloat16().eval()


@torch.no_grad()
def outputs(model, implementation, ids, **options):
    model.set_attn_implementation(implementation)
    return model(ids, **options)[0].double()


def check_logits(model, exact, ids, **options):
    """In the rows that are no padding."""
    mask = options.get("attention_mask")
    real = slice(None) if mask is None else mask.bool()
    right = outputs(exact, "eager", ids, **options)[real]
    eager, given = (outputs(model, name, ids, **options)[real] for name in ("eager", "ladder"))
    assert (given - right).abs().max() <= FACTOR * (eager - right).abs().max() + FLOOR


def check_generation(model, _exact):
    """Each token's logits are those of the whole sequence at once."""
    model.set_attn_implementation("ladder")
    found = model.generate(IDS, attention_mask=LEFT, **TOKENS, return_dict_in_generate=True, output_logits=True)
    mask = torch.nn.functional.pad(LEFT, (0, 1), value=1)
    places = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    whole = outputs(model, "eager", found.sequences[:, :-1], **places)[:, -2:]
    torch.testing.assert_close(
        torch.stack(found.logits, 1).double(), whole, rtol=0, atol=0.02 * float(whole.std()) + 0.02
    )


def check_compiled(model, _exact):
    expected = outputs(model, "eager", IDS)
    torch._dynamo.reset()
    with torch.no_grad():
        given = torch.compile(model, backend="aot_eager", fullgraph=True)
        model.set_attn_implementation("ladder")
        torch.testing.assert_close(given(IDS)[0].double(), expected, rtol=0, atol=0.02 * float(expected.std()) + 0.02)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_runs_on_ours_or_says_why(name, monkeypatch):
    ran, attend = [], ours._ours

    def counted(*arguments):
        o = attend(*arguments)
        ran.append(1)
        return o

    monkeypatch.setattr(ours, "_ours", counted)
    row, model = ARCHITECTURES[name], made(name)
    exact = copy.deepcopy(model).float()
    checks = {
        case: lambda ids=ids, more=more: check_logits(model, exact, ids, **more) for case, (ids, more) in INPUTS.items()
    }
    checks |= {"generate": lambda: check_generation(model, exact), "compile": lambda: check_compiled(model, exact)}
    for case in [case for case in checks if case not in row.lacks]:
        monkeypatch.setattr(fallback, "_said", set())
        ran.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            reasons = []
            try:
                checks[case]()
            except UnsupportedProblemError as error:
                reasons = [str(error)]
        reasons += [str(each.message) for each in said if each.category is FallbackWarning]
        words = row.elsewhere.get(case)
        if words is None:
            assert (bool(ran), reasons) == (True, []), case
        else:
            assert reasons, f"{case}: nothing ran elsewhere; {words!r} is no reason any more"
            assert all(words in reason for reason in reasons), (case, reasons)


def test_the_docs_name_each_reason():
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "models.md").read_text())
    assert {words for row in ARCHITECTURES.values() for words in row.elsewhere.values() if words not in text} == set()
    assert f"{len(ARCHITECTURES)} architectures" in text


def test_there_are_enough():
    assert len(ARCHITECTURES) >= 33
