"""Tables of times: every figure can be read, also in a console of 80 columns."""

import io
import itertools
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from flashladder.common import console
from flashladder.common.emulator import LineCount, Report
from flashladder.common.measure.contest import Contest
from flashladder.common.measure.nvml import GpuState
from flashladder.common.measure.timing import CONTROL, Measurement, Sample
from flashladder.common.problem.check import Check
from flashladder.common.problem.problem import Problem
from flashladder.common.report import display, tables

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
RIGHT = Check(0.0, 1.0, 0.0, 1.0, faults=())
LONG = "16@block_m=128,block_n=128,num_warps=8,double_buffer=true"
TIMES = {"fa2": 100.0, CONTROL: 100.0, "16": 80.0, LONG: 125.0}


def contest(seqlen, dtype="bf16", left_out=()):
    problem = Problem(batch=65536 // seqlen, num_heads=16, seqlen_q=seqlen, dtype=dtype)
    state = GpuState(sm_mhz=1980)
    scale = problem.flops / Problem(seqlen_q=512).flops
    times = {name: time_us for name, time_us in TIMES.items() if name not in left_out}
    samples = [Sample(n, name, 1, time_us * scale, state) for n in range(4) for name, time_us in times.items()]
    checks = {name: RIGHT for name in times if name != CONTROL}
    return Contest(problem, {}, {}, Measurement("hot", "fa2", tuple(samples), checks))


def printed(tables, width):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for table in tables:
        console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def joined(lines):
    """The kernels' names, put together again from the lines that they fold into."""
    return "".join(line[:31].strip() for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_lost_in_a_narrow_console(width):
    contests = [contest(seqlen) for seqlen in LENGTHS]
    lines = printed([*display.overview(contests), display.times(contests[0].measurement, contests[0].problem)], width)
    text = "\n".join(lines)
    assert "…" not in text
    assert LONG in text + joined(lines)
    for part in (LENGTHS[:6], LENGTHS[6:]):
        assert any(line.split() == ["kernel", *map(str, part)] for line in lines)
    for value, verdict in ((r"1\.250", "faster"), (r"0\.800", "slower")):
        mean = f"{value} +{value} to {value} +{verdict}"
        assert len(re.findall(mean, text)) == 2
        assert len(re.findall(value, re.sub(mean, "", text))) == len(LENGTHS)


def test_a_table_for_each_type_and_a_dash_where_nothing_was_timed():
    contests = [contest(512), contest(1024, left_out=("16",)), contest(512, "fp16")]
    text = "\n".join(printed(display.overview(contests), 80))
    assert [text.count(f"{dtype}, full: TFLOP/s, and ratio") for dtype in ("bf16", "fp16")] == [1, 1]
    assert [line.split()[-1] for line in text.splitlines() if line.split()[:1] == ["16"]].count("-") == 1


def test_a_column_of_clocks_is_there_where_one_was_read():
    measured = contest(512).measurement
    assert "SM MHz" in "\n".join(printed([display.times(measured, Problem())], 80))
    unread = replace(measured, samples=tuple(replace(sample, state=GpuState()) for sample in measured.samples))
    assert "SM MHz" not in "\n".join(printed([display.times(unread, Problem())], 80))


def test_where_nothing_was_timed_there_is_no_table():
    assert display.overview([Contest(Problem(), {}, {}, None)]) == []


@pytest.mark.parametrize(("seconds", "words"), [(40, "40 s"), (150, "2 min"), (9000, "2 hours"), (789780, "9 days")])
def test_a_time_is_in_the_unit_that_a_person_would_use(seconds, words):
    assert console.duration(seconds) == words


def test_a_name_in_brackets_is_printed(capsys):
    command = "pip install 'flashladder[tuner]'"
    console.console.print(tables.facts("", {"predicted": f"nothing: {command}"}))
    console.warn(command)
    said = capsys.readouterr()
    assert command in said.out
    assert command in said.err


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(console, "errors", Console(file=sys.stderr, force_terminal=False))
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    with console.progress("compiled") as update:
        for done, clock[0] in ((1, 5.0), (2, 25.0), (3, 30.0)):
            update(done, 9, "best 1.2")
    assert capsys.readouterr().err == "compiled 2 of 9 2:20 left best 1.2\n"


@pytest.mark.parametrize("what", ["24_woven_general: priced", "11_encoded_store_swizzle: compiled and ranked"])
def test_a_line_of_80_columns_has_bar_count_and_time_left(what, monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(console, "errors", Console(file=file, force_terminal=True, width=80, color_system=None))
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress(what) as update:
        for done in (900, 901):
            update(done, 2112, "16_static_stride with dtype=bf16,head_dim=128,block_m=64 for sm_80")
    (line,) = {line for line in file.getvalue().replace("\r", "\n").split("\n") if "left" in line and "901" in line}
    assert len(line.replace("\x1b[2K", "")) <= 80
    assert f"{what} ━" in line
    assert "901/2112 3 hours left" in line


def test_traffic_is_of_the_kernel_s_own_lines(tmp_path):
    """A lambda's line is told from that of the call in which it was inlined; what a line does several times is one."""
    kernel = tmp_path / "kernel.cu"
    kernel.write_text("weave(first);\nload(q);\nload(k);\n")
    copied = ("load.cuh", 7), (str(kernel), 2), ("woven.cuh", 9), (str(kernel), 1)
    other = ("load.cuh", 8), (str(kernel), 3), ("woven.cuh", 9), (str(kernel), 1)
    counts = [(copied, "cp.async.cg.shared.global", 4, 4), (copied, "ldmatrix.x4", 6, 3), (other, "ldmatrix.x4", 5, 5)]
    lines = [LineCount(source, opcode, 1, units, ideal, 1, 1) for source, opcode, units, ideal in counts]
    report = Report(shared=[*lines, lines[1]])
    rows = [line.split() for line in printed([display.traffic(report)], 100) if "kernel.cu" in line]
    assert rows == [
        ["kernel.cu:2", "load(q);", "cp.async", "4", "4", "1.00x"],
        ["kernel.cu:2", "load(q);", "ldmatrix", "12", "6", "2.00x"],
        ["kernel.cu:3", "load(k);", "ldmatrix", "5", "5", "1.00x"],
    ]


def test_brackets_of_a_fact_are_no_markup():
    said = io.StringIO()
    Console(file=said, width=100).print(tables.facts("Title", {"predicted": "`pip install 'flashladder[compiler]'`"}))
    assert "'flashladder[compiler]'" in said.getvalue()
