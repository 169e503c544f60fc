"""Profiles: ncu's pages, their comparison with what is predicted, and the command with a stand-in for a GPU."""

import csv
import json
import math
import re
import stat
from collections import Counter
from pathlib import Path

import pytest

from flashladder.common import catalog, console
from flashladder.common.catalog import find
from flashladder.common.compiler import build_one
from flashladder.common.compiler.sass.code import read
from flashladder.common.compiler.sass.opcodes import bank_wavefronts
from flashladder.common.errors import DeviceError, ToolchainError
from flashladder.common.paths import ROOT
from flashladder.common.predict import ncu, profiling
from flashladder.common.predict.agreement import Agreement, compare, sass_opcode
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.records.log import open_text
from flashladder.common.runtime import target
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support import fake_ncu
from flashladder.tools.commands import profile

DATA = Path(__file__).parents[1] / "data"
PAGE = (DATA / "ncu_source.csv").read_text()  # from an H100, most lines left out
WIDE_HEADS = DATA / "ncu_36_wide_heads"  # from an H200; of the columns, operands and metrics those that are read
PROBLEM = Problem(seqlen_q=64)
OPTIONS = ("--batch", "1", "--heads", "1", "--seqlen", "64")


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture(scope="module")
def artifact():
    return build_one(find("02"), find("02").config(), "sm_90a")


@pytest.fixture
def pages(tmp_path, artifact):
    fake_ncu.write_pages(tmp_path / "pages" / "02_swizzling", artifact, PROBLEM)
    return tmp_path / "pages"


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = console.run(profile.main, profile.parser(), arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_source_page_of_a_real_gpu():
    instructions = ncu.parse_source(PAGE)
    assert len(instructions) == 20
    by_opcode = {instruction.opcode: instruction for instruction in instructions}
    copy = by_opcode["LDGSTS.E.BYPASS.LTC128B.128"]
    assert (copy.executed, copy.shared_wavefronts, copy.global_sectors) == (4096, 4 * 4096, 16 * 4096)
    fragment = by_opcode["LDSM.16.M88.4"]
    assert fragment.shared_wavefronts == fragment.shared_wavefronts_ideal == 4 * fragment.executed
    barrier = by_opcode["BAR.SYNC.DEFER_BLOCKING"]
    assert (barrier.samples, barrier.stalls) == (344, {"long_sb": 344})
    assert all(sum(instruction.stalls.values()) == instruction.samples for instruction in instructions)
    filler = next(instruction for instruction in instructions if instruction.text.startswith("@!PT"))
    assert (filler.kind, filler.opcode) == ("filler", "LDS")


def test_totals_are_by_opcode_without_fillers():
    found = ncu.Profile(tuple(ncu.parse_source(PAGE)), {}, "")
    assert found.total("executed", "LDS") == 4096  # LDS.128, not the filler LDS
    assert found.total("shared_wavefronts", "STS", "LDS") == 2 * 4096 + 4 * 4096
    assert found.total("executed") > found.total("executed", "HMMA", "LDSM")
    assert list(found.stalls().items())[:2] == [("long_sb", 361), ("wait", 133)]


def test_raw_page_has_names_units_and_values():
    rows = '"ID","Kernel Name","a.sum","b.avg"', '"","","byte","%"', '"0","attention_forward","1,234.5","7"'
    text = "\n".join(["==PROF== Disconnected", *rows])
    values = {"ID": "0", "Kernel Name": "attention_forward", "a.sum": "1,234.5", "b.avg": "7"}
    assert ncu.parse_raw(text) == values


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (
            ncu.parse_source,
            '"Address","Source"\n"0x10","NOP"\n',
            "ncu's source page has not the column .*Instructions Executed",
        ),
        (ncu.parse_source, PAGE.replace('"4096"', '"many"'), "ncu's source page has not .*many"),
        (ncu.parse_raw, "", "holds no launch"),
    ],
)
def test_pages_that_make_no_sense_are_said(parse, text, message):
    with pytest.raises(ToolchainError, match=message):
        parse(text)


def test_missing_ncu_names_what_would_work(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "_PLACES", (str(tmp_path),))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(ToolchainError, match=r"no ncu on PATH.*nsight-compute.*`flashladder sass` predicts"):
        ncu.find_ncu()


def script(folder, text):
    file = folder / "ncu"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return folder


