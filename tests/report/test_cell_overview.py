"""What you call, and what it gives beside official kernels: the README's table, from made-up logs."""

import pytest

from flashladder.common import catalog
from flashladder.common.paths import ROOT
from flashladder.common.records import cell_results, records
from flashladder.common.records.log import Log
from flashladder.common.records.run_files import RunLog
from flashladder.common.records.schemas import BENCH
from flashladder.common.report.dashboard import data
from flashladder.common.report.pages import cell_overview
from flashladder.tests.support import made_up

EMPTY = "# Title\n\n<!-- cells:begin -->\n<!-- cells:end -->\n"
HEAD = "| you call | cells | mean | least | where | by group | on |"
ON = {"h100": "NVIDIA H100 SXM5 80 GB", "h200": "NVIDIA H200 SXM 141 GB"}


def log(results, ladder, gpu, speeds, group="plain", seqlen=4096, day=1):
    """A cell in a ladder's log; by kernel how much faster than FlashAttention-2."""
    place = {"operation": ladder, "group": group, "case": "d128", "config": "", "run": f"2026010{day}-000000-1"}
    place |= {"time": f"2026-01-0{day}T00:00:00+00:00"}
    rows = [made_up.row("16", "own", seqlen, ratio=speed) | place | {"version": it} for it, speed in speeds.items()]
    kept = [{name: value for name, value in row.items() if name in BENCH.columns} for row in rows]
    Log(results / f"{ladder}_{gpu}.csv", BENCH).append(kept)


@pytest.fixture
def results(tmp_path):
    """Logs of two ladders beside one page, and below a README with markers."""
    (tmp_path / "README.md").write_text(EMPTY)
    made = tmp_path / "results"
    made.mkdir()
    log(made, "backward", "h200", {"fa2": 1, "fa4": 2, "backward/20_a_tile_late": 1.6}, "wide", day=2)
    log(made, "backward", "h200", {"fa2": 1, "fa4": 2, "backward/20_a_tile_late": 2.2}, seqlen=512)
    log(made, "backward", "h200", {"fa2": 1, "backward/20_a_tile_late": 1.1, "backward/18_dependent_launches": 1.2})
    log(made, "backward", "h100", {"fa2": 1, "backward/20_a_tile_late": 9.0})
    log(made, "forward", "h100", {"fa2": 1, "49_every_width": 2.0})
    (made / "backward.md").write_text("# Title\n")
    return made


def table(results):
    """The section, and the table that it writes."""
    readme = results.parent / "README.md"
    logged = data.Results.load(results)
    assert logged.damaged == []
    (section,) = cell_overview.sections(readme, results, logged.cells)
    assert (section.write(), section.write(), section.is_current()) == (True, False, True)
    lines = readme.read_text().splitlines()
    begin = lines.index(HEAD) + 2
    return lines[begin : lines.index("", begin)]


def test_a_row_for_each_ladder_in_their_order(results):
    forward, backward = table(results)
    of_all = "1 | **2.000** | 2.000 | plain, d128, full, 4096"
    assert forward == f"| `attention` | {of_all} | plain 2.000 (2.000) | {ON['h100']}, 2026-01-01 |"
    called = "[gradients of `attention`](results/backward.md)"
    groups = "plain 1.149 (1.100), wide 0.800 (0.800)"  # as the ladder declares them, not as they were logged
    of_all = "3 | **1.018** | 0.800 | wide, d128, full, 4096"
    assert backward == f"| {called} | {of_all} | {groups} | {ON['h200']}, 2026-01-01 to 2026-01-02 |"


def test_each_official_kernel_in_the_first_group(results):
    readme = results.parent / "README.md"
    readme.write_text("<!-- calls:begin -->\n<!-- calls:end -->\n")
    log(results, "backward", "h200", {"fa2": 1, "fa4": 2, "backward/20_a_tile_late": 4}, seqlen=1024)
    (section,) = cell_overview.sections(readme, results, data.Results.load(results).cells)
    head, _, forward, backward = [line for line in section.text().splitlines() if line.startswith("|")]
    assert head == "| you call | it runs | FlashAttention-2 | FlashAttention-4 |"
    assert forward == "| `attention` | 49 | 2.000 |  |"
    called = "[gradients of `attention`](results/backward.md)"  # 2.2, 1.2 and 4 times as fast; twice FlashAttention-4's
    assert backward == f"| {called} | backward/18, backward/20 | 2.194 | 1.483 |"


def test_only_cells_with_an_official_kernel_count(results):
    for seqlen in (1024, 2048, 8192, 16384):
        log(results, "backward", "h100", {"backward/20_a_tile_late": 3.0}, seqlen=seqlen)
    log(results, "mla", "h100", {"mla/05_equal_parts": 3.0})
    rows = table(results)
    assert len(rows) == 2
    assert "| 3 |" in rows[1]
    assert ON["h200"] in rows[1]


def test_a_group_that_the_ladder_does_not_declare_stands_last(results):
    log(results, "backward", "h200", {"fa2": 1, "backward/20_a_tile_late": 1.3}, "new", day=3)
    assert "wide 0.800 (0.800), new 1.300 (1.300) |" in table(results)[1]


def test_without_markers_or_cells_nothing_is_written(results):
    readme = results.parent / "README.md"
    logged = data.Results.load(results).cells
    readme.write_text("# Title\n")
    assert cell_overview.sections(readme, results, logged) == []
    readme.write_text(EMPTY)
    assert cell_overview.sections(readme, results, {}) == []


def test_a_ladder_with_cells_says_what_is_called():
    ladders = {name: catalog.ladder_named(name) for name in catalog.ladders()}
    assert {name for name, ladder in ladders.items() if ladder.cells} >= {"forward", "backward", "decode", "mla"}
    assert all(ladder.called for ladder in ladders.values() if ladder.cells)


def test_the_first_lines_of_the_readme_say_what_the_log_says():
    """That the rung of calls beats each official kernel in each of 24 cases."""
    claim = "Rung 49, which `attention` runs on Hopper, is faster than FlashAttention-2, FlashAttention-3, "
    claim += "FlashAttention-4 and cuDNN in [each of 24 bf16 cases](results/forward.md) of head_dim 64 and 128"
    assert claim in " ".join((ROOT / "README.md").read_text().split())
    assert catalog.ladder_named("forward").launches[0].rung == "49_every_width"
    rows = cell_results.latest(RunLog(ROOT / "results", "forward_h200", BENCH).read()[0])
    rows = rows[rows["group"] == "plain"]
    assert (set(rows["dtype"]), set(rows["head_dim"])) == ({"bf16"}, {64, 128})
    cells = cell_results.results(rows)
    assert len(cells) == 24
    assert all({"fa2", "fa3", "fa4", "cudnn"} < cell.times.keys() for cell in cells)
    assert min(cell.ratio("49_every_width") for cell in cells) > 1.03


def test_the_readme_says_what_hard_inputs_cost():
    """Of rung 48, whose machine code rung 49 has at the head_dim of that log."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    ratios = records.accuracy(ROOT / "results").read()[0].query("version == '48_column_of_ones'")
    least = ratios.groupby("dtype")["time_ratio"].min()
    assert f"In bf16 rung 49 keeps at least {least['bf16']:.2f} of its speed on each" in readme
    assert f"In fp16, scores that lie far apart cost up to {1 - least['fp16']:.0%}".replace("%", " %") in readme
