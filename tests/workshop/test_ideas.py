"""Trials of an idea: what is compiled, emulated, compared and timed, in which words, and what is kept of it."""

import shutil
import subprocess
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashladder.common import console
from flashladder.common.catalog import find
from flashladder.common.compiler import sources
from flashladder.common.errors import ConfigError, EmulatorError, ToolchainError
from flashladder.common.measure.statistics import Estimate
from flashladder.common.paths import CUDA_HEADERS
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem, operation_named
from flashladder.common.records import records
from flashladder.common.report import sections
from flashladder.common.report.pages import documents
from flashladder.common.runtime.target import Target
from flashladder.common.workshop import machine, scaffold, tried, verdict
from flashladder.common.workshop.trial import Built, Emulated, Timing, Trial, compare, hold, make
from flashladder.tests.support import ideas

PLACE = Target(on_gpu=False, arch="sm_90a", gpu=load_gpu("h100"))
PROBLEM = Problem(batch=4, num_heads=16, seqlen_q=4096)
TIMING = Timing(
    ratio=Estimate(1.018, 1.015, 1.021),
    control=Estimate(1.0, 0.999, 1.001),
    verdict="faster",
    rounds=32,
    mode="hot",
    parent_us=101.8,
    time_us=100.0,
    place={"device": "NVIDIA H200", "driver": "580"},
)


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))


def idea_of(rung, **values):
    return compare(rung, find(ideas.PARENT), PROBLEM, PLACE, values)


def made_up(timing=None, before=None, after=None, same=False, work=1, isa="ampere"):
    """A trial as far as words need it."""
    figures = {verdict.LOOP: 100, verdict.CYCLES: 1000, verdict.SPILLS: 0}
    rungs = {"version": SimpleNamespace(instruction_set=isa), "parent": SimpleNamespace(instruction_set="ampere")}
    idea = SimpleNamespace(against="24", problem=SimpleNamespace(name="seqlen_q=4096"), **rungs)
    parent = SimpleNamespace(figures=lambda: figures | (before or {}), loop_flops=100)
    ours = SimpleNamespace(figures=lambda: figures | (after or {}), loop_flops=100 * work)
    return SimpleNamespace(idea=idea, parent=parent, ours=ours, timing=timing, is_same_code=same)


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        (made_up(TIMING), "1.8 % faster than 24 at seqlen_q=4096, 95 % interval +1.5 % to +2.1 %: keep it"),
        (
            made_up(replace(TIMING, ratio=Estimate(0.98, 0.975, 0.985), verdict="slower")),
            "2.0 % slower than 24 at seqlen_q=4096, 95 % interval -2.5 % to -1.5 %: drop it",
        ),
        (
            made_up(replace(TIMING, ratio=Estimate(1.001, 0.999, 1.002), verdict="tied")),
            "no difference from 24 that can be measured at seqlen_q=4096, 95 % interval -0.1 % to +0.2 %: keep it",
        ),
        (
            made_up(replace(TIMING, ratio=Estimate(1.01, 0.98, 1.03), verdict="unclear")),
            "neither faster nor slower than 24 for sure at seqlen_q=4096, 95 % interval -2.0 % to +3.0 %: measure",
        ),
        (made_up(same=True), "the same machine code as 24 at seqlen_q=4096: the compiler sees no difference"),
        (
            made_up(after={verdict.CYCLES: 950}),
            "predicted, not measured: the main loop's schedule is 5.0 % shorter than",
        ),
        (
            made_up(after={verdict.CYCLES: 1100}),
            "schedule is 10.0 % longer than that of 24 (cycles to issue the loop, ",
        ),
        (
            made_up(after={verdict.CYCLES: 1800}, work=2),
            "schedule is 10.0 % shorter than that of 24, for as much work (cycles to issue the loop, ",
        ),
        (made_up(after={verdict.SPILLS: 48}), "it spills 48 bytes more than 24, which costs time"),
        (made_up(), "the main loop is as long as that of 24 (no figure changed). A GPU decides"),
        (
            made_up(after={verdict.CYCLES: 700}, isa="hopper"),
            "its products are other instructions than those of 24, so",
        ),
    ],
)
def test_the_verdict_is_a_sentence(trial, words):
    assert words in verdict.in_words(trial)


