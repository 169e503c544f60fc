"""Steps of a small GPT in ways of training: with stand-ins for our attention, on the emulator, and two on a GPU."""

import dataclasses
import itertools
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention as switch
from torch.nn.functional import scaled_dot_product_attention

from flashladder.common import console
from flashladder.common.api.frontends import torch_switch
from flashladder.common.api.frontends.fallback import FallbackWarning
from flashladder.common.studies.models import step_costs, training, ways
from flashladder.common.studies.models.gpt import Sizes, causal_sdpa
from flashladder.common.studies.models.step_costs import Costs
from flashladder.common.studies.models.training import OURS, TORCHS
from flashladder.tools.commands import train

TINY = Sizes(layers=2, heads=6, head_dim=8, batch=2, seqlen=32)
DONE = Costs({OURS: [2.0, 4.0, 27.0], TORCHS: [2.0, 8.0, 9.0]}, {}, {})


def failed(*names):
    return Costs({OURS: [], TORCHS: []}, {}, dict.fromkeys(names, "ValueError: too wide"))


def command(*words):
    return console.run(train.main, train.parser(), ["--ways", "--device", "emulator", *words])


def rows_of(said):
    rows = [line.split() for line in said.splitlines() if line.startswith("  ") and line.strip()]
    return {name: cells for name, *cells in rows if name != "way"}


@pytest.fixture
def tiny(monkeypatch):
    """The ways of a model without kernels: torch's attention stands for ours."""
    monkeypatch.setattr(ways, "EMULATED", TINY)
    return lambda name, ours=causal_sdpa, **more: dataclasses.replace(ways.ways("cpu")[name], ours=ours, **more)


def test_there_are_24_ways():
    found = ways.ways("cpu")
    compiled = [name for name, way in found.items() if way.compiled]
    assert [f"{name}-compiled" for name in [*found][:12]] == compiled
    assert len([name for name in found if name not in ("accelerate", "lightning", "switch")]) >= 24
    assert {name for name, way in found.items() if not way.comparable} == {
        f"dropout{more}{compiled}" for more in ("", "-checkpoints") for compiled in ("", "-compiled")
    }


def test_ratios_are_of_pairs_that_take_turns():
    assert step_costs._turns(3) == [OURS, TORCHS, TORCHS, OURS, OURS, TORCHS]
    assert DONE.ratio == 1
    slow = Costs({OURS: [1.04], TORCHS: [1.0]}, {}, {})
    assert train._verdict({"a": DONE, "b": slow, "c": failed(OURS)}).startswith("1 of 2 ways take at most 1.03 x")


@pytest.mark.parametrize("name", ["autocast", "bf16", "checkpoints", "deterministic", "groups", "d80", "ddp", "fsdp2"])
def test_steps_are_timed_where_they_agree(tiny, name):
    told = []
    costs = step_costs.measure(tiny(name), "cpu", 2, 3, told.append)
    assert not costs.failures
    assert [len(ms) for ms in costs.ms.values()] == [3, 3]
    assert min(map(min, costs.ms.values())) > 0
    assert told == [1, 2, 3, 4, 5, 6]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.distributed.is_initialized()


def scaled(q, k, v):
    return causal_sdpa(q * 1.1, k, v)


def unmasked(q, k, v):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def infinite(q, k, v):
    return causal_sdpa(q, k, v) * torch.inf


@pytest.mark.parametrize("wrong", [scaled, unmasked, infinite])
def test_another_attention_is_not_timed(tiny, wrong):
    """Also where the loss of a model that has learnt nothing hardly tells."""
    costs = step_costs.measure(tiny("autocast", wrong), "cpu", 1, 1)
    assert list(costs.failures) == [OURS]
    assert re.match("VerificationError: the first (loss is|gradient of [QKV] of layer)", costs.failures[OURS])
    assert costs.ms == {OURS: [], TORCHS: []}


def test_what_fails_is_named(tiny):
    def refuse(*_):
        raise ValueError("too wide\nat length")

    told = []
    costs = step_costs.measure(tiny("autocast", refuse), "cpu", 1, 1, told.append)
    assert costs.failures == {OURS: "ValueError: too wide"}
    assert told == [1, 2]
    assert list(step_costs.measure(tiny("autocast", torchs=refuse), "cpu", 1, 1).failures) == [TORCHS]
    assert list(step_costs.measure(tiny("autocast", within=refuse), "cpu", 1, 1).failures) == [step_costs.BOTH]


def test_checkpoints_compute_attention_again(tiny):
    calls = []

    def counted(*qkv):
        calls.append(1)
        return causal_sdpa(*qkv)

    for name in ("autocast", "checkpoints"):
        assert not step_costs.measure(tiny(name, counted), "cpu", 1, 1).failures
        calls.append(0)
    without, with_them = "".join(map(str, calls)).split("0")[:2]
    assert len(with_them) == 2 * len(without)


