"""A small GPT that trains: on the emulator for two steps, on a GPU until its loss is torch's."""

import itertools

import pytest
import torch

from flashladder.common import console
from flashladder.common.problem.families import recording
from flashladder.common.studies.models import training
from flashladder.common.studies.models.gpt import Sizes, causal_sdpa
from flashladder.common.studies.models.training import OURS, TORCHS, Run
from flashladder.tools.commands import train


@pytest.mark.slow
def test_two_steps_on_the_emulator(capsys, tmp_path):
    """The command itself: losses are torch's but for rounding, and gradients within the rule."""
    files = {option: str(tmp_path / name) for option, name in (("--picture", "losses.png"), ("--record", "qkv.npz"))}
    words = ["--device", "emulator", "--heads", "1", *itertools.chain(*files.items())]
    assert console.run(train.main, train.parser(), words) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.split()[:1] == ["0"]]
    assert [row[1] for row in rows] == [TORCHS, OURS]
    (_, _, first, last, *_), (_, _, our_first, our_last, *_) = rows
    assert float(first) == pytest.approx(float(our_first), abs=0.01)
    assert float(last) == pytest.approx(float(our_last), abs=0.02)
    assert (tmp_path / "losses.png").stat().st_size > 1000
    recorded = recording.read(tmp_path / "qkv.npz")
    assert {name: tensor.shape for name, tensor in recorded.items()} == dict.fromkeys("qkv", (2, 64, 64))


def test_what_attention_is_given_is_recorded(tmp_path):
    """By the trained model, in the order of its layers, for the first heads and tokens."""
    given = []

    def attend(*qkv):
        given.append(qkv)
        return causal_sdpa(*qkv)

    model = training.new(Sizes(layers=2, heads=3, head_dim=16, batch=2, seqlen=300), causal_sdpa, 0, "cpu")
    training.train(model, 0, 1)
    for parameter in model.blocks[1].qkv.parameters():
        torch.nn.init.constant_(parameter, 0 if parameter.ndim > 1 else 7)
    training.record(model, attend, tmp_path / "qkv.npz")
    recorded = recording.read(tmp_path / "qkv.npz")
    for number, name in enumerate("qkv"):
        wanted = [qkv[number][0, :256, head] for qkv in given for head in (0, 1)]
        assert torch.equal(recorded[name], torch.stack(wanted))
        assert (recorded[name][2:] == 7).all()
    assert len(given) == 2


def test_a_recording_is_no_place_for_another(monkeypatch, capsys, tmp_path):
    """It is refused before anything is trained."""
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained"))
    file = tmp_path / "qkv.npz"
    file.write_text("precious")
    assert console.run(train.main, train.parser(), ["--device", "emulator", "--record", str(file)]) != 0
    assert "qkv.npz is there already: name a new file with --record" in capsys.readouterr().err
    assert file.read_text() == "precious"
    assert console.run(train.main, train.parser(), ["--device", "emulator", "--record", "/proc/x/qkv.npz"]) != 0
    assert "nothing can be written to /proc/x" in capsys.readouterr().err


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
    runs = {seed: {name: training.train(training.new(sizes, attend, seed, "cuda"), seed, 60) for name, attend in
                   training.functions().items()} for seed in (0, 1, 2)}  # fmt: skip
    difference, spread = training.verdict(runs)
    assert difference <= spread
    assert runs[0][OURS].losses[-1] < runs[0][OURS].losses[0] - 1
