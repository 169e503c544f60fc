"""The examples run as they stand: on the GPU where there is one, else on the emulator."""

import runpy

import pytest

from flashladder.common.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 40


SLOW = ("try_configurations",)  # it compiles ten kernels


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_runs(path, capsys):
    assert len(path.read_text().splitlines()) <= MOST_LINES
    runpy.run_path(str(path))
    assert capsys.readouterr().out


def test_there_are_some():
    assert len(EXAMPLES) >= 5