def test_a_trial_without_a_gpu_says_what_machine_code_and_emulator_say(rung):
    ideas.save(rung, "longer")
    trial = hold(idea_of(rung), None)
    assert trial.timing is None
    assert verdict.changes(trial)["barriers in the loop"] == (2, 3)
    assert trial.emulated.check.passed
    assert trial.emulated.problem.num_heads == 1
    assert verdict.in_words(trial).startswith("predicted, not measured: ")
    assert verdict.short(trial) == "predicted"
    assert verdict.untried(trial.idea) == "not tried: fp16"


def test_each_part_of_a_trial_is_told_when_it_is_known(rung):
    told = []

    def hear(part):
        told.append((type(part), getattr(part, "timing", None)))

    ideas.save(rung, "longer")
    trial = hold(idea_of(rung), lambda *_: TIMING, hear)
    assert told == [(Emulated, None), (Built, None), (Trial, None), (Trial, TIMING)]
    assert trial.timing == TIMING
    told.clear()
    ideas.save(rung, "racing")
    with pytest.raises(EmulatorError, match="race on shared memory"):
        hold(idea_of(rung), None, hear)
    assert told == [(Built, None)], "a race is said, and what was compiled too"


def test_kernels_of_one_machine_code_are_not_timed(rung):
    def never(*_):
        raise AssertionError("there is nothing to be measured")

    ideas.save(rung, "unchanged")
    trial = hold(idea_of(rung), never)
    assert verdict.short(trial) == "same code"


def test_values_hold_for_both_as_far_as_both_have_them(rung):
    idea = idea_of(rung, block_n=32)
    built = make(idea, print)
    assert (built.ours.config.block_n, built.parent.config.block_n) == (32, 32)
    assert idea.small().seqlen_k == 4 * 32
    declared = rung.directory / "version.yaml"
    declared.write_text(declared.read_text().replace("block_n: {default: 64", "block_n: {default: 128"))
    ideas.save(rung, "unchanged")
    built = make(idea_of(find("my_idea")), print)
    assert (built.ours.config.block_n, built.parent.config.block_n) == (128, 64), "each has its own defaults"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("24", (1, 128, 256)),
        ("backward/16", (1, 4 * 64, 4 * 64)),
        ("decode/07", (4, 1, 4 * 64)),
        ("mla/01", (128, 1, 4 * 64)),
    ],
)
def test_the_small_problem_goes_round_the_loops_of_every_ladder(name, sizes):
    version = find(name)
    usual = Problem(**operation_named(version.operation).usual, operation=version.operation)
    small = compare(version, version.its_ladder()[0], usual, PLACE, {}).small()
    assert (small.num_heads, small.seqlen_q, small.seqlen_k) == sizes
    assert small.batch == small.num_heads_k == 1


def test_what_was_tried_is_kept_with_its_patch_and_shown_on_the_page(rung):
    ideas.save(rung, "longer")
    trial = hold(idea_of(rung), lambda *_: TIMING)
    path = tried.record(trial)
    assert path == rung.directory / "tried.csv"
    tried.record(replace(trial, timing=None), note="the same | without a GPU")
    rows, damaged = tried.log_of(rung).read()
    assert (len(rows), damaged) == (2, [])
    first = rows.iloc[0]
    assert (first["parent"], first["verdict"], first["ratio"], first["device"]) == (
        "02_swizzling",
        "faster",
        1.018,
        "NVIDIA H200",
    )
    assert (first["parent_loop_instructions"], first["code"]) == (len(trial.parent.loop), trial.built.ours.code)
    assert first["change"] == "+1 -0: __syncthreads();"
    assert first["config"] == trial.built.ours.config.name
    kept = (rung.directory / first["patch"]).read_text()
    assert rows["patch"].nunique() == len([*(rung.directory / "tried").iterdir()]) == 1, "what has not changed, once"
    assert "--- 02_swizzling/kernel.cu\n+++ 00_my_idea/kernel.cu\n" in kept
    assert "\n+        __syncthreads();\n" in kept
    lines = sections.between(rung.directory / documents.PAGE, documents.TRIED).splitlines()
    assert len(lines) == 4
    assert "the same \\| without a GPU" in lines[2]
    assert "| predicted |" in lines[2]
    assert "| +1 -0: `__syncthreads();` | 02 | d128, 4,096 rows |" in lines[3]
    assert "| 1.018 (1.015 to 1.021) | faster, NVIDIA H200 | [patch](tried/" in lines[3]


def test_a_header_beside_the_kernel_is_in_the_patch(rung):
    (rung.directory / "extra.cuh").write_text("#pragma once\nconstexpr int extra = 1;\n")
    rung.kernel.write_text('#include "extra.cuh"\n' + rung.kernel.read_text())
    text = tried.patch(rung, find("02"))
    assert "--- /dev/null\n+++ 00_my_idea/extra.cuh\n" in text
    assert "+constexpr int extra = 1;\n" in text


