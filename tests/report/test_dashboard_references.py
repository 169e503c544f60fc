"""The tables of the references, on their pages and on the dashboard, on made-up logs."""

import dataclasses
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from flashladder.common import catalog, console
from flashladder.common.records.log import Log
from flashladder.common.records.schemas import BENCH
from flashladder.common.report.pages import limits, references
from flashladder.tests.support import made_up
from flashladder.tools.commands import dashboard


def lines(run, time, name, config, ratio, **changes):
    """A kernel at every length, and the baseline beside it."""
    made = [made_up.row("16", "own", s, ratio=ratio, run=run, time=time, toolkit="13.0") for s in made_up.LENGTHS]
    made = [line | {"version": name, "config": config} | changes for line in made]
    return [{k: v for k, v in line.items() if k in BENCH.columns} for line in made]


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log of two runs, and pages of references that a test may write."""
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(results))
    copies = []
    for implementation in references.shown():
        folder = tmp_path / implementation.name
        folder.mkdir()
        (folder / "README.md").write_text("# Title\n\n<!-- measured:begin -->\n<!-- measured:end -->\n")
        copies.append(dataclasses.replace(implementation, directory=folder))
    monkeypatch.setattr(references, "shown", lambda: copies)
    copied = shutil.copy(limits.PAGE, tmp_path)
    monkeypatch.setattr(limits, "PAGE", Path(copied))  # its factors would be of these logs
    triton, cute = "dtype=bf16,head_dim=128", "dtype=bf16,head_dim=128,block_m=128,block_n=32,num_warps=4,causal=false"
    made = Log(results / "references.csv", BENCH)
    made.append(lines("old", "2026-01-01", "triton", triton, 0.5, toolkit="triton 3.6"))
    made.append(lines("new", "2026-01-02", "fa2", "", 1.0))
    made.append(lines("new", "2026-01-02", "triton", triton, 1.2, toolkit="triton 3.6"))
    made.append(lines("new", "2026-01-02", "cute", cute, 0.9))
    return made


def test_a_table_shows_the_latest_run(log):
    (table,) = references.tables(log.read()[0], "triton")
    assert table.columns == ("S", "512", "4096", "mean", "95 %")
    assert table.rows[0] == ("FlashAttention-2 (torch)", "300", "300", "1", "")
    assert table.rows[1][:4] == ("triton", "360 (1.20)", "360 (1.20)", "**1.200**")
    assert table.rows[2][0] == "cute, block_n=32"
    assert "bf16, d128, full: TFLOP/s" in table.title
    assert "triton 3.6; 2026-01-02" in table.source
    assert references.every_table(log.read()[0]) == [table]


def test_a_general_rung_has_a_table_for_each_head_dim_and_mask(log):
    rung = catalog.find("general")
    for head_dim, causal, run in ((128, False, "one"), (128, True, "one"), (64, False, "two")):
        config = rung.config(head_dim=head_dim, causal=causal).name
        log.append(lines(run, "2026-01-05", rung.name, config, 1.25, head_dim=head_dim, causal=causal))
    found = references.tables(log.read()[0], rung.name)
    assert [table.title.partition(":")[0] for table in found] == [
        "bf16, d128, full",
        "bf16, d128, causal",
        "bf16, d64, full",
    ]
    assert found[2].rows == (("rung 23", "375 (1.25)", "375 (1.25)", "**1.250**", "1.248 to 1.252"),)


def test_rows_without_the_log_sum_exp_are_not_among_those_with_it(log):
    """Older rows, which do not say, have it."""
    shown = references.tables(log.read()[0], "triton")
    log.append(lines("bare", "2026-01-06", "triton", "dtype=bf16,head_dim=128", 1.9, lse=False))
    frame, _ = log.read()
    assert list(frame["lse"].isna()) == [True] * (len(frame) - 2) + [False] * 2
    assert references.tables(frame, "triton") == shown
    asked = lines("asked", "2026-01-07", "triton", "dtype=bf16,head_dim=128", 1.5, lse=True)
    log.append(asked)
    (table,) = references.tables(log.read()[0], "triton")
    assert [row[-2] for row in table.rows] == ["**1.500**"]


@pytest.mark.parametrize("bounds", [{"window_left": 0}, {"window_right": 0}, {"softcap": 30.0}])
def test_rows_with_a_window_or_a_softcap_are_not_among_those_without(log, bounds):
    """Older rows, which do not say, have none."""
    shown = references.tables(log.read()[0], "triton")
    log.append(lines("bounded", "2026-01-06", "triton", "dtype=bf16,head_dim=128", 1.9, **bounds))
    assert references.tables(log.read()[0], "triton") == shown
    log.append(lines("unbounded", "2026-01-07", "triton", "dtype=bf16,head_dim=128", 1.5, softcap=0.0))
    (table,) = references.tables(log.read()[0], "triton")
    assert [row[-2] for row in table.rows] == ["**1.500**"]


def test_on_a_cpu_the_unit_is_smaller(log):
    log.append(lines("cpu", "2026-01-03", "c", "dtype=bf16,head_dim=128,accumulate=fp64", 1.5, driver="", tflops=0.1))
    (table,) = references.tables(log.read()[0], "c")
    assert table.rows[0][:3] == ("c, accumulate=fp64", "100 (1.50)", "100 (1.50)")
    assert "GFLOP/s" in table.title


def test_the_readmes_and_the_page_are_brought_up_to_date(log, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dashboard, "ROOT", tmp_path)  # whose results they are
    (tmp_path / "README.md").write_text("<!-- ladder:begin -->\n<!-- ladder:end -->\n")

    def run(*arguments):
        code = console.run(dashboard.main, dashboard.parser(), ["--readme", str(tmp_path / "README.md"), *arguments])
        return code, capsys.readouterr().out

    assert run("--check")[0] == dashboard.EXIT_STALE
    assert run()[0] == 0
    assert "| triton | 360 (1.20) | 360 (1.20) |" in (tmp_path / "triton" / "README.md").read_text()
    assert "| cute, block_n=32 |" in (tmp_path / "cute" / "README.md").read_text()
    assert "measured:begin -->\n<!--" in (tmp_path / "c" / "README.md").read_text()
    assert "<td>cute, block_n=32</td>" in (log.path.parent / "dashboard.html").read_text()
    assert run("--check")[0] == 0


def test_other_ladders_are_on_the_page_and_in_the_sheet(log, tmp_path, monkeypatch):
    monkeypatch.setattr(dashboard, "ROOT", tmp_path)
    rung = catalog.find("decode/07")
    sizes = {"operation": "decode", "batch": 8, "seqlen_q": 1, "num_heads": 32, "num_heads_k": 8}
    made = Log(log.path.parent / "decode_h100.csv", BENCH)
    made.append(
        line | {"seqlen_k": keys}
        for keys in (1024, 8192)
        for line in (
            *lines("one", "2026-01-02", "fa2", "", 1.0, **sizes)[:1],
            *lines("one", "2026-01-02", rung.name, rung.config().name, 1.25, **sizes)[:1],
        )
    )
    (tmp_path / "README.md").write_text("<!-- ladder:begin -->\n<!-- ladder:end -->\n")
    assert console.run(dashboard.main, dashboard.parser(), ["--readme", str(tmp_path / "README.md")]) == 0
    page = (log.path.parent / "dashboard.html").read_text()
    table = page[page.index("<h3>The decode ladder</h3>") : page.index('<section id="instructions">')]
    assert "<th>sequences x keys</th><th>8 x 1024</th><th>8 x 8192</th>" in table
    assert "<td>rung decode/07</td>" in table
    assert re.findall(r"No run of the ladder (\w+) is logged", table) == ["backward", "mla"], "not of experiments"
    sheet = pd.read_csv(log.path.parent / "dashboard.csv")
    (line,) = sheet[sheet["rung"].eq("decode/07")].itertuples()
    assert (line.kind, line.unit, line.lengths, line.ratio) == ("bench", "TB/s", 2, pytest.approx(1.25))


def test_a_row_that_cannot_be_read_costs_no_more_than_itself(log):
    log.append(lines("odd", "2026-01-04", "forgotten", "dtype=bf16", 0.7, toolkit=""))
    (table,) = references.tables(log.read()[0], "forgotten")
    assert table.rows[0][:2] == ("forgotten dtype=bf16", "210 (0.70)")
    text = log.path.read_text()
    log.path.write_text(text + text.splitlines(keepends=True)[-1].replace("dtype=bf16", "?!"))
    _, damaged = log.read()
    assert "config='?!' should be fields with values" in str(damaged[0])