def test_ncu_is_run_once_and_asked_for_both_pages(monkeypatch, tmp_path, pages):
    answer = f"""echo "$*" >> calls
        case "$*" in
            *--export*) touch report.ncu-rep ;;
            *raw*) cat {pages}/02_swizzling/raw.csv ;;
            *) cat {pages}/02_swizzling/source.csv ;;
        esac"""
    monkeypatch.setenv("PATH", str(script(tmp_path, answer)), prepend=":")
    monkeypatch.chdir(tmp_path)
    found = ncu.profile(["python", "launcher.py"], tmp_path, "attention_forward")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [("--export" in call, "--page raw" in call, "--page source" in call) for call in calls] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert calls[0].endswith("python launcher.py")
    assert "--kernel-name attention_forward" in calls[0]
    assert found.metrics["sm__cycles_active.avg"] == 20000
    assert found.total("executed", "HMMA") == 4 * 128


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "echo ==ERROR== ERR_NVGPUCTRPERM - The user does not have permission; exit 1",
            "run as root, or let an administrator",
        ),
        ("echo ==WARNING== No kernels were profiled.", "ncu failed: .*No kernels were profiled"),
        ("echo it broke >&2; exit 3", "ncu failed: .*it broke"),
    ],
)
def test_what_ncu_says_of_a_failure_is_passed_on(monkeypatch, tmp_path, answer, message):
    monkeypatch.setenv("PATH", str(script(tmp_path, answer)), prepend=":")
    with pytest.raises(DeviceError, match=f"(?s){message}"):
        ncu.profile(["python"], tmp_path, "attention_forward")


def test_the_emulator_agrees_with_itself(artifact, pages):
    report = on_emulator(artifact, PROBLEM, make_inputs(PROBLEM), race=False)
    found = compare(ncu.load(pages / "02_swizzling"), report, load_gpu("h100"))
    emulated = [figure for figure in found if figure.by == "emulator"]
    assert {figure.quantity for figure in emulated} >= {"executed", "shared wavefronts", "global sectors"}
    assert {figure.opcode for figure in emulated} >= {"HMMA", "LDSM", "LDGSTS", "STS", "LDS", "STG", "all"}
    assert all(figure.measured == figure.predicted > 0 for figure in emulated)
    busy = {figure.opcode: figure for figure in found if figure.by != "emulator"}
    assert {pipe: busy[pipe].measured for pipe in busy} == {"tensor": 1.25, "lsu": 2, "shared": 4.5}
    assert busy["tensor"].predicted == pytest.approx(100 * 4 * 128 * 6 / 4 / 132 / 20000)  # of the cycles it was active
    assert busy["lsu"].predicted == pytest.approx(lsu_percent(report), rel=0.2)  # shuffles count too


def test_the_emulated_grid_is_the_gpus(artifact, pages, monkeypatch):
    asked = {}

    def emulated(*arguments, **options):
        asked.update(options)
        return on_emulator(*arguments, **options)

    monkeypatch.setattr(profiling, "on_emulator", emulated)
    profiling.run(artifact, PROBLEM, target.resolve("emulator", "rtx4090"), pages)
    assert asked["num_sms"] == 128


def lsu_percent(report):
    """What loads and stores of shared memory take, of all the cycles of the fake profile."""
    copies = sum(line.units for line in report.shared if "cp.async" in line.opcode)
    return 100 * (report.shared_wavefronts - copies) / 132 / 25000


def test_bank_conflicts_lengthen_the_way_of_loads_and_no_pipe_else(tmp_path):
    artifact = build_one(find("01"), find("01").config(), "sm_90a")
    fake_ncu.write_pages(tmp_path / "01_base", artifact, PROBLEM)
    report = on_emulator(artifact, PROBLEM, make_inputs(PROBLEM), race=False)
    assert report.shared_wavefronts > 4 * report.shared_wavefronts_ideal
    found = compare(ncu.load(tmp_path / "01_base"), report, load_gpu("h100"))
    busy = {figure.opcode: figure for figure in found if figure.by != "emulator"}
    assert busy["lsu"].predicted == pytest.approx(lsu_percent(report), rel=0.05)
    assert busy["shared"].predicted < 0.2 * busy["lsu"].predicted


# How far predictions are off at most, as a part, by quantity and opcode or pipe; all other figures are exact.
BUSY = {"wgmma": 0.0002, "mufu": 0.0002, "fma": 0.0005, "shared": 0.0025, "alu": 0.01, "issue": 0.006, "lsu": 0.034}
H200 = {("busy %", pipe): limit for pipe, limit in BUSY.items()}
H200["executed", "SHFL"] = 0.11  # since it was measured, the rung looks for rows whose scores are far from 0


