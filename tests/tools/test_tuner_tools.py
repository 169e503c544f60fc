"""What a person types: `flashladder search` and `plots`."""

import dataclasses
import itertools
import re
import subprocess
import sys

import pytest

from flashladder.common import catalog, console
from flashladder.common.catalog import winners
from flashladder.common.errors import ConfigError, DeviceError
from flashladder.common.paths import ROOT, results_dir
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.report.charts import studies
from flashladder.tests.support.simulated_bench import Simulated
from flashladder.tools.commands import arguments as options
from flashladder.tools.commands import plots, search
from flashladder.tools.commands import studies as list_studies
from flashladder.tuner import campaign, job, space, trial_log
from flashladder.tuner.forecast import Forecast
from flashladder.tuner.ledger import Ledger
from flashladder.tuner.space import Space
from flashladder.tuner.storage import default_url
from flashladder.tuner.worker import Worker

SMALL = ["--seqlens", "256", "--tokens", "256", "--heads", "1"]
STUDY = "02_swizzling-h100-bf16-d128-full-short"
LONG_STUDY = STUDY.removesuffix("-short")
MASK = "dtype=bf16,head_dim=128,causal=false"


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls `flashladder search` on spaces of four configurations; gives its exit code, output and errors."""
    whole = Space.of
    few = {"block_n": (64,), "num_warps": (4,), "k_fragments": (0,), "v_fragments": (0, 2), "double_buffer": (False,)}

    def small(version, problems, gpu, only):
        space = whole(version, problems, gpu, {"ptxas_level": (3,), **only})
        kept = [
            config
            for config in space.configs
            if all(getattr(config, name) in values for name, values in few.items() if name in config.fields)
            and getattr(config, "q_fragments", 0) in (0, 2)
            and config.block_m == 64
        ]
        return dataclasses.replace(space, configs=tuple(kept), default=kept[0], only=only)

    monkeypatch.setattr(Space, "of", small)

    def call(*arguments):
        code = console.run(search.main, search.parser(), [*SMALL, *arguments])
        captured = capsys.readouterr()
        return code, " ".join(captured.out.split()), " ".join(captured.err.split())

    return call


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.setattr("flashladder.common.runtime.gpu.require_gpu", lambda: None)
    monkeypatch.setattr(job, "workers", lambda *_: [Worker(Simulated())])


def test_a_rung_is_tuned(run, simulated):
    code, out, err = run("02", "--gpu", "h100")
    assert code == 0, err
    assert "02_swizzling: 4 configurations are 2 kernels" in out
    assert "02_swizzling on simulated: finalists" in out
    assert "winner" in out
    assert str(winners.FOLDER / "h100.yaml") in out
    frame, _ = trial_log.read(trial_log.path_of(STUDY)).read()
    assert len(frame) == 2
    assert frame["predicted_us"].notna().all()


@pytest.mark.parametrize(
    ("seqlens", "studies"),
    [
        ("1024", {STUDY: "short"}),
        ("2048,4096", {LONG_STUDY: "long"}),
        ("1024,2048", {STUDY: "short", LONG_STUDY: "long"}),
    ],
)
@pytest.mark.slow
def test_each_kind_of_problems_has_a_study_and_a_winner(run, simulated, seqlens, studies):
    code, out, err = run("02", "--gpu", "h100", "--seqlens", seqlens, "--tokens", "4096")
    assert code == 0, err
    kinds = {study: f"{MASK},length={length}" for study, length in studies.items()}
    assert all(f"h100.yaml: {kind} " in out for kind in kinds.values())
    assert all(trial_log.path_of(study).exists() for study in studies)
    found = {each.evidence["study"]: (each.version, each.kind) for each in winners.of_gpu("h100")}
    assert found == {study: ("02_swizzling", kind) for study, kind in kinds.items()}


@pytest.mark.slow
def test_several_rungs_in_one_go(run, simulated):
    code, _, err = run("02", "04", "--gpu", "h100", "--study", "mine")
    assert code == 0, err
    assert {winner.version for winner in winners.of_gpu("h100")} == {"02_swizzling", "04_interleaved_loads"}
    for name in ("mine-02_swizzling", "mine-04_interleaved_loads"):
        assert trial_log.path_of(name).exists()


def test_each_mask_in_a_study_of_its_own():
    """A winner of both masks together would be the best of neither."""
    arguments = search.parser().parse_args(["24", "--gpu", "h100", "--causal", "both", "--study", "mine"])
    problems, settings = options.shapes(arguments, "forward"), search._settings(arguments, "forward")
    spaces = search._spaces(catalog.select(["24"]), problems, load_gpu("h100"), arguments)
    assert [{problem.causal for problem in each.problems} for each in spaces] == [{False}, {True}]
    assert [campaign.own_study(each, settings, spaces).study for each in spaces] == [
        "mine-bf16-d128-full",
        "mine-bf16-d128-causal",
    ]


def asked(*arguments):
    """The spaces that `flashladder search` would search on an H100, and how it would time them."""
    arguments = search.parser().parse_args([*arguments, "--gpu", "h100", "--only", "ptxas_level=3"])
    rungs = catalog.select(arguments.rungs)
    operation = catalog.one_operation(rung.operation for rung in rungs)
    spaces = search._spaces(rungs, options.shapes(arguments, operation), load_gpu("h100"), arguments)
    return spaces, search._settings(arguments, operation)


@pytest.mark.parametrize(
    ("rung", "kinds", "mode"),
    [
        ("decode/07", 8, "cold_graph"),  # one, few and many tiles; short and long, and few keys of several sequences
        ("decode/13", 4, "cold_graph"),
        ("mla/05", 5, "cold_graph"),
        ("mla/06", 3, "cold_graph"),
        ("backward/18", 1, "hot"),
        ("backward/19", 1, "hot"),
        ("48", 1, "hot"),
        ("16", 1, "hot"),  # which calls do not launch
    ],
)
def test_every_ladder_says_what_its_rungs_are_tuned_for(rung, kinds, mode):
    spaces, settings = asked(rung, "--family", "normal")
    assert settings.mode == mode
    assert len({space.kind for space in spaces}) == len({space.words for space in spaces}) == len(spaces) == kinds
    for each in spaces:
        assert {winners.name_of(problem) for problem in each.problems} == {each.kind}


def test_sizes_of_a_search_are_lists():
    (few, many), _ = asked(
        "decode/07", "--batch", "2,64", "--seqlens", "2048,4096", "--heads", "32,64", "--heads-k", "8"
    )
    sizes = [(p.batch, p.seqlen_k, p.num_heads, p.num_heads_k) for p in few.problems if p.family == "normal"]
    assert sizes == [(2, keys, heads, 8) for keys in (2048, 4096) for heads in (32, 64)]
    assert {problem.batch for problem in many.problems} == {64}
    ((space,), settings) = asked(
        "decode/07", "--set", "paged=true", "--tokens", "1024", "--seqlens", "512", "--mode", "hot"
    )
    assert (space.problems[0].batch, space.problems[0].paged, settings.mode) == (2, True, "hot")
    assert "paged=true" in space.kind


def test_rungs_share_a_budget_evenly(run, simulated, monkeypatch):
    shares, tune = [], job.Job.tune
    monkeypatch.setattr(job.Job, "tune", lambda self, *given: shares.append(given[-1]) or tune(self, *given))
    code, _, err = run("02", "04", "--gpu", "h100", "--budget-seconds", "600", "--compile", "3")
    assert code == 0, err
    first, second = shares
    assert 150 < first <= 300 < second < 600, "what one leaves is the other's"
    assert {winner.version for winner in winners.of_gpu("h100")} == {"02_swizzling", "04_interleaved_loads"}


def test_a_budget_that_is_spent_leaves_time_for_some_kernels(run, simulated):
    code, out, err = run("02", "--gpu", "h100", "--budget-seconds", "0.001")
    assert code == 0, err
    assert "winner" in out


@pytest.mark.parametrize("option", ["--budget-seconds", "--minutes", "--patience"])
@pytest.mark.parametrize("value", ["-5", "0", "nan", "soon"])
def test_a_budget_that_is_no_time_is_refused(run, capsys, option, value):
    with pytest.raises(SystemExit, match="2"):
        run("02", "--gpu", "h100", option, value)
    assert f"argument {option}: {value} is not a number above 0" in capsys.readouterr().err


def test_what_a_budget_affords_to_compile(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert campaign.affordable(360, 24) == 80
    assert campaign.affordable(0.1, 23) == 1
    assert campaign.affordable(float("inf"), 23) is None


@pytest.mark.slow
def test_a_part_of_the_space_is_a_study_of_its_own(run, simulated):
    code, out, err = run("02", "--gpu", "h100", "--only", "v_fragments=2", "ptxas_level=1,3")
    assert code == 0, err
    assert "ptxas_level=1" in out
    frame, _ = trial_log.read(trial_log.path_of(f"{STUDY}-v_fragments=2-ptxas_level=1+3")).read()
    assert frame["config"].str.contains("ptxas_level=1").any()
    (winner,) = winners.of_gpu("h100")
    assert winner.values.get("ptxas_level", 1) == 1, "the usual level goes without saying"
    found = winners.config(catalog.find("02"), "h100", Problem())
    assert found.as_dict().get("ptxas_level") == winner.values.get("ptxas_level")


@pytest.mark.parametrize("arguments", [["--offline"], []])
@pytest.mark.slow
def test_without_a_gpu_it_ranks_and_says_that_it_predicts(run, arguments, monkeypatch):
    def missing():
        raise DeviceError("there is no NVIDIA driver")

    monkeypatch.setattr("flashladder.common.runtime.gpu.require_gpu", missing)
    code, out, err = run("02", "--gpu", "a100", *arguments)
    assert code == 0, err
    said = "there is no NVIDIA driver: configurations are ranked by the cost model, and nothing is measured"
    assert (said in err) is (not arguments), "who asks for it need not be told"
    title = "02_swizzling on NVIDIA A100 SXM4 80 GB: PREDICTED by the cost model, nothing was measured;"
    assert f"{title} all 4 configurations" in out
    assert " nothing " in out, "the default is among them"
    assert "q_fragments=2 " in out, "the others are told from it"
    assert "The same command goes on" not in out
    path = results_dir() / "predicted" / "02_swizzling-a100-bf16-d128-full-short.csv"
    assert path.read_text().count(",predicted,all 4 configurations\n") == 2
    assert winners.every() == [], "a prediction is no winner"


def test_a_budget_is_of_all_rungs_together_and_a_minute_each_where_none_is_given(run, monkeypatch):
    shares = []
    monkeypatch.setattr(Forecast, "extend", lambda self, seconds, *_: shares.append(round(seconds)))
    for arguments in ([], ["--budget-seconds", "600"]):
        code, _, err = run("02", "04", "--gpu", "a100", "--offline", *arguments)
        assert code == 0, err
    assert shares == [60, 120, 300, 600], "what one leaves is the other's"


def test_rungs_that_do_not_suit_are_a_line_for_each_reason(run, monkeypatch):
    monkeypatch.setattr(Forecast, "extend", lambda *_: None)
    suiting = space.all_suiting
    monkeypatch.setattr(space, "all_suiting", lambda rungs, *rest: suiting(list(rungs)[24:28], *rest))
    code, _, err = run("--gpu", "a100", "--offline", "--head-dim", "64")
    assert code == 0, err
    assert "left out, 25, 26, 27: uses hopper instructions, which need sm_90a, not sm_80" in err
    assert err.count("left out") == 1


def test_the_rung_that_calls_launch_comes_first_and_each_says_which_it_is(run, monkeypatch):
    monkeypatch.setattr(Forecast, "extend", lambda *_: None)
    suiting = space.all_suiting
    monkeypatch.setattr(space, "all_suiting", lambda rungs, *rest: suiting(list(rungs)[22:25], *rest))
    code, out, err = run("--gpu", "a100", "--offline")
    assert code == 0, err
    names = ("24_woven_general", "22_barrier_amid", "23_general")
    assert re.findall(r"rung \d of \d: \w+", out) == [f"rung {n} of 3: {name}" for n, name in enumerate(names, 1)]
    assert "; 3 min at most" in out


def test_a_rung_without_time_says_so_and_shows_no_empty_table(run, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Forecast, "extend", lambda *_: None)
    code, out, err = run("02", "--gpu", "a100", "--offline", "--budget-seconds", "1")
    assert code == 0, err
    assert "partial: 0 of 4 configurations: none is priced yet" in " ".join(out.split())
    assert "predicted us" not in out
    assert not (results_dir() / "predicted").exists()


def test_a_ranking_that_is_interrupted_shows_what_it_has(run, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Forecast, "extend", interrupted)
    code, out, _ = run("02", "--gpu", "a100", "--offline")
    assert code == console.EXIT_INTERRUPTED
    assert "partial: 0 of 4 configurations" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["02", "--gpu", "h100", "--workers", "1"],
            "To tune for NVIDIA H100 SXM5 80 GB a machine with one is needed; without it, and without --workers,",
        ),
        (["02", "--gpu", "h999"], "no description of the GPU h999; there are a100"),
        (["98", "--gpu", "h100"], "no version 98"),
        (["02", "--gpu", "h100", "--causal", "yes"], "02_swizzling has no causal mask"),
        (["02", "--gpu", "h100", "--head-dim", "64"], "takes head_dim 128, not 64"),
        (["02", "--gpu", "h100", "--only", "bloc=64"], "unknown field bloc; did you mean block_n?"),
        (["02", "--gpu", "h100", "--only", "block_n"], "block_n: not a field and its values, such as block_n=64,128"),
    ],
)
def test_bad_input(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == console.EXIT_ERROR
    assert message in err


def test_an_unusable_storage_is_named_before_anything_is_compiled(run, simulated, monkeypatch):
    monkeypatch.setattr(job.Job, "rank", lambda *_: pytest.fail("compiled"))
    code, _, err = run("02", "--gpu", "h100", "--storage", "postgresql://me:secret@127.0.0.1:1/studies")
    assert code == console.EXIT_ERROR
    assert "postgresql://me:***@127.0.0.1:1/studies cannot be used" in err


def test_a_url_where_none_is_taken_is_not_repeated(run, capsys):
    with pytest.raises(SystemExit):
        run("02", "--gpu", "h100", "--storag", "postgresql://me:secret@127.0.0.1:1/studies")
    said = capsys.readouterr().err
    assert "unrecognized arguments: --storag postgresql://...; did you mean --storage?" in said


@pytest.mark.parametrize(
    ("number", "message"),
    [("3", "--workers 3: each needs a GPU of its own, and 2 are visible"), ("many", "neither auto nor a number")],
)
def test_workers_and_gpus(monkeypatch, number, message):
    monkeypatch.setattr(job, "require_gpu", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    found = job.workers("auto", load_gpu("h100"), "hot", 60)
    assert [worker._environment["CUDA_VISIBLE_DEVICES"] for worker in found] == ["4", "7"]
    with pytest.raises((ConfigError, DeviceError), match=message):
        job.workers(number, load_gpu("h100"), "hot", 60)


def test_the_program_starts():
    for program in ([ROOT / "tuner" / "search.py"], *(["-m", "flashladder", tool] for tool in ("replay", "plots"))):
        done = subprocess.run([sys.executable, *program, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout


def test_studies_are_listed_and_no_database_is_made_for_it(capsys):
    def call():
        code = console.run(list_studies.main, list_studies.parser(), [])
        return code, capsys.readouterr()

    code, said = call()
    assert (code, results_dir().exists()) == (console.EXIT_ERROR, False)
    assert "no search has made" in said.err
    ledger = Ledger(default_url(results_dir()), "mine", {}, {"block_m": (64, 128)})
    ledger.finish(ledger.claim("code", {"block_m": 64}, {}), {"verdict": "measured"}, 1.25)
    ledger.close()
    code, said = call()
    assert code == 0
    assert said.out.split()[-3:] == ["mine", "1", "1.250"]


def test_a_study_as_pictures(tmp_path, capsys):
    fields = {"block_m": (64, 128), "block_n": (32, 64)}
    ledger = Ledger(default_url(results_dir()), "mine", {}, fields)
    for number, (block_m, block_n) in enumerate(itertools.product(*fields.values())):
        if number == studies.FEWEST - 1:
            assert console.run(plots.main, plots.parser(), ["mine"]) == console.EXIT_ERROR
            assert "fewer than 3 measured kernels" in capsys.readouterr().err
        trial = ledger.claim(str(number), {"block_m": block_m, "block_n": block_n}, {})
        ledger.finish(trial, {"verdict": "measured"}, 1.0 + number / 10)
    assert console.run(plots.main, plots.parser(), ["mine", "--out", str(tmp_path / "pictures")]) == 0
    drawn = {path.stem: path for path in (tmp_path / "pictures").iterdir()}
    assert drawn.keys() == {"mine-history", "mine-importances", "mine-parallel-coordinates"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.values())
    assert console.run(plots.main, plots.parser(), ["another"]) == console.EXIT_ERROR
    assert "no study another in sqlite:" in capsys.readouterr().err
    ledger.close()
