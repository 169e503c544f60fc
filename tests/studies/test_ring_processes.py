"""The command that tries a ring: processes over gloo and the emulator, or over NCCL on GPUs; and its refusals."""

import math
import re

import pytest
import torch
import torch.distributed as dist

from flashladder.common import console
from flashladder.common.errors import DeviceError
from flashladder.common.paths import ROOT
from flashladder.common.problem.problem import Problem
from flashladder.common.studies import ring_trial
from flashladder.common.studies.ring_trial import RingTrial, hold
from flashladder.tools.commands import ring

pytestmark = pytest.mark.slow


def tried(*words, capsys):
    code = console.run(ring.main, ring.parser(), words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_two_processes_over_gloo(capsys):
    assert "flashladder ring --device emulator --causal" in (ROOT / "docs" / "models.md").read_text()
    code, said, _ = tried("--device", "emulator", "--causal", capsys=capsys)
    assert code == 0, said
    assert said.startswith("2 ranks, batch=1,num_heads=1,seqlen_q=64,head_dim=64,dtype=bf16,causal=true\n")
    assert [line.split()[0] for line in said.splitlines() if re.match(r" *(o|lse) ", line)] == ["o", "lse"]
    assert "of linear" not in said, "the emulator has no times"


@pytest.mark.parametrize("mask", [[], ["--causal"]], ids=["full", "causal"])
def test_two_processes_train_over_gloo(mask, capsys):
    code, said, _ = tried("--device", "emulator", "--train", "--heads", "2", "--heads-k", "1", *mask, capsys=capsys)
    assert code == 0, said
    outputs = [line.split()[0] for line in said.splitlines() if re.match(r" *(o|lse|d[qkv]) ", line)]
    assert outputs == ["o", "lse", "dq", "dk", "dv"]


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--ranks", "0"], "--ranks 0: there is at least one"),
        (["--seqlen", "66"], "a sequence of 66 over 2 ranks; it should be a multiple of 4"),
        (["--seqlen-k", "128"], "seqlen_q=64, seqlen_k=128: a sequence that is cut has one length"),
        (["--head-dim", "520"], "takes head_dim 64, 96, 128, 192, 256, 512, or a multiple of 8"),
    ],
)
def test_what_cannot_run_is_refused_before_processes_begin(words, refusal, capsys):
    code, _, complaint = tried("--device", "emulator", *words, capsys=capsys)
    assert code == console.EXIT_ERROR
    assert refusal in complaint


def test_a_process_that_fails_ends_the_trial(tmp_path, monkeypatch, capsys):
    (no_folder := tmp_path / "file").touch()
    monkeypatch.setenv("FLASHLADDER_CACHE", str(no_folder))
    code, _, complaint = tried("--device", "emulator", capsys=capsys)
    assert code == console.EXIT_ERROR
    assert "a process of the ring failed: " in complaint


def test_too_few_gpus_are_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="2 GPUs are wanted, and torch finds 1; the emulator needs none"):
        hold(Problem(seqlen_q=64), 2, "cuda", "24")


def test_a_wrong_output_does_not_pass():
    assert RingTrial({"o": 0.1, "lse": 0.0}, {"o": 0.2, "lse": 0.1}, {}).passed
    assert not RingTrial({"o": 0.3, "lse": 0.0}, {"o": 0.2, "lse": 0.1}, {}).passed
    assert not RingTrial({"o": float("nan"), "lse": 0.0}, {"o": 0.2, "lse": 0.1}, {}).passed


def test_what_is_no_number_on_one_rank_is_the_worst(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/door", rank=0, world_size=1)
    try:
        worst = ring_trial._of_all({"o": math.nan, "lse": 0.5}, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert worst == {"o": math.inf, "lse": 0.5}


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("mask", [[], ["--causal"]], ids=["full", "causal"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_over_nccl(ranks, mask, capsys):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"a ring of {ranks} over NCCL needs as many GPUs")
    sizes = ["--ranks", str(ranks), "--seqlen", "16384", "--heads", "4", "--heads-k", "2"]
    code, said, _ = tried(*sizes, "--train", *mask, capsys=capsys)
    assert code == 0, said
    assert all(f"{name} " in said for name in ("dq", "dk", "dv", "one GPU", "ring", "exchange"))
