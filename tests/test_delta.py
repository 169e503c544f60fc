"""A ladder of another operation beside the first: two rungs, one of two kernels, from the catalogue to the log."""

from functools import partial

import pytest
import torch
from delta_ladder import HALVES, HEAD, VERSION_YAML, Delta, make_ladder
from tiny_ladder import make_rung

from flashladder.common import catalog, console
from flashladder.common.catalog import catalogue
from flashladder.common.compiler import build_one
from flashladder.common.compiler.sass import read
from flashladder.common.errors import BuildError, ConfigError, EmulatorError, UnsupportedProblemError
from flashladder.common.measure import baselines
from flashladder.common.measure.contest import ProblemInstance
from flashladder.common.problem.operations import OPERATIONS
from flashladder.common.problem.problem import Problem, expect, make_inputs, verify
from flashladder.common.records import records
from flashladder.common.runtime.execute import on_emulator, on_gpu
from flashladder.common.runtime.gpu import device_arch
from flashladder.tools.commands import run_version

SIZES = {"batch": 2, "num_heads": 2, "seqlen_q": 70, "head_dim": 64}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setitem(OPERATIONS, "delta", Delta())
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    make_rung(tmp_path / "versions")
    make_ladder(tmp_path / "versions")
    return tmp_path / "versions"


def problem(**options):
    return Problem(**(SIZES | options), operation="delta")


def emulated(version, task):
    """Its tensors, checked, and the emulator's report."""
    tensors = make_inputs(task)
    report = on_emulator(build_one(version, version.config_for(task), "sm_80"), task, tensors)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(version.name)
    return tensors, report


@pytest.mark.parametrize("number", ["delta/00", "delta/01"])
@pytest.mark.parametrize("options", [{}, {"dtype": "fp16", "layout": "padded", "batch": 1}])
def test_each_rung_is_right(root, number, options):
    emulated(catalog.find(number, root), problem(**options))


def test_a_run_is_logged_by_the_ladder_and_the_rung(root, monkeypatch, capsys):
    monkeypatch.setattr(catalog, "find_implementation", partial(catalogue.find_implementation, root=root))
    arguments = ["delta/01", "--device", "emulator", "--gpu", "a100", "--head-dim", "64", "--seqlen", "64"]
    assert console.run(run_version.main, run_version.parser(), arguments) == 0
    printed = capsys.readouterr().out
    assert "delta/01_halves: Halves" in printed
    assert "operation=delta" in printed
    (row,) = records.runs().read()[0].itertuples()
    assert (row.version, row.passed, row.lse_error) == ("delta/01_halves", True, 0)
    assert row.max_error <= row.tolerance < 1e-3


def test_kernels_run_in_the_order_in_which_they_are_declared(root):
    version = catalog.find("delta/01", root)
    artifact = build_one(version, version.config(), "sm_80")
    assert artifact.directory.name.startswith("delta-01_halves-sm_80-")
    assert [kernel.entry for kernel in artifact.kernels] == ["half_rows", "attention_delta"]
    assert [(lent.name, lent.count, lent.zeroed) for lent in artifact.workspaces] == [
        ("halves", "2 * batch * num_heads * seqlen_q", False),
        ("next", "1", True),
    ]
    assert artifact.launch.ctas_per_sm == 1
    assert artifact.kernels[0].launch.grid[1] == "2 * num_heads"
    again = build_one(version, version.config(), "sm_80")
    assert again.cached
    assert (again.kernels, again.workspaces) == (artifact.kernels, artifact.workspaces)


def test_the_report_counts_all_kernels(root):
    _, report = emulated(catalog.find("delta/01", root), problem())
    assert report.num_ctas == 3 * 4 * 2 + 2  # tiles x half heads x batch, and the persistent ones
    rows, elements = 2 * 2 * 70, 2 * 2 * 70 * 64
    assert report.bytes_written["global"] >= 4 * 2 * rows + 4 * rows
    assert report.bytes_read["global"] >= 2 * 2 * elements + 4 * 2 * rows


def test_the_main_kernel_is_disassembled(root):
    version = catalog.find("delta/01", root)
    opcodes = {instruction.base for instruction in read(build_one(version, version.config(), "sm_80")).instructions}
    assert "BAR" in opcodes
    assert not opcodes & {"FMUL", "FFMA"}, "of half_rows"


def broken(root, old, new):
    """The rung of two kernels with a part of it replaced."""
    assert old in HALVES
    return make_rung(root, "delta/02_broken", VERSION_YAML, HEAD + HALVES.replace(old, new))


def test_memory_that_no_kernel_wrote_is_not_read(root):
    version = broken(
        root, "if (row < p.seqlen_q)\n        lent.halves", "if (half == 0 && row < p.seqlen_q)\n        lent.halves"
    )
    with pytest.raises(EmulatorError, match=r"(?s)never written: tensor workspace halves, byte offset 4 of 2240"):
        emulated(version, problem())


