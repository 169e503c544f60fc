"""`flashladder model`: what attention is worth in a model of transformers, on the emulator or a GPU."""

import math
import re
import warnings

import pytest
import torch

import flashladder
from flashladder.common import console
from flashladder.common.api.frontends import fallback
from flashladder.common.api.frontends.fallback import FallbackWarning
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.paths import ROOT
from flashladder.common.studies.models import model_trial
from flashladder.tools.commands import model as command

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

from flashladder.common.api.frontends import transformers as ours  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Nothing was said before; what falls back unasked fails the test."""
    monkeypatch.setattr(fallback, "_said", set())
    flashladder.register_with_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_command_compares(device, capsys):
    assert "    flashladder model  " in (ROOT / "docs" / "models.md").read_text()
    small = ["--seqlen", "512", "--layers", "2", "--tokens", "4"]
    words = ["--device", "emulator"] if device == "cpu" else small
    assert console.run(command.main, command.parser(), [*words, "--implementations", "eager,sdpa,ladder"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["eager", "sdpa", "ladder"]
    assert all(0 < float(row[1]) < 0.1 for row in rows)
    assert [len(row) for row in rows] == [2 if device == "cpu" else 8] * 3


def rows_of(table):
    return [line.split() for line in table.splitlines() if line.split()[:1] in (["eager"], ["sdpa"], ["ladder"])]


def test_the_command_times_attention_a_prefill_and_a_token(monkeypatch, capsys):
    """With clocks that are made up: all attention calls of a prefill take 3 ms each."""

    class Event:
        def __init__(self, enable_timing):
            self.elapsed_time = lambda end: 3.0

        def record(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(model_trial, "ROUNDS", 2)
    model = model_trial.random_model({name: small for name, (_, small) in command.SIZES.items()} | {"layers": 2}, "cpu")
    usual = dict(transformers.AttentionInterface._global_mapping)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        times = model_trial.times_of(model, ["sdpa", "eager", "ladder"], ids, torch.ones_like(ids), 2)
    assert transformers.AttentionInterface._global_mapping == usual
    assert [times[name][0] for name in ("sdpa", "ladder")] == [6.0, 6.0]
    assert all(prefill > 0 for _, prefill, _ in times.values())
    console.console.print(command._shown(dict.fromkeys(times, 0.1), times))
    rows = rows_of(capsys.readouterr().out)
    assert [len(row) for row in rows] == [8, 8, 8]
    assert [row[2:4] for row in rows] == [["6.000", "1.000"], ["-", "-"], ["6.000", "1.000"]]


def test_the_commands_ratios_are_to_the_first_that_ran(capsys):
    times = {"sdpa": [3.0, 4.0, math.nan], "eager": [math.nan, 8.0, 6.0], "ladder": [1.5, 2.0, 12.0]}
    console.console.print(command._shown(dict.fromkeys(times, 0.1), times))
    out = capsys.readouterr().out
    assert re.findall(r"to \w+", out) == ["to sdpa", "to sdpa", "to eager"]
    figures = [row[2:] for row in rows_of(out)]
    assert figures == [
        ["3.000", "1.000", "4.000", "1.000", "-", "-"],
        ["-", "-", "8.000", "0.500", "6.000", "1.000"],
        ["1.500", "2.000", "2.000", "2.000", "12.000", "0.500"],
    ]


def test_the_command_pads(capsys):
    words = ["--device", "emulator", "--batch", "2", "--padding"]
    assert console.run(command.main, command.parser(), [*words, "5"]) == 0
    assert "padding 5" in (out := capsys.readouterr().out)
    assert all(0 < float(row[1]) < 0.1 for row in rows_of(out))
    assert console.run(command.main, command.parser(), [*words, "16"]) == 2
    assert "--padding 16: of 16 tokens, some should be none" in capsys.readouterr().err


def test_the_command_fails_where_logits_are_wrong_or_a_layer_falls_back(monkeypatch, capsys):
    monkeypatch.setattr(ours, "attention", lambda q, *_, **__: torch.zeros_like(q))
    assert console.run(command.main, command.parser(), ["--device", "emulator"]) == console.EXIT_ERROR
    assert re.search(r"ladder: \S+: logits are wrong by more than twice sdpa's error", capsys.readouterr().err)
    monkeypatch.setattr(ours, "foresee", refused)
    assert console.run(command.main, command.parser(), ["--device", "emulator"]) == console.EXIT_ERROR
    assert '"sdpa" runs instead of FlashLadder: made up' in capsys.readouterr().err


def refused(*_):
    raise UnsupportedProblemError("made up")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("sdpa:efficient", "of sdpa's kernels there are sdpa:flash and sdpa:cudnn"),
        ("nonsense", 'Specified `attn_implementation="nonsense"` is not supported'),
        ("sdpa:cudnn", "torch has no such kernel for this model"),
    ],
)
def test_the_command_names_an_implementation_that_is_none(given, words, capsys):
    assert console.run(command.main, command.parser(), ["--device", "emulator", "--implementations", given]) == 2
    assert f"--implementations {given}: {words}" in capsys.readouterr().err
