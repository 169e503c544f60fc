"""`flashladder bench` on a stand-in for a GPU: what is timed, printed, logged and refused."""

import pytest
import torch

from flashladder.common import console
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.measure.baselines import titles
from flashladder.common.measure.entrants import parse
from flashladder.common.measure.graphs import CaptureError
from flashladder.common.measure.timing import MODES
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.tests.support import fake_gpu
from flashladder.tools.commands import arguments as options
from flashladder.tools.commands import bench, search

SMALL = ["--seqlens", "64,128", "--tokens", "128", "--heads", "1", "--rounds", "6"]


@pytest.fixture
def tool(monkeypatch, tmp_path, capsys):
    """Calls the tool as a person does; gives its exit code, output and errors."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    console.console.export_text()  # forgets what other tests printed

    def call(*arguments):
        code = console.run(bench.main, bench.parser(), [*arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run(tool, monkeypatch):
    """The tool on the stand-in."""
    fake_gpu.install(monkeypatch)
    return tool


def test_rungs_beside_the_official_kernel(run, tmp_path):
    code, out, err = run("02", "02@q_fragments=2", *SMALL, "--out", str(tmp_path / "table.txt"))
    assert code == 0, err
    assert "batch=1,num_heads=1,seqlen_q=128" in out
    overview = out[out.index("full: harmonic mean of TFLOP/s") :]
    assert [line.split()[0] for line in overview.splitlines() if " faster" in line] == ["02", "02@q_fragments=2"]
    assert "1.25" in overview
    assert (tmp_path / "table.txt").read_text().strip() in out


def test_everything_is_logged(run):
    run("02", *SMALL, "--brief")
    frame, damaged = records.bench().read()
    assert damaged == []
    assert list(frame["version"]) == ["fa2", "02_swizzling"] * 2
    ours = frame.iloc[1]
    assert ours["baseline"] == "fa2"
    assert ours["ratio"] == pytest.approx(1.25, rel=0.01)
    assert ours["verdict"] == "faster"
    assert ours["device"] == fake_gpu.NAME
    assert ours["passed"]
    samples, _ = records.samples(ours["run"]).read()
    assert len(samples) == 2 * 6 * 2 * 3
    assert set(samples["contender"]) == {"fa2", "02", "control"}
    assert samples["power_w"].eq(500.0).all()


def test_a_wrong_kernel_is_named_and_not_timed(run, monkeypatch):
    def broken(artifact, task, tensors):
        return lambda: tensors.o.zero_()

    monkeypatch.setattr("flashladder.common.measure.contest.on_gpu", broken)
    code, _, err = run("02", *SMALL)
    assert code == console.EXIT_ERROR
    assert "02 is wrong, and not timed, at batch=2" in err
    frame, _ = records.bench().read()
    assert not frame["passed"].any()
    assert frame["time_us"].isna().all()


def test_missing_baselines_are_named_with_the_line_that_installs_them(run):
    code, _, err = run("02", *SMALL, "--baselines", "fa2,fa4", "--seqlens", "64")
    assert code == 0
    assert "no baseline fa4" in err
    assert "pip install --pre flash-attn-4" in err


def test_launches_in_a_cuda_graph(run):
    code, out, err = run("02", *SMALL, "--mode", "graph")
    assert code == 0, err
    assert "Timed: graph" in out
    frame, _ = records.bench().read()
    samples, _ = records.samples(frame.iloc[0]["run"]).read()
    assert {*frame["mode"], *samples["mode"]} == {"graph"}


def test_a_baseline_that_no_cuda_graph_holds_is_named(run, monkeypatch):
    plan = fake_gpu.FakeTimer.plan

    def refuse(timer, launch, elsewhere):
        if launch.time_us == 100.0:
            raise CaptureError("cannot be captured in a CUDA graph: it waits for the GPU")
        return plan(timer, launch)

    monkeypatch.setattr(fake_gpu.FakeTimer, "plan", refuse)
    code, _, err = run("02", *SMALL, "--mode", "graph")
    assert code == 0, err
    assert "no baseline fa2: fa2 cannot be captured in a CUDA graph: it waits for the GPU" in " ".join(err.split())
    frame, _ = records.bench().read()
    assert set(frame["version"]) == {"02_swizzling"}
    assert set(frame["baseline"]) == {"02"}


def test_every_mode_can_be_asked_for():
    (mode,) = (action for action in bench.parser()._actions if action.dest == "mode")
    assert mode.choices == MODES


def test_the_official_kernels_are_listed(run):
    code, out, _ = run("--list-baselines")
    assert code == 0
    assert all(title in out for name, title in titles().items() if name != "sdpa")
    assert torch.__version__ in out
    assert "pip install xformers" in " ".join(out.split())


def test_shapes_a_rung_does_not_take_are_left_out(run):
    code, _, err = run("02", *SMALL, "--seqlens", "96,128")
    assert code == 0
    assert "left out: 02_swizzling takes seqlen_q in multiples of block_m=64, not 96" in err
    frame, _ = records.bench().read()
    assert set(frame["seqlen_q"]) == {128}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["02", "--baselines", "fa5"], "no baseline fa5; did you mean fa4? There are fa2, cudnn"),
        (["02", "--seqlens", "many"], "--seqlens many is neither a range such as 512..4096 nor a list"),
        (["02", "--seqlens", "0,64"], "--seqlens 0,64 is neither"),
        (["02", "--seqlens", "64..32"], "--seqlens 64..32 is neither"),
        (["99"], "99"),
        (["02@block_m=63"], "block_m=63"),
        (["24", "--window", "4,0", "--causal", "yes"], "--window 4,0 --causal yes: with a causal mask no row sees"),
        (["24", "--window", "all,0", "--causal", "both"], "behind its own; give --window all, or --causal no"),
        (["24", "--softcap", "2000"], "softcap=2000.0: must be a positive number up to 1000, or 0 for none"),
        (["24", "--softcap", "-1"], "softcap=-1.0: must be"),
        (["24", "--softcap", "nan"], "softcap=nan: must be"),
    ],
)
def test_bad_input(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == console.EXIT_ERROR
    assert message in err


def test_rounds_are_at_least_one(capsys):
    with pytest.raises(SystemExit):
        bench.parser().parse_args(["02", "--rounds", "0"])
    assert "--rounds: 0 is not a whole number, 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", ",", "-1", "4,-1", "4.5", "four", "4,5,6", "4 5", "²", "9" * 19])
def test_a_window_is_two_numbers_of_keys(capsys, text):
    with pytest.raises(SystemExit):
        bench.parser().parse_args(["44", f"--window={text}"])
    message = " ".join(capsys.readouterr().err.split())
    assert f"{text!r} is not LEFT,RIGHT: keys before a row's own and behind it, such as 512,64; 4096 (all" in message


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("4096", (4096, None)),
        ("4096,", (4096, None)),
        ("4096,all", (4096, None)),
        ("512,64", (512, 64)),
        (",0", (None, 0)),
        ("all,0", (None, 0)),
        ("0,0", (0, 0)),
        ("all", (None, None)),
    ],
)
def test_windows(text, sides):
    arguments = bench.parser().parse_args(["44", "--window", text, "--softcap", "30", "--seqlens", "512,1024"])
    assert [(p.window_left, p.window_right, p.softcap) for p in options.shapes(arguments, "forward")] == [
        (*sides, 30.0)
    ] * 2


def test_a_search_has_no_bounds_that_it_would_leave_out(capsys):
    given = ["16", "--gpu", "h100"]
    problem, _ = options.shapes(search.parser().parse_args(given), "forward")
    assert (problem.window, problem.softcap) == (False, 0.0)
    for option in ("--window", "--softcap"):
        with pytest.raises(SystemExit):
            search.parser().parse_args([*given, option, "4"])
        assert f"unrecognized arguments: {option}" in capsys.readouterr().err


def test_a_search_is_on_scores_of_trained_models_too():
    def families(*given):
        arguments = search.parser().parse_args(["16", "--gpu", "h100", *given])
        return [problem.family for problem in options.shapes(arguments, "forward")]

    assert families() == ["normal", "normal_3"]
    assert families("--family", "sinks, normal_10,sinks") == ["sinks", "normal_10"]
    with pytest.raises(UnsupportedProblemError, match="family=nope: must be one of"):
        families("--family", "nope")


def test_a_file_that_cannot_be_written_is_named(tool):
    arguments = ("py_fa2", "--device", "cpu", "--seqlens", "16", "--tokens", "16", "--heads", "1", "--rounds", "1")
    code, _, err = tool(*arguments, "--out", "/nowhere/table.txt")
    assert code == console.EXIT_ERROR
    assert "No such file or directory: '/nowhere/table.txt'" in err


def test_shapes():
    arguments = bench.parser().parse_args(["02", "--seqlens", "512..2048", "--causal", "both"])
    problems = options.shapes(arguments, "forward")
    assert [(p.batch, p.seqlen_q, p.causal) for p in problems[::3]] == [(32, 512, False), (32, 512, True)]
    assert problems[2] == Problem(batch=8, num_heads=16, seqlen_q=2048)


def test_without_the_log_sum_exp(run):
    code, out, err = run("02", *SMALL, "--no-lse")
    assert code == 0, err
    assert "full, no LSE: harmonic mean" in out
    frame, _ = records.bench().read()
    assert not frame["lse"].any()
    assert set(frame["version"]) == {"fa2", "02_swizzling"}
    assert frame["passed"].all()


def test_a_window_is_timed_beside_the_official_kernel(run):
    """Kernels, baseline and exact answer all mind it: the stand-in's baseline is checked, too."""
    code, out, err = run("24", *SMALL, "--causal", "yes", "--window", "40", "--head-dim", "64")
    assert code == 0, err
    assert "bf16, causal, window 40: harmonic mean" in out
    frame, damaged = records.bench().read()
    assert not damaged
    assert set(frame["version"]) == {"fa2", "24_woven_general"}
    assert frame["passed"].all()
    assert list(frame["window_left"]) == [40] * 4
    assert frame["window_right"].isna().all()
    assert set(frame["softcap"]) == {0.0}
    seen = 41 * 128 - 40 * 41 / 2  # keys of all rows of the longer problem
    ours = frame.iloc[-1]
    assert ours["tflops"] == pytest.approx(4 * seen * 64 / ours["time_us"] / 1e6)