@pytest.mark.slow
def test_an_h200_counts_what_is_predicted():
    """wgmma with A in both places, TMA both ways, a queue of tiles, polls: each count has a figure that is not 0."""
    job = json.loads((WIDE_HEADS / "job.json").read_text())
    rung, problem, gpu = find(job["version"]), Problem(**job["problem"]), load_gpu("h200")
    artifact = build_one(rung, rung.parse_config(job["config"]), job["arch"])
    report = on_emulator(artifact, problem, make_inputs(problem), race=False, num_sms=gpu.num_sms)
    found = {(f.quantity, f.opcode): f for f in compare(ncu.load(WIDE_HEADS), report, gpu)}
    assert {kind: f for kind, f in found.items() if abs(f.deviation) > H200.get(kind, 0)} == {}
    assert min(figure.measured for figure in found.values()) > 0
    executed = "HGMMA", "UTMALDG", "UTMASTG", "SYNCS.EXCH", "SYNCS.ARRIVE", "ATOMG", "BAR", "LDS", "STS", "STG", "SHFL"
    assert found.keys() == {
        *(("executed", opcode) for opcode in executed),
        *((f"shared wavefronts{end}", opcode) for opcode in ("LDS", "STS", "HGMMA") for end in ("", ", ideal")),
        *((f"global sectors{end}", opcode) for opcode in ("STG", "ATOMG") for end in ("", ", ideal")),
        *((quantity, opcode) for opcode in ("UTMALDG", "UTMASTG") for quantity in ("global sectors", "global bytes")),
        *((quantity, "all") for quantity in ("shared wavefronts", "global sectors")),
        *H200,
    }
    assert found["executed", "BAR"].measured == 132 * 12 + 8 * 256  # of each CTA's warps, and of tiles' consumers
    assert found["shared wavefronts", "HGMMA"].measured == 131072 * (8 + 4) + 131072 * 8


def test_polls_are_not_of_the_code_that_was_patched_to_count():
    """ncu's source page has 7 % more instructions than the kernel without patches executes."""
    pages = ncu.load(WIDE_HEADS)
    polls = pages.total("executed", "SYNCS.PHASECHK")
    assert pages.total("executed") - pages.metrics["smsp__inst_executed.sum"] > 600_000
    assert polls > 262_000 > pages.total("executed", "SYNCS.ARRIVE")
    assert pages.total("executed", "SYNCS") == polls + pages.total("executed", "SYNCS.EXCH", "SYNCS.ARRIVE")


def test_deviation_is_relative_to_what_was_measured():
    assert Agreement("executed", "HMMA", 100, 101, "emulator").deviation == pytest.approx(0.01)
    assert Agreement("executed", "HMMA", 0, 0, "emulator").deviation == 0
    assert Agreement("executed", "HMMA", 0, 1, "emulator").deviation == float("inf")


def test_tool_shows_and_logs_kept_pages(run, pages, results):
    code, out, err = run("02", *OPTIONS, "--pages", str(pages))
    assert (code, err) == (0, "")
    assert "02_swizzling, profiled" in out
    assert "12.3 us" in out
    assert "0.3 MB" in out
    assert "+0.00%" in out
    assert "What warps were found doing" in out
    hottest = out[out.index("Where warps were found") :]
    assert "HMMA" in hottest
    assert "kernel.cu" in hottest
    rows = list(csv.DictReader((results / "profile.csv").open()))
    wavefronts = [row for row in rows if (row["quantity"], row["opcode"]) == ("shared wavefronts", "all")]
    assert [(row["version"], float(row["deviation"])) for row in wavefronts] == [("02_swizzling", 0)]
    assert {row["device"] for row in rows} == {"NVIDIA H100 80GB HBM3"}


def test_tool_shows_what_deviates(run, tmp_path, artifact):
    fake_ncu.write_pages(tmp_path / "pages" / "02_swizzling", artifact, PROBLEM, extra_wavefronts=1000)
    _, out, _ = run("02", *OPTIONS, "--pages", str(tmp_path / "pages"), "--no-log")
    (line,) = [
        line for line in out.splitlines() if "shared wavefronts " in line and "LDSM" in line and "ideal" not in line
    ]
    assert "-" in line.split()[-2]


def test_several_rungs_have_a_line_each_that_fits_a_narrow_console(run, pages, artifact, monkeypatch):
    monkeypatch.setattr(console.console, "width", 80)
    below = build_one(find("01"), find("01").config(), "sm_90a")
    fake_ncu.write_pages(pages / "01_base", below, PROBLEM, extra_wavefronts=-1024)
    code, out, _ = run("01", "02", *OPTIONS, "--pages", str(pages))
    assert code == 0
    assert "…" not in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if "MB" in line}
    assert lines["02"][4:7] == ["+0.00%"] * 3
    assert lines["01"][4] != "+0.00%" == lines["01"][5]
    logged = {row["version"] for row in csv.DictReader((pages.parent / "results" / "profile.csv").open())}
    assert logged == {"01_base", "02_swizzling"}


