"""What the dashboard shows, apart from its page: figures that logs come to, the mix of instructions, pictures."""

import itertools
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from flashladder.common.measure.statistics import harmonic_mean
from flashladder.common.paths import ROOT
from flashladder.common.records import ladders
from flashladder.common.report.charts import ladder as figures
from flashladder.common.report.charts import studies, theme
from flashladder.common.report.charts.roofline import milestones
from flashladder.common.report.dashboard import data, opcodes, view
from flashladder.tests.support import made_up


def test_means_over_lengths(tmp_path):
    log = made_up.ladder(tmp_path, dtypes=("bf16",))
    log.append([made_up.row("16", "own", 512, ratio=1.2), made_up.row("16", "own", 4096, ratio=1.0)])
    # the latest of a run count
    lines = ladders.summary(data.Results.load(tmp_path).ladders)
    line = lines[(lines["rung"] == "16") & (lines["kind"] == "own")].iloc[0]
    assert line["lengths"] == 2
    assert line["rate"] == pytest.approx(harmonic_mean([360, 300]))
    assert line["official_rate"] == pytest.approx(300)
    assert line["ratio"] == pytest.approx(np.sqrt(1.2))
    assert line["ratio_high"] / line["ratio"] - 1 == pytest.approx(made_up.HALF_WIDTH / np.sqrt(2), rel=0.01)
    assert line["of_peak"] == pytest.approx(100 * line["rate"] / 989.4)
    assert line["of_mma_sync"] == pytest.approx(1.5 * line["of_peak"])
    assert line["step"] == pytest.approx(np.sqrt(1.2) / 0.91, rel=1e-3)
    assert line["below"] == "07_auto_tuned"
    assert line["step_low"] < line["step"] < line["step_high"]


def test_the_heat_map_tells_ratios_apart():
    def strength(ratio):
        row = SimpleNamespace(ratio=ratio, ratio_low=ratio, ratio_high=ratio, tflops=1.0, verdict="")
        return int(view._heat_cell(row)["strength"])

    shades = [strength(ratio) for ratio in (1.0, 1.05, 1.25, 1.5, 1.9, 2.3)]
    assert all(later - earlier >= 6 for earlier, later in itertools.pairwise(shades)), shades
    assert strength(1 / 2.3) == strength(2.3)


def test_rows_without_figures_do_not_count(tmp_path):
    log = made_up.ladder(tmp_path, dtypes=("bf16",))
    log.append([made_up.row("16", "own", 512, passed=False) | {"time_us": None, "tflops": None, "ratio": None}])
    log.append([made_up.row("07", "fixed", 512, dtype="fp16")])  # its own configuration is still to be measured
    results = data.Results.load(tmp_path)
    assert len(results.ladders["h100"].rows) == 16
    assert set(results.ladders["h100"].rows["dtype"]) == {"bf16"}


def test_instructions_are_counted_for_each_product(tmp_path):
    """Of a rung with wgmma for each of these, whatever mma.sync a rare way through its loop has."""
    made_up.opcodes(tmp_path)
    mixes = data.mixes(data.Results.load(tmp_path).sass["h100"])
    assert {name: list(table.index) for name, table in mixes.items()} == {
        "mma.sync": ["01_base", "02_swizzling"],
        "wgmma": ["37_no_maxima"],
    }
    assert mixes["wgmma"].loc["37_no_maxima"].to_dict() == {"tensor": 1, "fma": 20, "other": 8}
    table = mixes["mma.sync"]
    assert table.loc["01_base"].to_dict() == {"tensor": 1, "lsu": 0.5, "fma": 0.25, "other": 3 / 128}
    assert table.loc["02_swizzling", "fma"] == 0.25


def test_the_committed_instruction_mix_has_every_rung():
    """`flashladder dashboard --sass h100` brings it up to date."""
    counted = data.Results.load(ROOT / "results").sass["h100"]["version"]
    without_loop = {"serving/00_merge"}
    assert set(counted) == ladders.titles().keys() - without_loop