@pytest.mark.slow
def test_packed_rows_see_their_own_sequence(tiny):
    """Nine of unequal length, held against torch's attention of each."""
    ours, _ = ways._packed(sizes := Sizes(layers=1, heads=1, head_dim=64, batch=2, seqlen=80), "cpu")
    q, k, v = torch.randn(3, sizes.batch, sizes.seqlen, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    places = [start * 160 // 16384 for start in ways.STARTS]
    assert len(set(torch.tensor(places).diff().tolist())) > 5
    rows = [x.flatten(0, 1)[None] for x in (q, k, v)]
    wanted = [causal_sdpa(*(x[:, begin:end] for x in rows)) for begin, end in itertools.pairwise(places)]
    torch.testing.assert_close(ours(q, k, v).flatten(0, 1), torch.cat(wanted, 1)[0], rtol=0, atol=0.02)


def test_the_switch_is_ours_for_its_steps_or_an_error(monkeypatch):
    monkeypatch.setattr(torch_switch, "_activate", lambda: SimpleNamespace(remove=lambda: None))
    with ways._switched():
        assert switch.current_flash_attention_impl() == torch_switch.NAME
        with pytest.raises(FallbackWarning):
            warnings.warn("refused", FallbackWarning, stacklevel=1)
    assert switch.current_flash_attention_impl() is None


def test_a_way_that_fails_has_its_row(monkeypatch, capsys):
    """The others go on; the exit code tells whether ours alone failed."""
    found = {"bf16": failed(TORCHS), "d96": failed(OURS, TORCHS), "d80": DONE}
    measured = iter([*found.values(), failed(OURS)])
    monkeypatch.setattr(step_costs, "measure", lambda *_: next(measured))
    assert command("--way", ",".join(found), "--runs", "3") == 0
    said = capsys.readouterr().out
    assert "3 ways, 3 x 2 steps with each attention: about " in said
    assert rows_of(said)["d80"] == ["4.000", "8.000", "1.000"]
    assert f"{TORCHS}: ValueError: too wide" in said
    assert "times of the emulator" in said
    assert command("--way", "autocast") == console.EXIT_ERROR
    assert "failed with our attention alone: autocast" in capsys.readouterr().err


def test_what_was_timed_is_shown_after_an_interruption(monkeypatch, capsys):
    measured = iter([DONE])
    monkeypatch.setattr(step_costs, "measure", lambda *_: next(measured, None) or sys.exit(7))
    with pytest.raises(SystemExit):
        command("--way", "d80,d96")
    assert "d80" in rows_of(capsys.readouterr().out)


def test_what_is_left_out_is_said(monkeypatch, capsys):
    monkeypatch.setattr(ways, "find_spec", lambda _: None)
    monkeypatch.setattr(step_costs, "measure", lambda *_: DONE)
    assert command("--way", "d80,lightning") == 0
    said = capsys.readouterr()
    assert "lightning is left out: it needs the package lightning" in said.err
    assert "lightning" not in rows_of(said.out)
    assert command("--way", "switch") == console.EXIT_ERROR
    assert "--way switch: nothing is left to time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ways", "--way", "dpp"], "no way dpp; did you mean ddp?"),
        (["--ways", "--head-dim", "64"], "--head-dim: not for --ways, which takes --way, --steps and --runs"),
        (["--runs", "3", "--way", "d80"], "--runs, --way: for --ways alone"),
    ],
)
def test_options_of_the_other_mode_are_refused(monkeypatch, capsys, words, message):
    for module, name in ((training, "train"), (step_costs, "measure")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("trained"))
    assert console.run(train.main, train.parser(), ["--device", "emulator", *words]) == console.EXIT_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_compiled_way(tiny):
    assert not step_costs.measure(tiny("fsdp2-compiled"), "cpu", 1, 1).failures


@pytest.mark.slow
def test_two_ways_on_the_emulator(capsys):
    """Our kernels: the first loss and gradients are torch's."""
    assert command("--way", "autocast,dropout-checkpoints") == 0
    rows = rows_of(capsys.readouterr().out)
    assert {name: len(row) for name, row in rows.items()} == {"autocast": 3, "dropout-checkpoints": 3}


@pytest.mark.gpu
def test_two_ways_on_a_gpu(capsys):
    words = ["--ways", "--device", "gpu", "--way", "packed,switch", "--steps", "2", "--runs", "1"]
    assert console.run(train.main, train.parser(), words) == 0
    said = capsys.readouterr().out
    assert "of 2 ways take at most 1.03 x" in said
    assert {name: len(row) for name, row in rows_of(said).items()} == {"packed": 5, "switch": 5}


@pytest.mark.gpu
def test_passes_of_a_short_call_on_a_gpu():
    costs = step_costs.measure_pass(64)
    assert not costs.failures
    assert {name: len(ms) for name, ms in costs.ms.items()} == dict.fromkeys((OURS, TORCHS), step_costs.PASS_RUNS)
