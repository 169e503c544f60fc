"""Cells beside official kernels on results/LADDER.md and in its picture, from made-up logs."""

import re

import pytest

from flashladder.common.records import benches, cell_results
from flashladder.common.records.log import Log
from flashladder.common.records.schemas import BENCH
from flashladder.common.report import cell_tables
from flashladder.common.report.dashboard import data
from flashladder.common.report.pages import cell_page
from flashladder.tests.support import made_up

RELEASES = {"fa2": "2.11.0", "fa4": "4.0.0b36"}


def lines(run, speeds, size, **changes):
    """The rows of a cell; by kernel how much faster than FlashAttention-2."""
    made = []
    for name, speed in speeds.items():
        version = name if name in RELEASES else f"backward/{name}"
        is_packed = isinstance(size, str)
        line = made_up.row("16", "own", 2048 if is_packed else size, ratio=speed, run=f"2026010{run}-000000-1")
        line |= {"version": version, "config": "", "group": "plain", "case": "d128", "release": RELEASES.get(name)}
        line |= {"time": f"2026-01-0{run}", "operation": "backward", "mix": size if is_packed else None} | changes
        made.append({name: value for name, value in line.items() if name in BENCH.columns})
    return made


@pytest.fixture
def folder(tmp_path):
    """A log of three runs beside a page with markers: the second one measures one cell of the first again."""
    log = Log(tmp_path / "backward_h200.csv", BENCH)
    log.append(lines(1, {"fa2": 1, "fa4": 2, "20_a_tile_late": 1.6}, 512))
    log.append(lines(1, {"fa2": 1, "fa4": 2, "20_a_tile_late": 1.8}, 4096))
    log.append(lines(2, {"fa2": 1, "fa4": 2, "20_a_tile_late": 2.2, "18_dependent_launches": 2.1}, 4096))
    packed = {"group": "packed", "case": "d64", "causal": True}
    log.append(lines(2, {"fa2": 1, "20_a_tile_late": 1.5}, "one long", **packed))
    log.append(lines(2, {"fa2": 1}, "equal", **packed))
    log.append(lines(3, {"fa2": 1, "20_a_tile_late": 1.1}, 512, group=None, case=None))  # of no cell
    (tmp_path / "backward.md").write_text("# Title\n\n<!-- cells:begin -->\n<!-- cells:end -->\n")
    return tmp_path


def loaded(folder):
    results = data.Results.load(folder)
    assert results.damaged == []
    return results


def test_of_each_cell_the_latest_run(folder):
    cells = cell_results.results(loaded(folder).cells["backward"]["h200"])
    found = {(cell.group, cell.size): (cell.official, cell.rung, cell.ratio()) for cell in cells}
    assert found == {
        ("plain", "512"): ("fa4", "backward/20_a_tile_late", pytest.approx(0.8)),
        ("plain", "4096"): ("fa4", "backward/20_a_tile_late", pytest.approx(1.1)),
        ("packed", "one long"): ("fa2", "backward/20_a_tile_late", pytest.approx(1.5)),
        ("packed", "equal"): ("fa2", "", None),
    }
    of_plain = cell_results.ratios([cell for cell in cells if cell.group == "plain"])
    assert (of_plain.count, of_plain.worst.size) == (2, "512")
    assert (of_plain.mean, of_plain.least) == (pytest.approx((0.8 * 1.1) ** 0.5), pytest.approx(0.8))
    assert cell_results.ratios(cells, "backward/18_dependent_launches").mean == pytest.approx(1.05)


def test_other_tables_of_the_log_have_no_cells(folder):
    assert set(benches.summary(loaded(folder).benches)["run"]) == {"20260103-000000-1"}


def test_the_page_and_the_picture(folder):
    chart, page = cell_page.parts(folder, loaded(folder).cells)
    assert [chart.path.name, page.path.name] == ["backward_h200.svg", "backward.md"]
    assert (chart.write(), page.write()) == (True, True)
    assert (chart.is_current(), page.is_current()) == (True, True)
    text = page.path.read_text()
    assert "![Cells of the ladder backward on NVIDIA H200 SXM 141 GB](backward_h200.svg)" in text
    assert "| plain | fastest rung | 2 | 0.938 | 0.800 | d128, full, 512 |" in text
    assert "| plain | rung backward/18 | 1 | 1.050 | 1.050 | d128, full, 4096 |" in text
    assert "| all | fastest rung | 3 | " in text
    assert "| d128 | full | FlashAttention-2 (torch) | 300 | 300 |" in text
    assert "|  |  | rung backward/20 | 480 (0.80) | 660 (1.10) |" in text
    assert "|  |  | rung backward/18 |  | 630 (1.05) |" in text
    assert "| case | mask | kernel | one long | equal |" in text
    words = " ".join(text.split())
    assert "run 20260101-000000-1, 20260102-000000-1, card 0a0a0a0a0a0a" in words
    assert "FlashAttention-2 (torch) 2.11.0, FlashAttention-4 4.0.0b36; 2026-01-01, 2026-01-02." in words
    tips = re.findall(r'data-tip="([^"]*)"', chart.path.read_text())
    assert tips == [
        "d128, full, 512: 0.800&#10;FlashAttention-4 600 TFLOP/s&#10;rung backward/20 480 TFLOP/s",
        "d128, full, 4096: 1.100&#10;FlashAttention-4 600 TFLOP/s&#10;rung backward/20 660 TFLOP/s",
        "d64, causal, one long: 1.500&#10;FlashAttention-2 (torch) 300 TFLOP/s&#10;rung backward/20 450 TFLOP/s",
    ]


def test_without_cells_there_is_neither(folder):
    log = folder / "backward_h200.csv"
    log.unlink()
    assert [*cell_page.parts(folder, loaded(folder).cells)] == []
    Log(log, BENCH).append(lines(3, {"fa2": 1, "20_a_tile_late": 1.1}, 512, group=None, case=None))
    assert loaded(folder).cells == {}


def test_a_run_of_one_rung_has_one_line_a_group(folder):
    rows = lines(1, {"fa4": 2, "20_a_tile_late": 1.6}, 512)
    overview = cell_tables.of_run(rows)[-1]
    assert [[*column.cells] for column in overview.columns][:2] == [["plain", "all"], ["rung backward/20"] * 2]
