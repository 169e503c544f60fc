"""Experiments: what each experiment runs, logs and draws, and the traffic formulas of the papers as counted."""

import subprocess

import pytest
import torch

from flashladder.common import catalog, console
from flashladder.common.errors import VerificationError
from flashladder.common.paths import PUBLISHED, ROOT, UNPUBLISHED
from flashladder.common.problem import check
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.report.charts import experiments as figures
from flashladder.common.studies.experiments import run as experiments
from flashladder.common.studies.experiments import sweeps, traffic
from flashladder.tests.support import fake_gpu, made_up
from flashladder.tools.commands import experiment


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Calls the tool as a person does; gives its exit code, output and errors."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))

    def call(*arguments):
        code = console.run(experiment.main, experiment.parser(), [*arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def rows(name):
    frame, damaged = records.experiment(name).read()
    assert damaged == []
    return frame


def pictures(folder):
    return {path.name for path in (folder / "experiments").glob("*.svg")}


# The orders of the loops


def test_the_two_orders_move_what_the_formulas_say(run, tmp_path):
    code, out, err = run("loop_order", "--seqlens", "128,256")
    assert code == 0, err
    frame = rows("loop_order")
    assert list(frame["label"]) == [sweeps.FA1, sweeps.FA2] * 2
    assert frame["passed"].all()
    for row in frame.itertuples():
        formula = traffic.fa1 if row.label == sweeps.FA1 else traffic.fa2
        assert (row.global_bytes_read, row.global_bytes_written) == formula(row.seqlen_q, 128, 64)
    assert "counted by the emulator" in out
    assert pictures(tmp_path) == {"loop_order.svg"}
    assert "FlashAttention-1, S = 256: 0.82 MiB" in (tmp_path / "experiments" / "loop_order.svg").read_text()
    counted = (frame["global_bytes_read"] + frame["global_bytes_written"]) / 2**20
    formulas = {line.get_label(): list(line.get_ydata()) for line in figures.loop_order(frame).axes[0].lines}
    for label in (sweeps.FA1, sweeps.FA2):
        assert formulas[label] == list(counted[frame["label"] == label])


def test_the_formulas_grow_as_the_papers_say():
    """With N: four times the bytes for twice the length; with M: half the bytes for twice the rows of a block."""
    for formula in (traffic.fa1, traffic.fa2):
        here, longer, larger = (
            sum(formula(*shape)) for shape in ((2**14, 128, 64), (2**15, 128, 64), (2**14, 128, 128))
        )
        assert longer / here == pytest.approx(4, rel=0.02)
        assert here / larger == pytest.approx(2, rel=0.02)
    assert sum(traffic.fa1(2**16, 128, 64)) / sum(traffic.fa2(2**16, 128, 64)) == pytest.approx(1.5, rel=0.01)


def test_what_is_kept_grows_with_the_length_and_in_the_textbook_with_its_square():
    short, long = Problem(seqlen_q=1024), Problem(seqlen_q=2048)
    assert traffic.outputs(short) == 1024 * (128 * 2 + 4)
    assert traffic.outputs(long) == 2 * traffic.outputs(short)
    assert traffic.textbook(short) == 2 * 1024 * (128 + 2 * 1024)
    assert traffic.textbook(long) / traffic.textbook(short) == pytest.approx(4, rel=0.06)


def test_kernels_of_experiments_are_no_rungs():
    kernel = catalog.find("experiments/fa1_order")
    assert kernel.name not in {version.name for version in catalog.versions()}
    assert [entrant.version.name for entrant in sweeps.find("loop_order").entrants([])] == [
        "experiments/00_fa1_order",
        "01_base",
    ]


# What is run


def test_block_sizes_are_all_that_the_rung_takes():
    entrants = sweeps.find("blocks").entrants([catalog.find("16")])
    values = {tuple(entrant.values.values()) for entrant in entrants}
    assert (128, 64, 4) in values
    assert (64, 64, 8) not in values  # eight warps have less than 16 rows each
    assert len(values) == len(entrants) == len({entrant.label for entrant in entrants})
    plain = sweeps.find("blocks").entrants([catalog.find("00")])
    assert all(set(entrant.values) == {"block_m", "block_n"} for entrant in plain)


def test_types_on_the_emulator(run, tmp_path):
    code, out, err = run("dtypes", "--rungs", "02", "--seqlens", "128", "--device", "emulator")
    assert code == 0, err
    frame = rows("dtypes")
    assert list(frame["dtype"]) == ["bf16", "fp16"]
    assert frame["device"].eq("emulator").all()
    assert frame["time_us"].isna().all()
    assert frame["max_error"][1] < frame["max_error"][0]
    assert "Types, counted by the emulator" in out
    assert pictures(tmp_path) == {"dtypes.svg"}


def test_lengths_on_a_gpu_have_times_and_memory(run, tmp_path, monkeypatch):
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(experiments, "make_inputs", lambda task, device: fake_gpu.inputs.make_inputs(task, "cpu"))
    monkeypatch.setattr(experiments.execute, "on_gpu", lambda artifact, task, tensors: lambda: None)
    monkeypatch.setattr(experiments, "_allocated", lambda launch: out.o.nbytes if (out := launch()) is not None else 0)
    monkeypatch.setattr(experiments, "NUM_HEADS", 1)
    monkeypatch.setattr(experiments, "TOKENS", 256)
    code, out, err = run("seqlens", "--rungs", "02", "--seqlens", "128,256", "--rounds", "4")
    assert code == 0, err
    frame = rows("seqlens")
    assert list(frame["label"]) == ["fa2", "math", "02"] * 2
    assert frame["time_us"].notna().all()
    outputs = 256 * 128 * 2
    assert list(frame["memory_bytes"]) == [outputs, outputs, outputs + 256 * 4] * 2
    assert f"measured on {fake_gpu.NAME}" in out
    assert pictures(tmp_path) == {"seqlens.svg"}


def test_a_wrong_kernel_is_not_logged(run, monkeypatch):
    monkeypatch.setattr(experiments, "verify", lambda *_: check.Check(1, 0.1, 0, 0, ("o[0] is 1 instead of 0",)))
    code, _, err = run("dtypes", "--rungs", "02", "--seqlens", "128", "--device", "emulator")
    assert code == console.EXIT_ERROR
    assert "02_swizzling" in err
    assert rows("dtypes").empty
    assert VerificationError.__name__ not in err


@pytest.mark.gpu
@pytest.mark.alone
def test_memory_on_a_real_gpu_grows_as_it_should(run):
    code, _, err = run("seqlens", "--rungs", "02", "--seqlens", "512,2048", "--rounds", "4")
    assert code == 0, err
    used = rows("seqlens").set_index(["label", "seqlen_q"])["memory_bytes"]
    problem = Problem(batch=8, num_heads=16, seqlen_q=2048)
    assert used["02", 512] == used["02", 2048] == traffic.outputs(problem)  # batch x length is the same
    assert used["fa2", 2048] < 1.2 * traffic.outputs(problem)
    assert used["math", 2048] > 2 * used["math", 512]
    assert used["math", 2048] >= traffic.textbook(problem) / 2


# What is drawn


def log(name, lines):
    columns = records.EXPERIMENT.columns
    records.experiment(name).append([{k: v for k, v in line.items() if k in columns} for line in lines])


def test_pictures_are_of_the_latest_run_and_of_a_gpu_if_there_was_one(run):
    emulated = {"device": "emulator", "time_us": None, "tflops": None, "ratio": None}
    log("seqlens", [made_up.row("16", "own", 512) | {"run": "20250101-old", "label": "16"}])
    log("seqlens", [made_up.row("16", "own", 512) | {"run": "20260101-gpu", "label": "16"}])
    log("seqlens", [made_up.row("16", "own", 512) | {"run": "newest", "label": "16"} | emulated])
    latest = figures.latest(rows("seqlens"))
    assert list(latest["run"]) == ["20260101-gpu"]
    assert figures.source(latest) == "measured on NVIDIA H100 80GB HBM3"
    assert figures.source(rows("seqlens").iloc[[-1]]) == "counted by the emulator"


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("name", ["blocks", "dtypes", "seqlens"])
def test_every_picture_of_measured_and_of_counted_rows(run, name, on_gpu):
    changes = {"max_error": 0.002, "tolerance": 0.01, "memory_bytes": 2**20, "label": "16"}
    if not on_gpu:
        counted = {
            "instructions": 1000,
            "global_bytes_read": 2**20,
            "global_bytes_written": 2**19,
            "device": "emulator",
        }
        changes |= {**counted, "time_us": None, "tflops": None, "ratio": None}
    log(
        name,
        [
            made_up.row(n, "own", s, dtype) | changes
            for n in ("02", "16")
            for s in (512, 4096)
            for dtype in ("bf16", "fp16")
        ],
    )
    drawn = figures.DRAW[name](rows(name))
    titles = " ".join(axes.get_title(loc="left") for axes in drawn.axes) + "".join(
        text.get_text() for text in drawn.texts
    )
    expected = {
        "blocks": ("TFLOP/s", "MiB"),
        "dtypes": ("TFLOP/s", "instructions"),
        "seqlens": ("milliseconds", "instructions"),
    }
    assert expected[name][0 if on_gpu else 1] in titles


def test_a_damaged_row_is_named_and_left_in_place(run):
    arguments = ("loop_order", "--seqlens", "128")
    run(*arguments)
    (path,) = made_up.change(records.experiment("loop_order"), lambda text: text.replace("\n", "\nwhat is this\n", 1))
    before = path.read_bytes()
    code, _, err = run(*arguments)
    assert code == 0
    assert f"{path}:2: 1 cells under" in err
    assert path.read_bytes() == before


def test_a_run_on_the_emulator_is_shown_though_a_gpu_was_there_before(run):
    log("loop_order", [made_up.row("16", "own", 512) | {"run": "20260101-gpu", "label": sweeps.FA1}] * 2)
    log("loop_order", [made_up.row("16", "own", 512) | {"run": "20260101-gpu", "label": sweeps.FA2}] * 2)
    _, out, _ = run("loop_order", "--seqlens", "128")
    assert "counted by the emulator" in out[: out.index("logged to")]
    assert "shows what was measured on NVIDIA H100" in " ".join(out.split())


@pytest.mark.git
def test_the_project_s_own_results_are_added_to_on_demand_alone(monkeypatch, tmp_path):
    rungs = [catalog.find("02")]
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    assert experiment._folder(rungs, publish=False) == tmp_path
    monkeypatch.delenv("FLASHLADDER_RESULTS")
    assert experiment._folder(rungs, publish=True) == PUBLISHED
    assert experiment._folder(rungs, publish=False) == UNPUBLISHED
    ignored = subprocess.run(["git", "check-ignore", UNPUBLISHED / "experiments", ROOT / "adopted"], cwd=ROOT)
    assert ignored.returncode in (0, 128), "ignored, or no clone"


def test_bad_input_and_the_list(run):
    code, _, err = run("lenghts")
    assert code == console.EXIT_ERROR
    assert "no experiment lenghts; there are blocks, dtypes, seqlens" in err
    assert run("dtypes", "--rungs", "99")[0] == console.EXIT_ERROR
    assert run("dtypes", "--seqlens", "many")[0] == console.EXIT_ERROR
    code, out, _ = run("--list")
    assert code == 0
    assert "loop_order" in out


def test_no_gpu_is_said_when_one_is_asked_for(run):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = run("blocks", "--device", "gpu")
    assert code == console.EXIT_ERROR
    assert "GPU" in err or "driver" in err
