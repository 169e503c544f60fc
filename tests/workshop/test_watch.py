"""The watch: a trial at every save, and what it says of saves that do not work."""

import os
import sys

import pytest

from flashladder.common.catalog import find
from flashladder.common.paths import ROOT
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.target import Target
from flashladder.common.workshop import trial, watch
from flashladder.tests.support import ideas, interruptible
from flashladder.tests.workshop.test_ideas import TIMING

pytestmark = pytest.mark.slow

PLACE = Target(on_gpu=False, arch="sm_90a", gpu=load_gpu("h100"))
CPU_SECONDS = 9.0  # of all cores, from a save to the last figure: 4 to 5 s of each of two


def compose(rung):
    return trial.compare(rung, rung.below(), Problem(batch=4, num_heads=16, seqlen_q=4096), PLACE, {})


def watched(monkeypatch, capsys, saves, timer=None):
    """What the watch says of each save, the first before any."""
    said, pending = [], list(saves)

    def hear(words):
        if words.startswith("\n"):
            said.append(capsys.readouterr().out)
        if words.startswith("waiting") and pending:
            pending.pop(0)()

    listen(monkeypatch, hear)
    watch.watch("my_idea", compose, timer, trials=len(saves) + 1)
    return [*said[1:], capsys.readouterr().out]


def listen(monkeypatch, hear):
    """`hear` gets what the watch is about to say."""
    spoken = watch.Text

    def text(words, *style, **how):
        hear(words)
        return spoken(words, *style, **how)

    text.assemble = spoken.assemble
    monkeypatch.setattr(watch, "Text", text)


def test_each_save_is_tried_and_what_is_wrong_with_it_is_said(rung, monkeypatch, capsys):
    edits = ("no kernel", "racing", "wrong", "longer")
    saves = [lambda edit=edit: ideas.save(rung, edit) for edit in edits]
    first, broken, racing, wrong, longer = watched(monkeypatch, capsys, saves)
    assert "mine/00_my_idea as it is" in first
    assert "the same machine code" in first
    for said in (broken, racing, wrong, longer):
        assert "saved kernel.cu" in said
        assert "waiting for the next save" in said
    assert "does not compile" in broken
    assert 'error: expected a ";"' in broken
    assert "mine/00_my_idea races" in racing
    assert "race on shared memory" in racing
    assert "kernel.cu:" in racing
    assert "mine/00_my_idea is wrong" in wrong
    assert "right, and no race" in longer
    assert "barriers in the loop: 2 → 3" in longer


def test_declaration_and_headers_are_watched_too(rung, monkeypatch, capsys):
    declared = rung.directory / "version.yaml"
    header = rung.directory / "ours.cuh"
    header.write_text("#pragma once\n")
    rung.kernel.write_text('#include "ours.cuh"\n' + rung.kernel.read_text())
    text = declared.read_text()
    saves = [
        lambda: declared.write_text(text.replace("block_n: {default: 64", "block_n: {default: 32")),
        lambda: header.write_text("#pragma once\n#error not yet\n"),
    ]
    first, smaller, refused = watched(monkeypatch, capsys, saves)
    assert "the same machine code" in first
    assert "saved version.yaml" in smaller
    assert "→" in smaller
    assert "saved ours.cuh" in refused
    assert "#error not yet" in refused


def test_a_broken_declaration_is_said_and_waited_for(rung, monkeypatch, capsys):
    declared = rung.directory / "version.yaml"
    text = declared.read_text()
    waits = []

    def sleep(_):
        if not waits:
            waits.append(True)
            declared.write_text(text.replace("title: My idea", "title: Mended by now"))

    original = watch._stamp
    broken = text.replace("instruction_set: ampere", "instruction_set: turing")
    find("my_idea")
    declared.write_text(broken)
    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(watch, "_settled", original)
    watch.watch("my_idea", compose, None, trials=2)
    out = capsys.readouterr().out
    assert "mine/00_my_idea cannot be configured" in out
    assert "instruction_set=turing is not one of ampere" in out
    assert "saved version.yaml" in out
    assert "right, and no race" in out


def test_a_save_while_the_emulator_is_at_an_endless_loop_ends_the_trial(rung, monkeypatch, capsys):
    ideas.save(rung, "endless")
    at = []

    def hear(words):
        if words.startswith("on the emulator warp") and not at:
            at.append(words)
            ideas.save(rung, "longer")

    listen(monkeypatch, hear)
    watch.watch("my_idea", compose, None, trials=2)
    out = capsys.readouterr().out
    assert "kernel.cu:" in at[0]
    assert "saved again: this trial ends" in out
    assert "saved kernel.cu" in out
    assert "barriers in the loop: 2 → 3" in out


def test_on_a_gpu_the_ratio_follows(rung, monkeypatch, capsys):
    timed = []

    def timer(*_):
        timed.append(True)
        return TIMING

    first, longer = watched(monkeypatch, capsys, [lambda: ideas.save(rung, "longer")], timer)
    assert "measured" not in first, "the same machine code is not timed"
    assert "1.8 % faster than 02 at" in longer
    assert timed == [True]


def test_the_tool_waits_until_it_is_interrupted(rung, tmp_path):
    command = [sys.executable, ROOT / "tools" / "run_version.py", "my_idea", "--watch", "--device", "emulator"]
    process = interruptible.start([*map(str, command)])
    out = ""
    assert process.stdout is not None
    for line in process.stdout:
        out += line
        if "waiting for the next save" in line:
            break
    process.send_signal(2)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out + rest
    assert "right, and no race" in out


def test_a_save_takes_a_few_seconds_of_the_processors(rung):
    """From the save to the last figure; time on the clock would say how busy the machine is."""
    ideas.save(rung, "longer")
    begin = sum(os.times()[:4])
    watch._try(compose(find("my_idea")), None, lambda: False)
    assert sum(os.times()[:4]) - begin < CPU_SECONDS
