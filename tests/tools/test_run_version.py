"""`flashladder run` as a person types it: on the emulator from end to end, and what it says to bad input."""

import dataclasses
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from flashladder.common import catalog, console
from flashladder.common.catalog import winners
from flashladder.common.errors import ToolchainError
from flashladder.common.paths import ROOT
from flashladder.common.records import records
from flashladder.common.runtime import launch
from flashladder.tests.support import fake_gpu, interruptible
from flashladder.tools.commands import arguments, explain, run_version

TOOL = ROOT / "tools" / "run_version.py"


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    return tmp_path


def figure(out, name):
    return next(line for line in out.splitlines() if line.strip().startswith(name))


def test_what_was_tuned_for_the_gpu_is_picked_up(run):
    winners.save("a100", "02_swizzling", "dtype=bf16,head_dim=128,causal=false", {"block_n": 32, "num_warps": 4}, {})
    _, out, _ = run("02", "--gpu", "a100")
    assert "block_n=32" in figure(out, "configuration")
    assert figure(out, "tuned").split()[1:4] == ["by", "`flashladder", "search`,"]
    _, out, _ = run("02", "--gpu", "a800")
    assert "for a100, the nearest to a800 that has winners" in " ".join(out.split())
    for without in (["--untuned"], ["--config", "num_warps=4"], ["--dtype", "fp16"], ["--gpu", "h100"]):
        _, out, _ = run("02", "--gpu", "a100", *without)
        assert "block_n=64" in figure(out, "configuration"), without
        assert "flashladder search" not in out


@pytest.mark.parametrize("ladder", ["decode", "mla", "serving"])
def test_each_rung_takes_the_problem_that_it_is_given_where_nobody_says(ladder):
    """With the options that it needs, and rows of each sequence."""
    asked = run_version.parser().parse_args([])
    for rung in catalog.versions(ladder=ladder):
        for size in ("small", "usual"):
            problem = arguments.problem(asked, rung.operation, size, options=arguments.needed(rung))
            assert rung.takes(problem), rung.name
            assert problem.flops or rung.operation in ("append", "merge")


def test_options_that_a_rung_needs_may_be_given(run):
    code, _, err = run("decode/15", "--set", "packed_q=false")
    assert code
    assert "packed_q=false is not one of true" in err


def test_what_multiplies_nothing_is_run_and_what_gives_nothing_is_refused(run):
    code, out, _ = run("serving/00")
    assert code == 0
    assert figure(out, "mma FLOPs").split() == ["mma", "FLOPs", "0"]
    code, _, err = run("serving/01")
    assert code
    assert "the operation append has no output: it writes to k_cache, v_cache" in " ".join(err.split())


def test_what_goes_through_no_keys_has_no_limits(capsys):
    for rung in ("serving/00", "serving/01"):
        assert console.run(explain.main, explain.parser(), [rung]) == console.EXIT_ERROR
        assert "has no loop over K and V" in capsys.readouterr().err


def test_a_winner_that_does_not_take_the_problem_is_left_aside(run):
    winners.save("a100", "02_swizzling", "dtype=bf16,head_dim=128,causal=false", {"block_n": 128}, {})
    code, out, _ = run("02", "--gpu", "a100", "--seqlen", "64")
    assert code == 0
    assert "block_n=64" in figure(out, "configuration")