def test_a_header_changed_beside_the_kernel_is_compared_with_the_parents(rung):
    header = rung.directory / "softmax" / "online.cuh"
    header.parent.mkdir()
    header.write_text(f"// another one\n{(CUDA_HEADERS / 'softmax' / 'online.cuh').read_text()}")
    text = tried.patch(rung, find("02"))
    names = "--- cuda/softmax/online.cuh\n+++ 00_my_idea/softmax/online.cuh\n"
    assert f"{names}@@ -1,3 +1,4 @@\n+// another one\n" in text


def test_ideas_of_one_second_have_names_and_patches_of_their_own(rung, monkeypatch):
    now = datetime(2026, 11, 22, tzinfo=timezone.utc)
    monkeypatch.setattr(records, "now", lambda: now)
    other = scaffold.make("other", "02", private=True)
    ideas.save(rung, "longer")
    ideas.save(other, "racing")
    trial = hold(idea_of(rung), None)
    tried.record(trial)
    tried.record(replace(trial, idea=replace(trial.idea, version=other, parent=rung)), is_dropped=True)
    first, second = tried.log_of(rung).read()[0].itertuples()
    assert first.run != second.run
    kept = [(rung.directory / row.patch).read_text() for row in (first, second)]
    assert kept == [tried.patch(rung, find("02")), tried.patch(other, rung)]


