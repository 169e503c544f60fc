"""Two logged runs side by side: what differs, each run's own ratios, and no figure of one divided by the other's."""

import shutil

import pytest

from flashladder.common import console
from flashladder.common.paths import PUBLISHED, results_dir
from flashladder.common.records import comparison, records
from flashladder.common.records.log import Log
from flashladder.tools.commands import compare

FIRST, SECOND = "20261122-163955-1610", "20261125-030243-629"
ROW = {
    "run": "mine",
    "version": "16_static_stride",
    "config": "block_m=64,num_warps=4",
    "code": "a",
    "batch": 4,
    "num_heads": 16,
    "num_heads_k": 16,
    "seqlen_q": 4096,
    "seqlen_k": 4096,
    "head_dim": 128,
    "dtype": "bf16",
    "causal": False,
    "device": "a card",
    "commit": "c0ffee",
    "time_us": 100.0,
    "baseline": "fa2",
    "baseline_us": 110.0,
    "ratio": 1.1,
    "ratio_low": 1.05,
    "ratio_high": 1.15,
}


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = console.run(compare.main, compare.parser(), list(map(str, arguments)))
        captured = capsys.readouterr()
        return code, " ".join(captured.out.split()), " ".join(captured.err.split())

    return call


def log(name, *rows):
    """A log of several runs, as they were before each had its file."""
    path = results_dir() / f"{name}.csv"
    Log(path, records.BENCH).append([ROW | row for row in rows])
    return path


def test_two_runs_of_a_ladder(run, results):
    for name in (FIRST, SECOND):
        made = results / "runs" / f"ladder_h200@{name}.csv.gz"
        made.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PUBLISHED / "runs" / made.name, made)
    code, out, err = run(FIRST, SECOND, "--all")
    assert code == 0, err
    assert "card's id 56d447d2a9c2 b08b82d1fb2e" in out
    assert "commit 6abc4587419a 092918a77d51" in out
    assert "alike: card NVIDIA H200" in out
    assert "16_static_stride own, bf16 6 1.068 (1.064-1.070) 1.070 (1.066-1.074) other code" in out
    assert "17_lazy_rescale own, bf16 6 1.114 (1.109-1.119) 1.120 (1.118-1.123) other code" in out
    assert "Two runs are not divided by each other" in out


def test_kernels_that_do_not_differ_are_left_out(run):
    log("one", {}, {"version": "09_fewer_moves"})
    log("other", {"run": "theirs"}, {"run": "theirs", "version": "09_fewer_moves", "code": "b"})
    _, out, _ = run("mine", "theirs")
    assert "09_fewer_moves, bf16 1 1.100 (1.050-1.150) 1.100 (1.050-1.150) other code" in out
    assert "16_static_stride" not in out
    assert "1 of 2 kernels do not differ: --all shows them" in out


def test_no_figure_is_of_both_runs(run):
    """1.1 / 1.32 and 1.32 / 1.1, and what would come of the times."""
    log("one", {})
    log("other", {"run": "theirs", "ratio": 1.32, "ratio_low": 1.3, "ratio_high": 1.34, "time_us": 50.0})
    _, out, _ = run("mine", "theirs")
    assert "1.100 (1.050-1.150) 1.320 (1.300-1.340)" in out
    for quotient in ("0.83", "1.20", "0.5", "2.0", "-17", "+20"):
        assert quotient not in out


def test_configurations_and_code_that_differ(run):
    log("one", {})
    log("other", {"run": "theirs", "config": "block_m=128,num_warps=4", "code": "b", "commit": "decade"})
    _, out, _ = run("mine", "theirs")
    assert "commit c0ffee decade" in out
    assert "other code; block_m=64 | block_m=128" in out


def test_a_kernel_in_several_configurations_is_several(results):
    both = {"config": "block_m=64,num_warps=4"}, {"config": "block_m=128,num_warps=4", "ratio": 1.12}
    log("one", *both)
    log("other", *({"run": "theirs", **row} for row in reversed(both)))
    compared = comparison.compare(comparison.load("mine", results), comparison.load("theirs", results))
    assert [each.configs for each in compared] == [(row["config"],) * 2 for row in both]
    assert [each.ratios[0][0] for each in compared] == pytest.approx([1.1, 1.12])
    assert all(each.ratios[0] == each.ratios[1] for each in compared)


