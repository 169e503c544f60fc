"""The fastest rung beside the fastest official kernel, in the README and on results/cells.md, from made-up logs."""

import pytest

from flashladder.common.paths import ROOT
from flashladder.common.records.log import Log
from flashladder.common.records.schemas import BENCH
from flashladder.common.report.dashboard import data
from flashladder.common.report.pages import cells
from flashladder.tests.support import made_up

EMPTY = "# Title\n\n<!-- cells:begin -->\n<!-- cells:end -->\n"


def lines(run, ratios, **changes):
    """Kernels at every length; by name the times of FlashAttention-2 over theirs."""
    made = []
    for name, ratio in ratios.items():
        for seqlen in made_up.LENGTHS:
            line = made_up.row("16", "own", seqlen, ratio=ratio, run=run, time=f"2026-01-0{run}")
            config = {} if name[0].isdigit() else {"config": ""}
            made.append({k: v for k, v in line.items() if k in BENCH.columns} | {"version": name} | config | changes)
    return made


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log of three runs, and a README and a page with markers."""
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(results))
    for path in (tmp_path / "README.md", results / cells.PAGE):
        path.write_text(EMPTY)
    made = Log(results / "cells_h100.csv", BENCH)
    made.append(lines(1, {"fa2": 1.0, "fa3": 1.5, "16_static_stride": 3.0}))
    made.append(lines(2, {"fa2": 1.0, "fa3": 2.0, "cudnn": 1.8, "16_static_stride": 1.9, "02_swizzling": 2.2}))
    made.append(lines(3, {"fa2": 1.0, "cudnn": 1.6, "16_static_stride": 2.0}, dtype="fp16", causal=True))
    return made


def loaded(log):
    return data.Results.load(log.path.parent).cells


def test_the_latest_run_of_each_kind(log):
    runs = list(cells.latest(loaded(log)["h100"]))
    assert [set(rows["run"]) for rows in runs] == [{"2"}, {"3"}]


@pytest.mark.parametrize("bounds", [{"window_left": 0}, {"window_right": 0}, {"softcap": 30.0}])
def test_rows_with_a_window_or_a_softcap_are_no_run(log, bounds):
    log.append(lines(4, {"fa3": 1.0, "16_static_stride": 4.0}, **bounds))
    assert {run for rows in cells.latest(loaded(log)["h100"]) for run in rows["run"]} == {"2", "3"}
    log.append(lines(5, {"fa3": 1.0, "16_static_stride": 4.0}, softcap=0.0))
    assert {run for rows in cells.latest(loaded(log)["h100"]) for run in rows["run"]} == {"3", "5"}


def test_the_fastest_rung_beside_the_fastest_official_kernel(log):
    first, second = map(cells.best, cells.latest(loaded(log)["h100"]))
    assert {seqlen: cell.rung for seqlen, cell in first.items()} == dict.fromkeys(made_up.LENGTHS, "02")
    assert [cell.ratio for cell in first.values()] == pytest.approx([1.1, 1.1])
    assert {cell.rung for cell in second.values()} == {"16"}
    assert [cell.ratio for cell in second.values()] == pytest.approx([1.25, 1.25])


def test_a_length_without_an_official_kernel_is_left_out(log):
    log.append(lines(4, {"02_swizzling": 2.0}))
    frame = loaded(log)["h100"]
    assert cells.best(frame[frame["run"] == "4"]) == {}
    alone = frame[(frame["run"] == "2") & (frame["version"] == "fa3")]
    assert cells.best(alone) == {}


def test_rows_that_were_not_timed_are_no_run(log):
    log.append(lines(5, {"16_static_stride": 1.0}, ratio=None, time_us=None))
    assert {run for rows in cells.latest(loaded(log)["h100"]) for run in rows["run"]} == {"2", "3"}


def test_the_tables(log, tmp_path):
    readme, folder = tmp_path / "README.md", tmp_path / "results"
    sections = cells.sections(readme, folder, loaded(log))
    assert {section.path for section in sections} == {readme, folder / cells.PAGE}
    assert [section.write() for section in sections] == [True, True]
    assert all(section.is_current() and not section.write() for section in sections)
    short = readme.read_text()
    assert "| S | 512 | 4096 | mean |" in short
    assert "| bf16, d128 | 1.10 | 1.10 | **1.10** |" in short
    assert "| fp16, d128, causal | 1.25 | 1.25 | **1.25** |" in short
    words = " ".join(short.split())
    assert "16 heads and 16,384 tokens, normal random inputs." in words
    assert (
        "The fastest rung is one of 02, 16, and the official kernels are in bf16 FlashAttention-2 (torch), cuDNN "
        "(torch), FlashAttention-3; in fp16 FlashAttention-2 (torch), cuDNN (torch)." in words
    )
    page = (folder / cells.PAGE).read_text()
    assert page.count("**bf16, d128, full: TFLOP/s") == page.count("**fp16, d128, causal: TFLOP/s") == 1
    assert "| FlashAttention-3 | 600 (2.00) | 600 (2.00) | **2.000** |" in page
    assert "Made by `flashladder dashboard` from the log cells_h100." in " ".join(page.split())


def test_without_markers_or_rows_nothing_is_written(log, tmp_path):
    readme, folder = tmp_path / "README.md", tmp_path / "results"
    readme.write_text("# Title\n")
    (folder / cells.PAGE).unlink()
    assert cells.sections(readme, folder, loaded(log)) == []
    assert cells.sections(None, folder, loaded(log)) == []
    assert readme.read_text() == "# Title\n"
    log.path.unlink()
    readme.write_text(EMPTY)
    assert cells.sections(readme, folder, loaded(log)) == []


def test_the_first_lines_of_the_readme_say_what_the_log_says():
    """That rungs beat the official kernels in each of 24 cases."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    of_bf16 = [
        rows for rows in cells.latest(data.Results.load(ROOT / "results").cells["h200"]) if "bf16" in set(rows["dtype"])
    ]
    found = [cell for rows in of_bf16 for cell in cells.best(rows).values()]
    assert "FlashAttention-2, FlashAttention-3 and cuDNN in [each of 24 bf16 cases](#beside-official-kernels)" in readme
    assert len(found) == 24
    assert min(cell.ratio for cell in found) > 1.03
    assert all({"fa2", "fa3", "cudnn"} <= set(rows["version"]) for rows in of_bf16)