@pytest.mark.slow
def test_a_softcap_is_timed_without_the_official_kernel(run):
    code, out, err = run("24", *SMALL, "--seqlens", "64", "--softcap", "2.5", "--window", "9,3", "--head-dim", "64")
    assert code == 0, err
    assert "no baseline fa2: FlashAttention-2 (torch) is asked for no softcap here" in " ".join(err.split())
    assert "bf16, full, window 9,3, softcap 2.5: harmonic mean" in out
    frame, _ = records.bench().read()
    (row,) = frame.to_dict("records")
    assert [row[name] for name in ("version", "window_left", "window_right", "softcap", "passed")] == [
        *("24_woven_general", 9, 3, 2.5, True)
    ]


def test_a_rung_without_windows_is_left_out(run):
    _, out, err = run("02", *SMALL, "--window", "40")
    assert "left out: 02_swizzling has no sliding window" in err
    assert "harmonic mean" not in out


def test_references_on_the_cpu(tool):
    """By a true clock, so that a busy machine's pauses are among the times: all spot checks are taken."""
    small = ["--device", "cpu", "--seqlens", "64", "--tokens", "64", "--heads", "1", "--rounds", "3"]
    code, out, err = tool("c", "c@accumulate=fp64", *small, "--baselines", "math,sdpa", "--log", "references")
    assert code == 0, err
    assert "c@accumulate=fp64" in out
    frame, _ = records.bench("references").read()
    assert list(frame["version"]) == ["math", "sdpa", "c", "c"]
    assert set(frame["baseline"]) == {"math"}
    assert frame["passed"].all()
    assert "no baseline fa2; there are sdpa, math" in tool("c", *small, "--baselines", "fa2")[2]


def test_rungs_do_not_run_on_the_cpu():
    with pytest.raises(ConfigError, match="a rung is a CUDA kernel"):
        parse("02", {}, "cpu")