@pytest.mark.parametrize("bounds", [{"window_left": 4}, {"window_right": 0}, {"softcap": 30.0}])
def test_windows_and_softcaps_are_compared_with_their_like(run, bounds):
    log("one", {})
    log("other", {"run": "theirs", **bounds})
    code, _, err = run("mine", "theirs")
    assert (code, "timed no kernel at the same shape" in err) == (console.EXIT_ERROR, True)
    log("third", {"run": "again", **bounds}, {"run": "plain", "softcap": 0.0})
    assert "1.100 (1.050-1.150) 1.100 (1.050-1.150)" in run("again", "theirs", "--all")[1]
    assert "1.100 (1.050-1.150) 1.100 (1.050-1.150)" in run("mine", "plain", "--all")[1]


def test_only_shapes_that_both_have_count(run):
    log("one", {}, {"seqlen_q": 8192, "seqlen_k": 8192, "ratio": 1.9, "ratio_high": 2.0}, {"version": "09_fewer_moves"})
    log("other", {"run": "theirs"}, {"run": "theirs", "version": "cudnn", "config": ""})
    _, out, _ = run("mine", "theirs", "--all")
    assert "16_static_stride, bf16 1 1.100 (1.050-1.150) 1.100" in out
    assert "only in mine: 09_fewer_moves" in out
    assert "only in theirs: cudnn" in out


def test_a_file_is_as_good_as_a_name(run, results):
    log("one", {})
    other = log("other", {"run": "theirs"}, {"run": "a third", "ratio": 1.11})
    for what in (f"{other}:theirs", "theirs"):
        code, out, err = run(results / "one.csv", what)
        assert code == 0, err
        assert "What differs mine theirs" in out


def test_results_without_a_benchmark(run, results):
    """As docs/measuring.md has the commands: a run, and then a look at two of them."""
    code, _, err = run("mine", "theirs")
    assert code == console.EXIT_ERROR
    assert f"no run in the logs of {results} is a benchmark. Ratios to a baseline are compared, which" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mine", "mine"), "mine would be compared with itself"),
        (("mine", "thiers"), "is called thiers; did you mean theirs? There are elsewhere, failed, mine, theirs"),
        (("mine", "nowhere.csv"), "nowhere.csv is not there"),
        (("mine", "{results}/other.csv"), "other.csv has several runs, theirs, failed, elsewhere: name one, as"),
        (("mine", "{results}/other.csv:them"), "other.csv is called them; did you mean theirs? There are theirs"),
        (
            ("mine", "{results}/text.csv"),
            "text.csv is no log of a benchmark. Ratios to a baseline are compared, which bench, ",
        ),
        (("mine", "a check"), "the run a check in {results}/text.csv is no benchmark. Ratios to a baseline"),
        (("24", "general"), "24 23: rungs, not runs; `flashladder bench 24 23` times both in one run"),
        (("mine", "failed"), "the run failed in {results}/other.csv has no ratios to a baseline"),
        (("mine", "elsewhere"), "mine and elsewhere timed no kernel at the same shape"),
    ],
)
def test_bad_input(run, results, arguments, message):
    log("one", {})
    failed = {"run": "failed", "ratio": None, "time_us": None}
    log("other", {"run": "theirs"}, failed, {"run": "elsewhere", "seqlen_q": 512})
    (results / "text.csv").write_text("run,error\na check,2\n")
    code, _, err = run(*(each.format(results=results) for each in arguments))
    assert code == console.EXIT_ERROR
    assert message.format(results=results) in err


def test_a_damaged_line_is_named_and_left_out(run):
    path = log("one", {})
    log("other", {"run": "theirs"})
    path.write_text(path.read_text() + "mine,half a row\n")
    code, out, err = run("mine", "theirs", "--all")
    assert code == 0
    assert "one.csv:3" in err
    assert "1.100 (1.050-1.150)" in out