def test_without_a_gpu_the_tool_says_what_would_work(run):
    code, _, err = run("02", *OPTIONS)
    assert code == console.EXIT_ERROR
    assert "ncu counts on a GPU, but there is no NVIDIA driver" in err
    assert "--pages FOLDER" in err
    assert "`flashladder sass`" in err


def test_pages_of_another_problem_are_not_taken(run, pages):
    code, _, err = run("02", "--batch", "1", "--heads", "1", "--seqlen", "128", "--pages", str(pages))
    assert code == console.EXIT_ERROR
    assert "holds pages of another kernel or problem" in err


def test_pages_of_an_older_kernel_are_not_taken(run, pages):
    source = pages / "02_swizzling" / "source.csv"
    source.write_text(source.read_text().replace("FADD", "FMUL", 1))
    code, _, err = run("02", *OPTIONS, "--pages", str(pages))
    assert code == console.EXIT_ERROR
    assert "holds pages of another kernel or problem" in err


def test_a_launch_is_described_whole_to_the_process_that_ncu_watches(pages):
    job = json.loads((pages / "02_swizzling" / "job.json").read_text())
    assert Problem(**job["problem"]) == PROBLEM
    assert find(job["version"]).parse_config(job["config"]) == find("02").config()


# What an H100 counts and the emulator does not: ptxas switches off, by predicate, what fetches a block that is none.
SWITCHED_OFF = {  # of a warp
    ("22_barrier_amid", "LDSM"): 5,
    ("24_woven_general", "LDSM"): 5,
    ("24_woven_general", "LDGSTS"): 16,
}
PIPES = {"alu": 0.015, "lsu": 0.013, "shared": 0.005, ("24_woven_general", "shared"): 0.014}  # the others: 0.002


def logged(instruction_set):
    """The rows of results/profile.csv.gz of rungs of an instruction set."""
    names = [rung.name for rung in catalog.finished() if rung.instruction_set == instruction_set]
    rows = [row for row in csv.DictReader(open_text(ROOT / "results" / "profile.csv.gz")) if row["version"] in names]
    return names, rows


def test_every_row_of_the_log_is_of_a_rung():
    rows = list(csv.DictReader(open_text(ROOT / "results" / "profile.csv.gz")))
    assert len(rows) == sum(len(logged(instruction_set)[1]) for instruction_set in ("ampere", "hopper"))


@pytest.mark.slow
def test_what_an_h200_counted_is_what_was_predicted():
    """What docs/emulator.md says of results/profile.csv.gz, for rungs of Hopper's instructions."""
    names, rows = logged("hopper")
    found = list(dict.fromkeys(row["version"] for row in rows))
    assert found == names[: len(found)]
    assert "36_wide_heads" in found
    assert {row["device"] for row in rows} == {"NVIDIA H200"}
    for row in rows:
        limit = H200.get((row["quantity"], row["opcode"]), 0)
        assert abs(float(row["predicted"]) - float(row["measured"])) <= limit * float(row["measured"]), row


@pytest.mark.slow
def test_what_an_h100_counted_is_what_was_predicted():
    """What docs/emulator.md says of results/profile.csv.gz, for every rung of Ampere's instructions."""
    names, rows = logged("ampere")
    assert {row["version"] for row in rows} == set(names)
    for row in rows:
        kernel = row["version"], row["opcode"]
        predicted, measured = float(row["predicted"]), float(row["measured"])
        if row["quantity"] == "busy %":
            if kernel == ("00_minimal", "shared"):
                predicted *= 1 - shared_by_lanes()
            limit = PIPES.get(kernel, PIPES.get(row["opcode"], 0.002))
            assert abs(predicted - measured) <= limit * measured, row
        else:
            if row["quantity"] == "executed":
                predicted += SWITCHED_OFF.get(kernel, 0) * warps_of(row["problem"])
            assert predicted == measured, row


def warps_of(problem):
    """Warps of 32 rows each that compute it."""
    sizes = {name: int(re.search(rf"{name}=(\d+)", problem)[1]) for name in ("batch", "num_heads", "seqlen_q")}
    return math.prod(sizes.values()) // 32


def shared_by_lanes():
    """Of the accesses to banks that were predicted for rung 00, the part that reads a word again for another lane."""
    rung, problem = find("00"), Problem(seqlen_q=32, seqlen_k=1024)  # a CTA of those that were profiled
    artifact = build_one(rung, rung.config(), "sm_90a")
    report = on_emulator(artifact, problem, make_inputs(problem), race=False)
    again = sum(line.ideal - line.words / 32 for line in report.shared)
    executed = Counter()
    for opcode, times in report.instructions.items():
        executed[sass_opcode(opcode)] += times
    widths = {i.base: bank_wavefronts(i.opcode) for i in read(artifact).instructions}
    return again / sum(executed[base] * widths[base] for base in ("LDS", "STS", "LDG", "STG"))