def test_a_rung_that_changes_nothing_has_no_patch(rung):
    assert tried.patch(rung, find("02")) == "", "title and idea are no change"
    tried.record(hold(idea_of(rung), None))
    (row,) = tried.log_of(rung).read()[0].itertuples()
    assert (row.change, row.verdict) == ("nothing", "same code")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout of rungs 01 and 02, whose header online.cuh is not as it was committed."""
    root = tmp_path / "checkout"
    for rung in map(find, ("01", "02")):
        shutil.copytree(rung.directory, root / "versions" / "forward" / rung.directory.name)
    shutil.copytree(CUDA_HEADERS, root / "common" / "cuda")
    for command in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a")):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    for module in (tried, sources):
        monkeypatch.setattr(module, "CUDA_HEADERS", root / "common" / "cuda")
    monkeypatch.setattr(tried, "ROOT", root)
    header = root / "common" / "cuda" / "softmax" / "online.cuh"
    header.write_text(f"// not committed\n{header.read_text()}")
    return root / "versions"


@pytest.mark.git
def test_a_patch_leaves_out_what_else_is_not_committed(rung, checkout):
    ideas.save(rung, "longer")
    first, second = find("01", checkout), find("02", checkout)
    text = tried.patch(rung, second)
    assert "+        __syncthreads();\n" in text
    assert "not committed" not in text + tried.patch(second, first)
    assert tried.patch(second, second) == ""


@pytest.mark.git
def test_a_rung_that_is_not_committed_has_its_changes_of_headers_in_its_patch(checkout):
    first, second = find("01", checkout), find("02", checkout)
    second.kernel.write_text(f"{second.kernel.read_text()}// new\n")
    text = tried.patch(second, first)
    assert "+// new\n" in text
    assert "\n+// not committed\n" in text


@pytest.mark.git
def test_what_was_tried_is_made_again_of_its_patch(rung, tmp_path):
    ideas.save(rung, "longer")
    header = rung.directory / "softmax" / "online.cuh"
    header.parent.mkdir()
    header.write_text(f'#include "extra.cuh"\n{(CUDA_HEADERS / "softmax" / "online.cuh").read_text()}')
    (rung.directory / "extra.cuh").write_text("#pragma once\n")
    declared = rung.directory / "version.yaml"
    declared.write_text(declared.read_text().replace("block_n: {default: 64", "block_n: {default: 128"))
    kept = tmp_path / "kept.patch"
    kept.write_text(tried.patch(rung, find("02")))
    again = scaffold.make("again", "02", private=True, patch=kept)
    for path in filter(Path.is_file, rung.directory.rglob("*")):
        if path.suffix != ".md" and path != declared:
            assert (again.directory / path.relative_to(rung.directory)).read_bytes() == path.read_bytes()
    assert again.choices["block_n"].default == 128
    assert (again.title, again.parent) == ("Again", "02_swizzling")


MISFIT = "--- a/kernel.cu\n+++ b/kernel.cu\n@@ -1 +1 @@\n-nowhere\n+here\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("no patch at all\n", "is no patch: name a file of a rung's tried/"),
        pytest.param(MISFIT, "does not fit kernel.cu as it is now", marks=pytest.mark.git),
    ],
)
def test_a_patch_that_cannot_be_used_is_said_and_makes_nothing(rung, tmp_path, text, message):
    kept = tmp_path / "kept.patch"
    if text:
        kept.write_text(text)
    with pytest.raises(ConfigError, match=message):
        scaffold.make("again", "02", private=True, patch=kept)
    assert [path.name for path in rung.directory.parent.iterdir()] == [rung.directory.name]


def test_without_git_a_patch_is_refused_and_ideas_are_kept(rung, tmp_path, monkeypatch):
    (tmp_path / "kept.patch").write_text(MISFIT)
    ideas.save(rung, "longer")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"no git, .* `sudo apt-get install git`"):
        scaffold.make("again", "02", private=True, patch=tmp_path / "kept.patch")
    assert [path.name for path in rung.directory.parent.iterdir()] == [rung.directory.name]
    assert "-        __syncthreads();\n" in tried.patch(find("02"), rung)
    assert [finding.good for finding in machine.examine({"git": machine.OPTIONAL["git"]})] == [False]


def test_a_configuration_is_compared_with_the_default_one(rung, run):
    code, out, err = run("my_idea", "--against", "my_idea", "--config", "block_n=32")
    assert code == 0, err
    assert "mine/00 by default" in out
    (row,) = tried.log_of(rung).read()[0].itertuples()
    assert row.change == "block_n=32"
    assert ("block_n=32" in row.config, "block_n=64" in row.parent_config) == (True, True)


def test_an_idea_that_is_dropped_is_kept_with_the_other_rung(rung, run):
    other = scaffold.make("other", "02", private=True)
    ideas.save(rung, "longer")
    code, _, err = run("my_idea", "--against", "other", "--drop")
    assert code == 0, err
    assert not tried.log_of(rung).path.exists()
    (row,) = tried.log_of(other).read()[0].itertuples()
    assert (row.version, row.parent) == (rung.name, other.name)
    assert (other.directory / row.patch).exists()
    assert row.patch in (other.directory / documents.PAGE).read_text()


def test_a_kernel_in_another_encoding_has_a_patch(rung):
    rung.kernel.write_bytes(rung.kernel.read_bytes() + b"// caf\xe9\n")
    assert "+// caf\ufffd\n" in tried.patch(rung, find("02"))


def test_the_tool_gives_a_verdict_and_keeps_it(rung, run):
    ideas.save(rung, "longer")
    code, out, err = run("my_idea", "--against", "02")
    assert code == 0, err
    assert "barriers in the loop" in out
    assert "mine/00: predicted, not measured: " in out
    assert len(tried.log_of(rung).read()[0]) == 1
    assert run("my_idea", "--against", "02", "--no-log")[0] == 0
    assert len(tried.log_of(rung).read()[0]) == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("no kernel", 'kernel.cu(60): error: expected a ";"'),
        ("racing", "race on shared memory"),
        ("wrong", "mine/00_my_idea at batch=1,num_heads=1,seqlen_q=64,seqlen_k=256"),
    ],
)
def test_an_idea_that_does_not_work_is_said_and_not_kept(rung, run, edit, message):
    ideas.save(rung, edit)
    code, _, err = run("my_idea", "--against", "02")
    assert code == console.EXIT_ERROR
    assert message.split("(60)")[0] in err
    assert message.split("error: ")[-1] in err
    assert not (rung.directory / "tried.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("my_idea", "--against", "77"), "no version 77; there are"),
        (("my_idea", "--against", "my_idea"), "mine/00_my_idea would be compared with itself: name another rung"),
        (("my_idea", "--against", "my_idea", "--config", "block_n=64"), "would be compared with itself: name another"),
        (("my_idea", "--drop"), "--drop keeps a verdict with the rung compared with: add --against RUNG"),
        (("triton", "--against", "24"), "triton is a reference: --watch and --against are for rungs, such as 24"),
        (("00", "--watch"), "00_minimal has no rung below: say what to compare it with, --against RUNG"),
        (("my_idea", "--against", "02", "--head-dim", "80"), "takes head_dim"),
    ],
)
def test_what_cannot_be_compared_is_said(rung, run, arguments, message):
    code, _, err = run(*arguments)
    assert code == console.EXIT_ERROR
    assert message in err
