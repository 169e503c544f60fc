"""A ladder of another operation, registered as a user would: by its folder alone. From problems to the dashboard."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from flashladder.common import catalog, console, own
from flashladder.common.catalog import winners
from flashladder.common.compiler import build_one
from flashladder.common.compiler.sass import read
from flashladder.common.errors import BuildError, ConfigError, EmulatorError, UnsupportedProblemError
from flashladder.common.measure import baselines
from flashladder.common.measure.contest import ProblemInstance
from flashladder.common.paths import ROOT
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.config import KernelConfig, load_gpu
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.records import received, records
from flashladder.common.runtime.execute import on_emulator, on_gpu
from flashladder.common.runtime.gpu import device_arch
from flashladder.tests.row_dots.bench import Simulated
from flashladder.tests.support import fake_gpu
from flashladder.tools.commands import bench, dashboard, ladder, run_version
from flashladder.tuner.job import Job, SearchSettings
from flashladder.tuner.space import Space
from flashladder.tuner.worker import Worker

HERE = Path(__file__).parent
NAME = HERE.name
SIZES = {"batch": 2, "num_heads": 2, "seqlen_q": 70, "head_dim": 96, "head_dim_v": 64}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The ladder where a user keeps it, who sets one variable."""
    folder = tmp_path / NAME
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("test_*", "bench.py", "__pycache__"))
    monkeypatch.setenv(own.VARIABLE, str(folder))
    monkeypatch.delenv("FLASHLADDER_RESULTS", raising=False)
    return folder


@pytest.fixture
def run(capsys):
    """Calls a tool as a person does; gives what it prints."""

    def call(tool, *arguments):
        code = console.run(tool.main, tool.parser(), arguments)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return call


def problem(**options):
    return Problem(**(SIZES | options), operation=NAME)


def emulated(version, task):
    """Its tensors, checked, and the emulator's report."""
    tensors = make_inputs(task)
    report = on_emulator(build_one(version, version.config_for(task), "sm_80"), task, tensors)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(version.name)
    return tensors, report


def test_nothing_else_knows_of_it():
    texts = (".py", ".cuh", ".cu", ".cpp", ".md", ".yaml", ".toml", ".csv", ".html")
    files = [path for top in ("common", "configs", "tests", "tools", "tuner", "versions") for path in
             (ROOT / top).rglob("*") if path.suffix in texts and HERE not in path.parents]  # fmt: skip
    assert len(files) > 500
    assert [path for path in files if re.search(f"{NAME}|RowDots", path.read_text())] == []


# Problems


