"""What the book adds to a rung's page: its loop in machine code, its chart, and why it has no exercise."""

import re

import pytest

from flashladder.common import catalog
from flashladder.common.book import rungs, speed
from flashladder.common.paths import PUBLISHED
from flashladder.common.records import benches, cell_results


def parts(name):
    """The headings of what is added, and the text."""
    words, made = rungs.further(catalog.find(name), "<{}>")
    return re.findall("^## (.*)", words, re.MULTILINE), words, made


@pytest.mark.parametrize("name", ["18", "backward/20", "decode/07", "mla/04"])
def test_a_loop_stands_beside_that_of_the_rung_below(name):
    """Which rungs are counted, test_dashboard_figures.py asks."""
    words = parts(name)[1].partition("## The loop in machine code")[2]
    assert "| rung below | this rung | more |" in words
    assert re.search(r"\| all \| \d+ \| \d+ \| [+-]\d+ \|", words)


def test_a_loop_without_another_one_to_compare_it_with():
    assert "The rung below has the same: " in parts("decode/10")[1]
    first = parts("mla/00")[1].partition("## The loop in machine code")[2]
    assert "| in the loop |" in first
    assert "rung below" not in first
    assert "The loop in machine code" not in parts("serving/00")[0], "it has none"


def test_a_chart_of_a_bench_shows_what_was_logged():
    """The lengths of the cells of README's kind, in the run that the page of cells has."""
    logs = benches.read(PUBLISHED, [])
    cells = cell_results.results(cell_results.of_logs(logs)["backward"]["h200"])
    plain = [cell for cell in cells if (cell.group, cell.case, cell.causal) == ("plain", "d128", False)]
    rates = {int(cell.size): cell.figures for cell in plain}
    words, html = speed.chart(catalog.find("backward/20"))
    assert "H200" in words
    assert "head_dim 128, no mask" in words
    shown = re.findall(r"<b>(\d+)</b> ([^<]+)<", html())
    assert [int(rate) for rate, whose in shown if whose == "this rung"] == [
        round(of_length["backward/20_a_tile_late"]) for _, of_length in sorted(rates.items())
    ]
    assert [int(rate) for rate, whose in shown if whose == "FlashAttention-4"] == [
        round(of_length["fa4"]) for _, of_length in sorted(rates.items())
    ]


@pytest.mark.parametrize(("name", "below"), [("17", True), ("backward/16", False)])
def test_the_rung_below_stands_in_a_chart_where_the_same_run_has_it(name, below):
    assert ("rung below" in speed.chart(catalog.find(name))[1]()) == below


def test_a_rung_that_no_run_has_and_figures_of_cold_launches_make_no_chart():
    """Those of decode were taken behind a write to L2, which the timed kernel paid for."""
    assert speed.chart(catalog.find("backward/03")) is None
    assert speed.chart(catalog.find("decode/07")) is None


def test_a_rung_without_an_exercise_says_why():
    assert "No exercise" in parts("04")[0]
    assert catalog.find("04").no_exercise in parts("04")[1]
    assert "No exercise" not in parts("02")[0]