def cpu_seconds():
    """What finished processes of this one have used: unlike time on the clock, the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_from_a_cold_cache_on_the_emulator(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, TOOL, "02", "--device", "emulator"]
    begin = cpu_seconds()
    cold = subprocess.run(command, capture_output=True, text=True, check=True)
    middle = cpu_seconds()
    warm = subprocess.run(command, capture_output=True, text=True, check=True)
    assert cpu_seconds() - middle < 10  # 2.5 s on an idle machine
    assert middle - begin < 25  # 4 s on an idle machine
    assert "PASS" in cold.stdout
    assert "from the cache" in warm.stdout


def test_swizzling_removes_the_conflicts_of_the_base(run):
    _, base, _ = run("01", "--seqlen", "64", "--heads", "1")
    code, swizzled, _ = run("02", "--seqlen", "64", "--heads", "1")
    assert code == 0
    assert "8.00x" in base
    assert "8.00x" not in swizzled
    assert "(1.00x)" in figure(swizzled, "shared-memory wavefronts")
    assert "(1.00 of the problem's)" in figure(swizzled, "mma FLOPs")


def test_it_says_what_matters_and_the_rest_on_demand(run):
    """A first run leaves room for the lines of `make run` below 30."""
    small = ("02", "--seqlen", "64", "--heads", "1")
    code, short, _ = run(*small)
    assert code == 0
    assert len(short.splitlines()) < 27
    assert "Lines with bank conflicts" not in short
    assert "Lines with bank conflicts" in run("01", *small[1:])[1]
    _, long, _ = run(*small, "--verbose")
    for words in ("Shared memory, line by line", "warp instructions", "global bytes"):
        assert words in long
        assert words not in short


def test_without_a_gpu_its_time_is_predicted_and_called_that(run, monkeypatch):
    """Of the problem that the same command would time there."""
    predicted = {}
    for name, gpu in (("02", "h100"), ("02", "a100"), ("01", "h100")):
        _, out, _ = run(name, "--gpu", gpu, "--untuned")
        words = " ".join(out.split())
        assert "by the cost model: nothing was timed; batch=4, num_heads=16, seqlen_q=4096, head_dim=128" in words
        predicted[name, gpu] = int(re.search(r"predicted ([\d,]+) us on NVIDIA [AH]100", words)[1].replace(",", ""))
    assert predicted["02", "h100"] < predicted["02", "a100"] < predicted["01", "h100"]
    _, out, _ = run("02", "--seqlen", "64", "--batch", "2", "--heads", "1")
    assert "batch=2, num_heads=1, seqlen_q=64" in " ".join(out.split())
    assert "predicted" not in run("02", "--no-measure", "--seqlen", "64", "--heads", "1")[1]


def test_what_cannot_be_predicted_is_no_failure(run, monkeypatch):
    def without(*_):
        raise ToolchainError("no nvdisasm")

    monkeypatch.setattr("flashladder.common.predict.cost.sass.read", without)
    monkeypatch.setattr("flashladder.common.predict.cost.digest", lambda *_: "of no cache")
    code, out, _ = run("02", "--seqlen", "64", "--heads", "1")
    assert code == 0
    assert figure(out, "predicted").split(maxsplit=1)[1].strip() == "nothing: no nvdisasm"
    assert "PASS" in out


def test_a_row_is_logged(run, results):
    assert run("02", "--seqlen", "128", "--heads", "1", "--config", "block_n=32", "num_warps=4")[0] == 0
    assert run("02", "--seqlen", "64", "--heads", "1", "--no-log")[0] == 0
    frame, damaged = records.runs().read()
    assert (len(frame), damaged) == (1, [])
    row = frame.iloc[0]
    assert row["version"] == "02_swizzling"
    assert "block_n=32" in row["config"]
    assert (row["device"], row["arch"], row["seqlen_k"], row["passed"]) == ("emulator", "sm_90a", 128, True)
    assert row["max_error"] <= row["tolerance"]
    assert row["shared_wavefronts"] == row["shared_wavefronts_ideal"] > 0
    assert row["torch"]
    assert row["toolkit"]


@pytest.mark.slow
def test_without_the_log_sum_exp(run):
    small = ("--seqlen", "64", "--heads", "1")
    for version, words in (("24", "lse=false"), ("02", "")):
        code, out, err = run(version, *small, "--no-lse")
        assert code == 0, err
        assert words in figure(out, "configuration")
        assert "of lse" not in figure(out, "check")
    assert "of lse" in figure(run("02", *small)[1], "check")
    frame, _ = records.runs().read()
    assert list(frame["lse"]) == [False, False, True]
    assert list(frame["lse_error"].gt(0)) == [False, False, True]


@pytest.mark.parametrize("layout", ["bhsd", "padded", "qkv"])
def test_other_layouts(run, layout):
    code, out, err = run("02", "--seqlen", "64", "--heads", "2", "--layout", layout, "--dtype", "fp16", "--no-log")
    assert code == 0, err
    assert f"layout={layout}" in out


def test_a_wrong_output_fails_and_is_logged(run, monkeypatch):
    monkeypatch.setattr("flashladder.common.runtime.execute.Launcher", _WithAnotherScale)
    code, out, err = run("02", "--seqlen", "64", "--heads", "1")
    assert code == console.EXIT_ERROR
    assert "FAIL" in out
    assert "error: 02_swizzling with dtype=bf16" in err
    assert "tolerance" in err
    assert not records.runs().read()[0]["passed"][0]


class _WithAnotherScale(launch.Launcher):
    def launches(self, problem, *rest):
        return super().launches(dataclasses.replace(problem, softmax_scale=2 * problem.softmax_scale), *rest)


def test_on_a_gpu_it_is_timed_beside_the_official_kernel(run, monkeypatch):
    fake_gpu.install(monkeypatch)
    code, out, err = run("02", "--seqlen", "64", "--heads", "1", "--batch", "1", "--rounds", "6")
    assert code == 0, err
    assert "FlashAttention-2 (torch)" in out
    assert "faster" in figure(out, "02_swizzling  ")
    row = records.runs().read()[0].iloc[0]
    assert (row["device"], row["baseline"], row["verdict"]) == (fake_gpu.NAME, "fa2", "faster")
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    code, out, _ = run("02", "--seqlen", "64", "--heads", "1", "--batch", "1", "--no-measure")
    assert code == 0
    assert "TFLOP/s" not in out


def test_the_ladder_is_listed_a_line_a_rung(run):
    code, out, _ = run("--list")
    assert code == 0
    assert out.index("00_minimal ") < out.index("01_base ") < out.index("50_scores_apart ") < out.index("triton ")
    rungs = [rung for ladder in catalog.ladders() for rung in catalog.versions(ladder=ladder)]
    assert len(out.splitlines()) < len(rungs) + len(catalog.references()) + 6 * len(catalog.ladders()) + 6
    code, out, _ = run("--list", "experiments")
    assert (code, "experiments/00_fa1_order" in out, "02_swizzling" in out) == (0, True, False)


def test_one_is_told_at_length(run):
    code, out, _ = run("--list", "27")
    assert code == 0
    assert figure(out, "needs").split() == ["needs", "sm_90a"]
    assert "block_n: 128, or 64" in out
    assert figure(run("--list", "py_fa2")[1], "runs on").split() == ["runs", "on", "cpu,", "gpu"]


def test_a_name_that_is_like_none_lists_no_dozens(run):
    _, _, err = run("99")
    last = catalog.versions(ladder="forward")[-1].name
    assert err.startswith(f"error: no version 99; there are 00_minimal to {last}, c, ")
    assert len(err) < 220


def test_results_that_cannot_be_written_are_no_dead_end(run, results):
    (results / "runs.csv").mkdir()
    code, out, err = run("02", "--seqlen", "64", "--heads", "1", "--no-measure")
    assert (code, "PASS" in out) == (console.EXIT_ERROR, True)
    assert "FLASHLADDER_RESULTS" in err
    assert "--no-log" in err


def test_without_arguments_it_says_how_to_use_it(run):
    code, out, _ = run()
    assert code == console.EXIT_ERROR
    assert "usage: " in out
    assert "flashladder run --list" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99"], "99"),
        (["02", "--config", "block_m=65"], "block_m=65 is not one of 64, 128"),
        (["02", "--config", "colour=red"], "unknown field colour; the fields are dtype"),
        (["02", "--config", "block_m"], "'block_m' is not field=value"),
        (["02", "--config", "num_warps=8"], "block_m % (16 * num_warps) == 0"),
        (["02", "--seqlen", "100"], "of block_m=64, not 100; the nearest rung that takes the problem is 23_general"),
        (["02", "--seqlen", "0"], "seqlen_q=0: must be at least 1"),
        (["02", "--head-dim", "96"], "head_dim"),
        (["02", "--causal"], "has no causal mask"),
        (["24", "--no-lse", "--config", "lse=true"], "is configured for lse=true, but the problem has lse=false"),
        (["24", "--config", "lse=false"], "is configured for lse=false, but the problem has lse=true"),
        (["02", "--heads", "4", "--heads-k", "3"], "num_heads=4 must be a multiple of num_heads_k=3"),
        (["02", "--heads", "4", "--heads-k", "2"], "needs as many K/V heads as Q heads, not 4 and 2"),
        (["02", "--layout", "sbhd"], "layout=sbhd: must be one of bshd, bhsd, padded, qkv"),
        (["02", "--gpu", "h900"], "no description of the GPU h900; did you mean h800? There are a100"),
    ],
)
def test_bad_input_is_one_message(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == console.EXIT_ERROR
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in out + err


def test_traceback_on_demand(run):
    _, _, err = run("02", "--layout", "sbhd", "--traceback")
    assert "Traceback" in err


def test_no_gpu_is_said_so(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code = console.run(run_version.main, run_version.parser(), ["02", "--device", "gpu"])
    assert code == console.EXIT_ERROR
    assert re.match(
        "error: (there is no NVIDIA driver|there is an NVIDIA driver, but|torch .* without CUDA)",
        capsys.readouterr().err,
    )


# An interrupt amid an import of torch may be lost there, so that comes first.
RUN_AND_SAY_SO = """
import sys
from flashladder.common import catalog, console
from flashladder.common.runtime import execute
from flashladder.tools.commands import run_version
print("running", flush=True)
sys.exit(console.run(run_version.main, run_version.parser()))
"""


def test_interrupting_is_clean():
    command = [sys.executable, "-c", RUN_AND_SAY_SO, "02", "--device", "emulator", "--seqlen", "8192"]
    process = interruptible.start(command)
    assert process.stdout.readline() == "running\n"
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == console.EXIT_INTERRUPTED
    assert "interrupted" in err
    assert "Traceback" not in err


def test_expressions_are_for_a_rung_on_the_emulator(run):
    for words, said in (
        (["24", "--mask", "k <= q"], "24_woven_general takes no mask and no score by an expression"),
        (["51", "--tensor", "far=1"], "give a mask, a score, or both"),
        (["51", "--mask", "k <= q", "--tensor", "far"], "far is no tensor"),
        (["51", "--mask", "far[q] > k", "--tensor", "far=ones:9:int32"], "its index is 9"),
        (["51", "--mask", "k <= q", "--against", "24"], "without --watch and --against"),
        (["triton", "--mask", "k <= q"], "are for a run of a rung"),
        (["51", "--mask", "k <= q", "--device", "gpu"], "leave out --device gpu"),
    ):
        code, _, errors = run(*words)
        assert code == console.EXIT_ERROR
        assert said in " ".join(errors.split())


@pytest.mark.slow
def test_a_mask_is_checked(run, results):
    """Nothing is logged: the check is of the mask, not of the rung."""
    words = ["51", "--mask", "k <= q - far", "--tensor", "far=3", "--seqlen", "64", "--head-dim", "64"]
    code, out, _ = run(*words)
    assert code == 0
    assert "PASS" in figure(out, "check")
    assert "6 of 128 see no key: q=0 to 2 at every h" in figure(out, "rows")
    assert not list(results.iterdir())


@pytest.mark.slow
def test_gradients_beside_a_mask_and_a_score_are_checked(run):
    """Of what the expressions are given, and of each tensor that the score grows with."""
    words = ["backward/23", "--mask", "k <= q - far", "--score", "s + far * slope[h]", "--tensor", "far=3"]
    code, out, _ = run(*words, "slope=random:1:bf16", "--seqlen", "64", "--head-dim", "64")
    assert code == 0
    assert "PASS" in figure(out, "check")
    assert "gradients=slope" in "".join(out.split())
    assert "3 of 64 see no key: q=0 to 2 at every h" in figure(out, "rows")
