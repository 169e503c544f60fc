"""The examples run as they stand: on the GPU where there is one, else on the emulator."""

import runpy
import sys

import pytest

from flashladder.common.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = {"serve": 190}  # a model, a server and its check; others are shorter
OF_OTHERS = 40


SLOW = ("serve", "try_configurations")  # seven seconds; ten kernels to compile


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_runs(path, monkeypatch, capsys):
    assert len(path.read_text().splitlines()) <= MOST_LINES.get(path.stem, OF_OTHERS)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
def test_a_server_keeps_8_bits(monkeypatch, capsys):
    path = ROOT / "examples" / "serve.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--fp8", "--keys", "5", "--new", "2"])
    runpy.run_path(str(path), run_name="__main__")
    assert "tokens a second" in capsys.readouterr().out


def test_there_are_some():
    assert len(EXAMPLES) >= 5
