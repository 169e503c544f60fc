"""Ladders outside this repository: found by every tool, with headers, results and winners of their own."""

import csv

import pytest

from flashladder.common import catalog, console, own
from flashladder.common.catalog import find, winners
from flashladder.common.compiler import build_one
from flashladder.common.errors import ConfigError
from flashladder.common.paths import ROOT, VERSIONS
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.workshop import exercises, scaffold
from flashladder.tests.support.tiny_ladder import make_rung
from flashladder.tools.commands import run_version
from flashladder.tuner import trial_log
from flashladder.tuner.job import Job, SearchSettings
from flashladder.tuner.space import Space

pytestmark = pytest.mark.slow

KIND = "dtype=bf16,head_dim=128,causal=false"


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """What --versions adds is forgotten after the test."""
    monkeypatch.setenv(own.VARIABLE, "")
    monkeypatch.delenv("FLASHLADDER_RESULTS", raising=False)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A ladder with rung 07 under another name."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setenv(own.VARIABLE, str(folder))
    scaffold.make("my_idea", "07", private=True)
    return folder


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = console.run(run_version.main, run_version.parser(), arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_an_own_ladder_is_one_more(mine):
    assert {"forward", "experiments", "mine"} <= set(catalog.ladders())
    rung = find("my_idea")
    assert rung == find("mine/00") == find("mine/my_idea")
    assert (rung.name, rung.address, rung.file_name) == ("mine/00_my_idea", "mine/00", "mine-00_my_idea")
    assert (rung.home, rung.root, find("07").home) == (mine, VERSIONS, None)
    assert catalog.select(["mine"]) == [rung]


def test_it_is_found_by_the_option_too(mine, monkeypatch, run):
    monkeypatch.setenv(own.VARIABLE, "")
    with pytest.raises(ConfigError, match="no version my_idea"):
        find("my_idea")
    code, out, _ = run("--list", "--versions", str(mine))
    assert code == 0
    assert "mine/00_my_idea" in out
    assert find("my_idea").home == mine, "processes that this one starts find it too"


def test_a_ladder_that_cannot_be_read_hides_no_exercise(mine, capsys):
    (mine / "00_my_idea" / "version.yaml").write_text("title: [")
    catalog.forget()
    assert "02" in {exercise.version.number for exercise in exercises.exercises()}
    assert "the ladder mine cannot be read" in capsys.readouterr().err


def test_its_headers_are_beside_it(mine):
    rung = find("my_idea")
    rung.kernel.write_text('#include "ours.cuh"\n' + rung.kernel.read_text())
    header = mine / "cuda" / "ours.cuh"
    header.parent.mkdir()
    header.write_text("#pragma once\nconstexpr int ours = 1;\n")
    first = build_one(rung, rung.config(), "sm_80")
    header.write_text("#pragma once\nconstexpr int ours = 2;\n")
    assert build_one(rung, rung.config(), "sm_80").key != first.key, "an edit of it builds the kernel anew"


def test_a_header_of_its_own_goes_before_one_of_this_repository(tmp_path):
    rung = make_rung(tmp_path)
    header = rung.directory.parent / "cuda" / "params.cuh"
    header.parent.mkdir()
    header.write_text("#error not this one\n")
    with pytest.raises(Exception, match="not this one"):
        build_one(rung, rung.config(), "sm_80")


def test_a_header_in_its_own_folder_goes_before_all_others_also_for_headers(tmp_path):
    rung = make_rung(tmp_path, helper='#include "ptx/sm80.cuh"\n')
    replaced = rung.directory / "ptx" / "sm80.cuh"
    replaced.parent.mkdir()
    replaced.write_text("#error not this one\n")
    with pytest.raises(Exception, match="not this one"):
        build_one(rung, rung.config(), "sm_80")


def test_its_results_are_beside_it(mine, run, monkeypatch, tmp_path):
    code, _, err = run("my_idea", "--heads", "1", "--seqlen", "128", "--device", "emulator")
    assert code == 0, err
    (row,) = csv.DictReader((mine / "results" / "runs.csv").open())
    assert (row["version"], row["passed"]) == ("mine/00_my_idea", "true")
    assert catalog.results_of([find("02"), find("my_idea")]) == mine / "results"
    assert catalog.results_of([find("02")]) == ROOT / "results"
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "elsewhere"))
    assert catalog.results_of([find("my_idea")]) == tmp_path / "elsewhere"


def test_its_winners_and_studies_are_beside_it(mine):
    rung, problem = find("my_idea"), Problem()
    path = winners.save("h100", rung.name, KIND, {"block_n": 64}, {}, rung.home)
    assert path == mine / "tuned" / "h100.yaml"
    assert winners.config(rung, "h100", problem).block_n == 64
    assert rung.name in {winner.version for winner in winners.every()}
    assert rung.name not in {winner.version for winner in winners.of_gpu("h100")}
    job = Job(Space.of(rung, (problem,)), load_gpu("h100"), SearchSettings())
    assert job.storage == f"sqlite:///{mine / 'results' / 'tuning' / 'studies.db'}"
    assert trial_log.path_of(job.study, job.folder).parent == mine / "results" / "tuning"


def test_words_that_two_ladders_have_need_the_ladder(mine, tmp_path, monkeypatch):
    other = tmp_path / "other"
    (other / "00_my_idea").mkdir(parents=True)
    (other / "00_my_idea" / "version.yaml").write_text("title: X\n")
    monkeypatch.setenv(own.VARIABLE, f"{mine}:{other}")
    with pytest.raises(ConfigError, match="several rungs, mine/00_my_idea, other/00_my_idea: put the ladder's name"):
        find("my_idea")
    assert find("mine/my_idea").home == mine


def test_a_broken_declaration_hides_no_other_rung(mine, run):
    declared = find("my_idea").directory / "version.yaml"
    declared.write_text(declared.read_text().replace("instruction_set: ampere", "instruction_set: turing"))
    catalog.forget()
    code, out, err = run("--list")
    assert code == console.EXIT_ERROR
    assert "24_woven_general" in out
    assert "py_fa2" in out
    told = f"the ladder mine cannot be shown: {declared}: instruction_set=turing is not one of ampere, hopper"
    assert told in err
    assert find("02").name == "02_swizzling"
    assert run("my_idea")[2].startswith(f"error: {declared}: instruction_set=turing")


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("gone", r"gone, which FLASHLADDER_VERSIONS or --versions names, is no folder: make it, or name another"),
        ("9lives", r"9lives: a ladder is called as its folder, by letters, digits and _, a letter first"),
        (
            "triton",
            r"triton would be the ladder triton, but .*versions/references/triton is called so: rename the folder",
        ),
        ("again/mine", r"again/mine would be the ladder mine, but .*mine is called so: rename the folder"),
    ],
)
def test_a_folder_that_can_be_no_ladder_is_said(mine, tmp_path, monkeypatch, folder, message):
    if folder != "gone":
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv(own.VARIABLE, f"{mine}:{tmp_path / folder}")
    with pytest.raises(ConfigError, match=message):
        find("02")