def test_milestones_are_the_large_steps_and_the_fastest(tmp_path):
    made_up.ladder(tmp_path, dtypes=("bf16",))
    own = data.Results.load(tmp_path).ladders["h100"].rows.query("kind == 'own'")
    assert milestones(own) == ["01_base", "02_swizzling", "07_auto_tuned", "16_static_stride"]
    assert milestones(own.replace({"version": {"07_auto_tuned": "18_x"}}))[-1] == "16_static_stride"


def test_the_rungs_are_disassembled_into_the_log_of_the_mix(tmp_path, monkeypatch):
    monkeypatch.setattr(opcodes.ladders, "titles", lambda: {"01_base": "Base", "02_swizzling": "Swizzling"})
    path = opcodes.count("h100", tmp_path)
    assert path == tmp_path / "sass_h100.csv.gz"
    table = data.mixes(data.Results.load(tmp_path).sass["h100"])["mma.sync"]
    assert list(table.index) == ["01_base", "02_swizzling"]
    assert (table["tensor"] == 1).all()
    assert (table[["lsu", "fma", "alu", "mufu"]] > 0).all(axis=None)


# The pictures


def test_a_picture_is_painted_in_each_scheme_and_always_the_same(tmp_path):
    made_up.ladder(tmp_path, dtypes=("bf16",))
    summary = ladders.summary(data.Results.load(tmp_path).ladders)
    chart = theme.Chart(tmp_path / "a.svg", "Title", lambda: figures.ladder(summary))
    assert chart.write()
    drawn = chart.path.read_text()
    assert chart.write()
    assert chart.path.read_text() == drawn
    light, dark = re.search("<style>(.*)@media .prefers-color-scheme: dark.(.*)</style>", drawn).groups()
    assert f"--own: {theme.PALETTE['own'][0]};" in light
    assert f"--own: {theme.PALETTE['own'][1]};" in dark
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) == set(re.findall(r"--(\w+):", light))
    assert not re.search(r"#fe..ed", drawn)
    ElementTree.fromstring(drawn)


def test_a_picture_in_the_page_follows_its_scheme_and_tells_what_its_marks_are(tmp_path):
    made_up.ladder(tmp_path, dtypes=("bf16",))
    svg = theme.inline_svg(figures.ladder(ladders.summary(data.Results.load(tmp_path).ladders)), "name", "Title")
    assert "var(--own)" in svg
    assert "#fe" not in svg
    assert 'aria-label="Title"' in svg
    words = "16 Static global stride, its own configuration&#10;318 TFLOP/s, ratio 1.060 [1.059, 1.061]&#10;"
    assert f'data-tip="{words}' in svg
    identities = re.findall(r' id="([^"]*)"', svg)
    assert all(f"#{identity}" in svg for identity in identities)


def test_a_ratio_left_of_the_scale_is_a_figure_at_its_edge(tmp_path):
    made_up.ladder(tmp_path, dtypes=("bf16",))
    summary = ladders.summary(data.Results.load(tmp_path).ladders)
    _, axes = figures.ladder(summary).axes
    arrows = [text for text in axes.texts if text.arrow_patch]
    below = summary[summary["ratio"] < figures.LEAST_RATIO]
    assert sorted(text.get_text() for text in arrows) == sorted(f"{ratio:.3f}" for ratio in below["ratio"])
    assert len({text.xy for text in arrows}) == len(arrows) > 1, "none covers another"
    assert all(min(line.get_xdata()) >= figures.LEAST_RATIO for line in axes.lines if len(line.get_xdata()))


def test_a_study_as_optuna_draws_it():
    configs = [f"block_m={m},block_n={n}" for m in (64, 128) for n in (32, 64)]
    trials = pd.DataFrame({"config": configs, "ratio": [1.0, 1.1, 1.2, float("nan")]})
    drawn = studies.pictures(trials)
    assert drawn.keys() == {"History", "Importances", "Parallel coordinates"}
    assert all(picture.startswith("data:image/png;base64,iVBOR") for picture in drawn.values())
    assert studies.pictures(trials[2:]) == {}, "there is nothing to be seen yet"