def test_ctas_that_write_the_same_memory_are_named(root):
    version = broken(root, "+ half] =", "] =")
    with pytest.raises(EmulatorError, match=r"(?s)race on global memory: tensor workspace halves, .*lane 0 writes it"):
        emulated(version, problem())


def test_counters_are_left_at_zero(root):
    version = broken(
        root, "atomicInc(lent.next, blocks * p.num_heads * p.batch + gridDim.x - 1)", "atomicAdd(lent.next, 1)"
    )
    with pytest.raises(
        EmulatorError, match="leaves workspace next other than zero: the next run would begin with that"
    ):
        emulated(version, problem())


def test_memory_that_was_lent_has_an_end(root):
    version = broken(root, '"2 * batch', '"batch')
    with pytest.raises(EmulatorError, match=r"(?s)out of bounds: tensor workspace halves, byte offset \d+ of 1120"):
        emulated(version, problem())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            ".persistent()",
            ".clusters(2)",
            "attention_delta of delta/02_broken is 3 x 2 x 2 CTAs .* its clusters, 2 x 1 x 1",
        ),
        (".persistent()", ".clusters(32)", "attention_delta of delta/02_broken wants clusters of 32 CTAs"),
        (
            '"batch"));',
            '"batch").dependent());',
            "half_rows of .* depends on the kernel before it; it is the rung's first one",
        ),
        (
            "(half_rows, DeltaParams",
            "(half_rows, AttentionParams",
            "half_rows of .* takes q, which is no tensor of .* delta",
        ),
        (
            "KERNEL(attention_delta",
            "KERNEL(other",
            "declares no launch of attention_delta, only of h",
        ),
        (
            '"2 * num_heads"',
            '"splits * num_heads"',
            "grid of half_rows '.*, splits . num_heads, batch.' reads splits; there are",
        ),
        ('"2 * num_heads"', '"111111111222222222233333333334444444444555555555"', "cannot be built:.*too long"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(root, old, new, message):
    with pytest.raises((BuildError, ConfigError, UnsupportedProblemError), match=f"(?s){message}"):
        emulated(broken(root, old, new), problem())


def test_an_operation_is_not_another(root):
    rung, forward = catalog.find("delta/00", root), Problem(**SIZES)
    with pytest.raises(UnsupportedProblemError, match="07_tiny computes the operation forward, not delta; no rung"):
        catalog.find("07", root).config_for(problem())
    with pytest.raises(UnsupportedProblemError, match="delta/00_rows computes the operation delta, not forward"):
        rung.config_for(forward)
    assert "computes the operation forward, not delta" in baselines.SDPA.refusal(problem())
    with pytest.raises(ConfigError, match="no official kernel for the operation delta, only for forward"):
        baselines.official("delta")
    with pytest.raises(UnsupportedProblemError, match="operation=backwards: must be one of forward, packed, delta"):
        Problem(operation="backwards")
    with pytest.raises(UnsupportedProblemError, match="family=one_hot: must be one of normal"):
        problem(family="one_hot")
    assert problem().name != forward.name


def test_a_wrong_output_is_found(root):
    task = problem()
    tensors = make_inputs(task)
    tensors.delta.copy_(expect(task, tensors).exact["delta"])
    tensors.delta[1, 0, 3] += 0.01
    (fault,) = verify(expect(task, tensors), tensors.outputs, tensors.buffers).faults
    assert fault.startswith("delta[1, 0, 3] is")


def test_a_timed_call_gets_new_inputs(root):
    """With the answer that is expected of them."""
    task = problem()
    instance = ProblemInstance(task, "cpu")
    seen, stage = {name: instance.tensors.by_name[name].clone() for name in ("o", "dout")}, instance.stage
    stage.draw()
    stage.new()
    assert not any(torch.equal(instance.tensors.by_name[name], tensor) for name, tensor in seen.items())
    instance.tensors.delta.copy_(expect(task, instance.tensors).exact["delta"])
    stage.keep()
    assert stage.fault() is None


@pytest.mark.gpu
@pytest.mark.parametrize("number", ["delta/00", "delta/01"])
def test_each_rung_is_right_on_a_gpu(root, number):
    version, task = catalog.find(number, root), problem(batch=4, num_heads=8, seqlen_q=5000)
    tensors = make_inputs(task, "cuda")
    launch = on_gpu(build_one(version, version.config_for(task), device_arch()), task, tensors)
    for _ in range(3):  # counters begin at zero each time
        tensors.poison()
        launch()
        torch.cuda.synchronize()
        verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(version.name)
