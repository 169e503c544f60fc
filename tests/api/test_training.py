"""A small GPT that trains: on the emulator for two steps, on a GPU until its loss is torch's."""

import pytest

from flashladder.common import console
from flashladder.common.api import training
from flashladder.common.api.gpt import Sizes
from flashladder.common.api.training import OURS, TORCHS, Run
from flashladder.tools.commands import train


def test_two_steps_on_the_emulator(capsys, tmp_path):
    """The command itself: losses are torch's but for rounding, and gradients within the rule."""
    words = ["--device", "emulator", "--heads", "1", "--picture", str(tmp_path / "losses.png")]
    assert console.run(train.main, train.parser(), words) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.split()[:1] == ["0"]]
    assert [row[1] for row in rows] == [TORCHS, OURS]
    (_, _, first, last, *_), (_, _, our_first, our_last, *_) = rows
    assert float(first) == pytest.approx(float(our_first), abs=0.01)
    assert float(last) == pytest.approx(float(our_last), abs=0.02)
    assert (tmp_path / "losses.png").stat().st_size > 1000


def test_text_is_real_and_the_same_each_time():
    text = training.text()
    assert len(text) > 100_000
    assert b"def " in bytes(text[:100_000].tolist())


@pytest.mark.parametrize(("our_loss", "differs"), [(2.05, False), (2.4, True)])
def test_losses_are_held_against_the_spread_of_seeds(our_loss, differs):
    runs = {0: {TORCHS: Run([2.0], 1), OURS: Run([our_loss], 1)}, 1: {TORCHS: Run([2.2], 1), OURS: Run([2.2], 1)}}
    difference, spread = training.verdict(runs)
    assert (difference > spread) == differs


def test_wrong_gradients_are_told_of(monkeypatch, capsys):
    monkeypatch.setattr(training, "gradient_errors", lambda *_: {OURS: 0.03, TORCHS: 0.01})
    monkeypatch.setattr(training, "train", lambda *_: Run([2.0], 1))
    assert console.run(train.main, train.parser(), ["--device", "emulator"]) == console.EXIT_ERROR
    assert "gradients are wrong" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_learns_as_with_torchs_attention_on_a_gpu():
    sizes = Sizes(layers=2, heads=4, head_dim=64, batch=8, seqlen=512)
    runs = {seed: {name: training.train(sizes, attend, seed, 60, "cuda") for name, attend in
                   training.functions().items()} for seed in (0, 1, 2)}  # fmt: skip
    difference, spread = training.verdict(runs)
    assert difference <= spread
    assert runs[0][OURS].losses[-1] < runs[0][OURS].losses[0] - 1