def test_a_problem_has_the_operations_own_sizes():
    task = problem(options={"segment": 4})
    assert (task.segment, problem().segment, task.head_dim_v) == (4, 1, 64)
    assert task.name.endswith(f",head_dim=96,head_dim_v=64,dtype=bf16,operation={NAME},segment=4")
    assert received.problem_named(task.name) == task
    assert "segment" not in problem().name
    assert make_inputs(task).dots.shape == (2, 2, 18)
    row = records.of_problem(task)
    assert (row["options"], row["head_dim_v"], records.problem_of(row)) == ("segment=4", 64, task)
    assert records.of_problem(Problem())["head_dim_v"] is None
    assert winners.name_of(task) == "dtype=bf16,head_dim=96,head_dim_v=64,causal=false,length=short", (
        "a size is none of a kind"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": {"segment": 0}}, "segment=0 is not a whole number, 1 or more"),
        ({"options": {"pages": 4}}, f"the operation {NAME} has no option pages; there are segment"),
        ({"head_dim_v": 128}, "head_dim_v=128: must be at most 96"),
        ({"causal": True}, f"the operation {NAME} knows no causal"),
        ({"layout": "qkv"}, "layout=qkv: must be one of bshd, bhsd, padded"),
        ({"family": "one_hot"}, "family=one_hot: must be one of normal"),
    ],
)
def test_what_is_no_problem_of_it_is_refused(options, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        problem(**options)


def test_an_operation_is_not_another():
    rung, forward = catalog.find(f"{NAME}/00"), Problem(head_dim_v=64)
    with pytest.raises(UnsupportedProblemError, match=f"07_auto_tuned computes the operation forward, not {NAME}"):
        catalog.find("07").config_for(problem())
    with pytest.raises(UnsupportedProblemError, match=f"{NAME}/00_rows computes the operation {NAME}, not forward"):
        rung.config_for(forward)
    with pytest.raises(UnsupportedProblemError, match="07_auto_tuned takes head_dim_v 128, as head_dim, not 64"):
        catalog.find("07").config_for(forward)
    with pytest.raises(UnsupportedProblemError, match=r"takes segment 1, not 4; the nearest rung that .*/01_halves"):
        rung.config_for(problem(options={"segment": 4}))
    with pytest.raises(UnsupportedProblemError, match=f"operation=backwards: must be one of .*backward, .*{NAME}"):
        Problem(operation="backwards")
    assert f"computes the operation forward, not {NAME}" in baselines.of("forward", on_gpu=False)["sdpa"].refusal(
        problem()
    )


def test_what_a_ladder_declares_wrongly_is_refused_with_its_path(folder):
    assert KernelConfig.parse("chunk=8").chunk == 8
    (folder / "fields.yaml").write_text("chunk: {type: real, meaning: what}")
    with pytest.raises(
        ConfigError, match=r"row_dots/fields\.yaml: chunk: not a type \(int, float, bool, str\) and a meaning"
    ):
        KernelConfig.parse("chunk=8")
    (folder / "operation.py").write_text("OPERATION = None")
    with pytest.raises(ConfigError, match=rf"{NAME}/operation\.py: sets no OPERATION that is called {NAME}"):
        problem()


# Kernels


@pytest.mark.parametrize(
    ("number", "options"),
    [
        ("00", {}),
        ("00", {"dtype": "fp16", "layout": "padded", "batch": 1, "head_dim": 64, "head_dim_v": 32}),
        ("01", {}),
        ("01", {"layout": "bhsd", "options": {"segment": 4}}),
    ],
)
def test_each_rung_is_right(number, options):
    emulated(catalog.find(f"{NAME}/{number}"), problem(**options))


def test_kernels_run_in_the_order_in_which_they_are_declared():
    version = catalog.find(f"{NAME}/01")
    artifact = build_one(version, version.config(), "sm_80")
    assert [kernel.entry for kernel in artifact.kernels] == ["half_rows", f"attention_{NAME}"]
    assert [(lent.name, lent.count, lent.zeroed) for lent in artifact.workspaces] == [
        ("halves", "2 * batch * num_heads * seqlen_q", False),
        ("next", "1", True),
    ]
    assert artifact.launch.ctas_per_sm == 1
    assert artifact.kernels[0].launch.grid[1] == "2 * num_heads"
    again = build_one(version, version.config(), "sm_80")
    assert again.cached
    assert (again.kernels, again.workspaces) == (artifact.kernels, artifact.workspaces)


def test_the_report_counts_all_kernels():
    _, report = emulated(catalog.find(f"{NAME}/01"), problem())
    assert report.num_ctas == 3 * 4 * 2 + 2  # tiles x half heads x batch, and the persistent ones
    rows, elements = 2 * 2 * 70, 2 * 2 * 70 * 64
    assert report.bytes_written["global"] >= 4 * 2 * rows + 4 * rows
    assert report.bytes_read["global"] >= 2 * 2 * elements + 4 * 2 * rows


def test_the_main_kernel_is_disassembled():
    version = catalog.find(f"{NAME}/01")
    opcodes = {instruction.base for instruction in read(build_one(version, version.config(), "sm_80")).instructions}
    assert "BAR" in opcodes
    assert "FFMA" not in opcodes, "of half_rows"


@pytest.fixture
def broken(folder):
    """Makes a rung of the two kernels with a part of it replaced."""

    def make(old, new):
        halves, copy = folder / "01_halves", folder / "02_broken"
        shutil.copytree(halves, copy)
        kernel = (halves / "kernel.cu").read_text()
        assert old in kernel
        (copy / "kernel.cu").write_text(kernel.replace(old, new))
        return catalog.find(f"{NAME}/02")

    return make


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("if (row < p.seqlen_q)\n", "if (half == 0 && row < p.seqlen_q)\n",
         r"never written: tensor workspace halves, byte offset 4 of 2240"),
        ("place + half] =", "place] =", r"race on global memory: tensor workspace halves, .*lane 0 writes it"),
        ("atomicInc(workspaces.next, blocks * p.num_heads * p.batch + gridDim.x - 1)", "atomicAdd(workspaces.next, 1)",
         "leaves workspace next other than zero: the next run would begin with that"),
        ('"2 * batch', '"batch', r"out of bounds: tensor workspace halves, byte offset \d+ of 1120"),
    ],
)  # fmt: skip
def test_what_is_done_wrong_with_a_workspace_is_found(broken, old, new, message):
    with pytest.raises(EmulatorError, match=f"(?s){message}"):
        emulated(broken(old, new), problem())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            ".persistent()",
            ".clusters(2)",
            f"attention_{NAME} of {NAME}/02_broken is 3 x 2 x 2 CTAs .* its clusters, 2 x",
        ),
        (".persistent()", ".clusters(32)", f"attention_{NAME} of {NAME}/02_broken wants clusters of 32 CTAs"),
        (
            '"batch"));',
            '"batch").dependent());',
            "half_rows of .* depends on the kernel before it; it is the",
        ),
        ("(half_rows, RowDotsParams", "(half_rows, AttentionParams", f"half_rows of .* takes q, which is no .* {NAME}"),
        (f"KERNEL(attention_{NAME}", "KERNEL(other", f"declares no launch of attention_{NAME}, only of h"),
        ('"2 * num_heads"', '"splits * num_heads"', "grid of half_rows '.*, splits . num_heads, batch.' reads splits"),
        ('"2 * num_heads"', '"111111111222222222233333333334444444444555555555"', "cannot be built:.*too long"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(broken, old, new, message):
    with pytest.raises((BuildError, ConfigError, UnsupportedProblemError), match=f"(?s){message}"):
        emulated(broken(old, new), problem())


def test_a_wrong_output_is_found():
    task = problem()
    tensors = make_inputs(task)
    tensors.dots.copy_(expect(task, tensors).exact["dots"])
    tensors.dots[1, 0, 3] += 0.01
    (fault,) = verify(expect(task, tensors), tensors.outputs, tensors.buffers).faults
    assert fault.startswith("dots[1, 0, 3] is")


def test_a_timed_call_gets_new_inputs():
    """With the answer that is expected of them."""
    task = problem()
    instance = ProblemInstance(task, "cpu")
    seen, stage = {name: instance.tensors.by_name[name].clone() for name in ("left", "right")}, instance.stage
    stage.draw()
    stage.new()
    assert not any(torch.equal(instance.tensors.by_name[name], tensor) for name, tensor in seen.items())
    instance.tensors.dots.copy_(expect(task, instance.tensors).exact["dots"])
    stage.keep()
    assert stage.fault() is None


# Tools


def test_run_version(run, folder):
    out = run(run_version, f"{NAME}/01", "--device", "emulator", "--gpu", "a100", "--set", "segment=4")
    assert f"{NAME}/01_halves: Halves" in out
    assert re.search(r"head_dim_v=64,.*segment=4", " ".join(out.split()))
    ((row,), damaged) = (frame := records.runs(folder / "results").read())[0].itertuples(), frame[1]
    assert (row.version, row.passed, row.lse_error) == (f"{NAME}/01_halves", True, 0)
    assert (row.operation, row.head_dim, row.head_dim_v, row.options) == (NAME, 96, 64, "segment=4")
    assert row.max_error <= row.tolerance < 1e-3
    assert damaged == []


def test_bench(run, folder, monkeypatch):
    fake_gpu.install(monkeypatch)
    out = run(bench, f"{NAME}/00", f"{NAME}/01", "--seqlens", "64", "--tokens", "128", "--heads", "1")
    assert "TB/s" in out
    assert "TFLOP/s" not in out
    rows, _ = records.bench(folder=folder / "results").read()
    assert list(rows["version"]) == ["eager", f"{NAME}/00_rows", f"{NAME}/01_halves"]
    assert rows["passed"].all()
    task = records.problem_of(rows.iloc[-1])
    assert (task.operation, task.batch, task.head_dim_v) == (NAME, 2, 64)
    assert task.rate(1.0) == pytest.approx((2 * 64 * (96 + 64) * 2 + 4 * 2 * 64) / 1e6)


@pytest.mark.slow
def test_tuner(folder):
    """Configurations are compiled, ranked and measured; the winner is found again. The worker knows the operation."""
    rung, task = catalog.find(f"{NAME}/01"), problem(options={"segment": 4})
    job = Job(Space.of(rung, (task,)), load_gpu("a100"), SearchSettings(exhaustive=True, study="trial"))
    ledger, worker = job.ledger(), Worker(Simulated())
    try:
        job.tune(job.rank(), [worker], ledger)
    finally:
        worker.stop()
        ledger.close()
    (winner,) = winners.of_gpu("a100", folder)
    assert winner.values["block_m"] == 32
    assert winners.config(rung, "a100", task).block_m == 32


def test_dashboard(run, folder, monkeypatch):
    fake_gpu.install(monkeypatch)
    small = ("--seqlens", "64", "--tokens", "64", "--dtypes", "bf16", "--rounds", "6", "--beside", "")
    run(ladder, NAME, *small)
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(folder / "results"))
    run(dashboard)
    assert f"{NAME}/01_halves" in (folder / "results" / "dashboard.csv").read_text()
    assert "Halves" in (folder / "results" / "dashboard.html").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("number", ["00", "01"])
def test_each_rung_is_right_on_a_gpu(number):
    version, task = catalog.find(f"{NAME}/{number}"), problem(batch=4, num_heads=8, seqlen_q=5000)
    tensors = make_inputs(task, "cuda")
    launch = on_gpu(build_one(version, version.config_for(task), device_arch()), task, tensors)
    for _ in range(3):  # counters begin at zero each time
        tensors.poison()
        launch()
        torch.cuda.synchronize()
        verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(version.name)
