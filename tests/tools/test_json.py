"""`--json`: one answer of the documented schema, whatever a kernel does; and the page that documents it."""

import json
import re

import pytest

from flashladder.common import catalog, own
from flashladder.common.emulator.parse import ptx
from flashladder.common.paths import ROOT
from flashladder.common.report.answer import Answer
from flashladder.common.report.pages import programs
from flashladder.tests.support import fake_gpu
from flashladder.tools import commands

SMALL = ["--seqlen", "64", "--heads", "1", "--no-log"]


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))


@pytest.fixture
def tell(capsys):
    """The exit code and the answer of a command; nothing else goes to stdout."""

    def call(*words):
        code = commands.main([*words, "--json"])
        return code, Answer.model_validate_json(capsys.readouterr().out)

    return call


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """Makes a rung of one's own of rung 02's kernel with a change, and gives its address."""
    rung = catalog.find("02")

    def make(old, new):
        text = rung.kernel.read_text()
        assert old in text
        folder = tmp_path / "mine" / "00_idea"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version.yaml").write_text((rung.directory / "version.yaml").read_text())
        (folder / "kernel.cu").write_text(text.replace(old, new))
        monkeypatch.setenv(own.VARIABLE, str(tmp_path / "mine"))
        return "mine/00"

    return make


def test_a_run_without_a_gpu(tell):
    code, answer = tell("run", "02", *SMALL)
    (kernel,) = answer.kernels
    assert (code, answer.right, answer.reason, answer.faults) == (0, True, "", ())
    assert kernel.right
    assert kernel.config["block_m"] == 64
    assert kernel.spill_bytes == 0
    assert kernel.time.basis == "predicted"
    assert 0 < kernel.time.low < kernel.time.high
    assert "seed=" in kernel.problem, "inputs that a kernel cannot know"
    assert kernel.problem != tell("run", "02", *SMALL)[1].kernels[0].problem


def test_a_race_has_the_lines_of_both_accesses(tell, broken):
    code, answer = tell("run", broken("__syncthreads();", ""), *SMALL)
    assert (code, answer.right) == (2, False)
    assert answer.faults[0].kind == "race"
    assert "race on shared memory" in answer.reason
    lines = (catalog.find("02").kernel.read_text()).splitlines()
    assert len(answer.faults[0].places) == 2
    for place in answer.faults[0].places:
        assert place.file == "kernel.cu"
        assert 1 <= place.line <= len(lines)


def test_a_wrong_output_and_what_does_not_compile(tell, broken):
    code, answer = tell("run", broken("params.softmax_scale", "2 * params.softmax_scale"), *SMALL)
    assert (code, answer.faults[0].kind, answer.kernels[0].right) == (2, "output", False)
    code, answer = tell("run", broken("params.softmax_scale", "params.no_such_field"), *SMALL)
    assert (code, answer.faults[0].kind) == (2, "build")
    code, answer = tell("run", "02", "--config", "block_m=63")
    assert (code, answer.faults[0].kind) == (2, "refused")


def test_a_bench_has_times_and_ratios_with_intervals(tell, monkeypatch):
    fake_gpu.install(monkeypatch)
    code, answer = tell("bench", "02", "--seqlens", "64", "--tokens", "64", "--heads", "1", "--rounds", "6", "--no-log")
    ours, theirs = answer.kernels
    assert (code, answer.right) == (0, True)
    assert (ours.name, theirs.name, ours.time.basis, ours.ratio.to) == ("02", "fa2", "measured", "fa2")
    assert ours.time.low <= ours.time.value <= ours.time.high
    assert (ours.ratio.verdict, theirs.ratio) == ("faster", None)


def test_explain_names_limits_and_ideas(tell):
    (kernel,) = tell("explain", "01", "--predict")[1].kernels
    assert kernel.right is None
    assert kernel.limits[0].name == "bank_conflicts"
    assert kernel.limits[0].places[0].file == "kernel.cu"
    assert "02" in kernel.limits[0].ideas


@pytest.mark.slow
def test_a_ranking_comes_best_first(tell):
    _, answer = tell("search", "02", "--gpu", "a100", "--offline", "--compile", "2", "--budget-seconds", "1")
    times = [kernel.time.value for kernel in answer.kernels]
    assert times == sorted(times)
    assert {kernel.time.basis for kernel in answer.kernels} == {"predicted"}


@pytest.mark.slow
def test_an_accuracy_study_has_each_family(tell):
    found = tell(
        "accuracy", "16", "--families", "plateau_4", "--dtypes", "bf16", "--seqlens", "128", "--no-log", "--no-time"
    )
    ours = next(kernel for kernel in found[1].kernels if kernel.name == "16")
    assert [(each.family, each.keys) for each in ours.errors] == [("plateau_4", 128)]


@pytest.mark.slow
def test_rows_that_see_no_key_are_told(tell):
    code, answer = tell("run", "51", "--mask", "k < q", "--seqlen", "64", "--head-dim", "64")
    (kernel,) = answer.kernels
    assert (code, answer.right, kernel.right, kernel.unseeing) == (0, True, True, 2)


@pytest.mark.slow
def test_a_grade(tell, tmp_path):
    (tmp_path / "kernel.cu").write_text(catalog.find("01").kernel.read_text())
    code, answer = tell("exercise", "02", "--check", "--folder", str(tmp_path))
    (kernel,) = answer.kernels
    assert (code, answer.right, kernel.right) == (1, True, True)
    assert kernel.goal.own == kernel.goal.start > kernel.goal.bound
    assert not kernel.goal.reached


def test_what_makes_no_answer_is_refused(tell):
    assert "--watch" in tell("run", "02", "--watch")[1].reason
    assert "--check" in tell("exercise", "02")[1].reason


def test_lines_are_read_back_from_a_report():
    chain = (("/a/load.cuh", 24), ("/b/kernel.cu", 40))
    report = (
        f"race: who\n  warp 0, at {ptx.format_chain(chain)}: `ld.shared`\n  at PTX line 3: `st`\n  at kernel.cu:7: `x`"
    )
    assert ptx.described_chains(report) == [(("load.cuh", 24), ("kernel.cu", 40)), (("kernel.cu", 7),)]


def test_the_page_has_the_schema_and_names_tests_that_exist():
    assert programs.section().is_current(), "`flashladder dashboard` brings it up to date"
    parts = {part.__name__ for part in (*programs.PARTS, *programs.OF_COMMANDS)}
    assert parts - {"Answer"} == set(json.loads(json.dumps(Answer.model_json_schema()))["$defs"])
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    rows = re.findall(r"^\| It .*\| (`.*) \|$", programs.PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 13
    for row in rows:
        for name in re.findall(r"`(\w+)`", row):
            assert f"def {name}(" in tests, name
