"""`flashladder dashboard` on made-up logs: the means, the page, the README's part, and what it says to bad input."""

import re

import pytest

from flashladder.common import catalog, console
from flashladder.common.paths import ROOT
from flashladder.common.records import ladders
from flashladder.common.records.log import Log
from flashladder.common.records.schemas import BENCH
from flashladder.common.report.dashboard import data
from flashladder.common.report.pages import ladder as ladder_page
from flashladder.common.report.pages import readme as readme_part
from flashladder.tests.support import made_up
from flashladder.tools.commands import dashboard


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder of results with a page on the ladder, and a README above it."""
    parts = "<!-- picture:begin -->\n<!-- picture:end -->\n\n<!-- ladder:begin -->\nold\n<!-- ladder:end -->\n"
    (tmp_path / "README.md").write_text(f"# Title\n\n{parts}\nThe end.\n")
    path = tmp_path / "results"
    path.mkdir()
    (path / ladder_page.PAGE).write_text("<!-- ladder:begin -->\n<!-- ladder:end -->\n")
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(path))
    return path


@pytest.fixture
def run(folder, capsys):
    """Calls the tool as a person does; gives its exit code, output and errors."""

    def call(*arguments):
        readme = folder.parent / "README.md"
        code = console.run(dashboard.main, dashboard.parser(), ["--readme", str(readme), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def everything(folder):
    """A folder with every kind of log."""
    made_up.ladder(folder)
    made_up.runs(folder)
    made_up.study(folder)
    made_up.opcodes(folder)
    return folder


def page(folder):
    return (folder / "dashboard.html").read_text()


def test_a_gpu_that_nobody_described_has_no_limits(folder, run):
    made_up.ladder(folder, gpu="some_gpu", dtypes=("bf16",))
    assert run()[0] == 0
    assert ladders.Limits.of("some_gpu") is None
    assert "dense peak" not in page(folder)
    assert "some_gpu" in page(folder)


# The page


def test_the_page_has_everything_and_needs_nothing_else(everything, run):
    code, _, err = run()
    assert code == 0, err
    html = page(everything)
    titles = ("Static global stride", "h100 fp16", "Roofline", "Instruction mix", "16_h100", "Latest runs", "power cap")
    assert not [title for title in titles if title not in html]
    assert not re.findall(
        r"""(?:src|srcset|href)=["'](?!\.\./versions/|#|data:image/)[^"']*["']""", re.sub("xlink:href", "use", html)
    )
    assert not re.findall(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", html)
    table = (everything / "dashboard.csv").read_text().splitlines()
    assert len(table) == 1 + 4 * 2 * 2
    assert table[0].startswith("gpu,dtype,rung,version,kind,title,lengths,unit,rate")


def test_without_results_the_page_says_how_to_get_some(folder, run):
    code, _, _ = run()
    assert code == 0
    assert "No ladder has been measured yet" in page(folder)
    for command in ("ladder", "experiment", "run", "dashboard --sass"):
        assert f"flashladder {command}" in page(folder)
    assert "Nothing has been measured yet" in (folder.parent / "README.md").read_text()
    assert run("--check")[0] == 0


def test_damaged_lines_are_reported_and_left_in_place(everything, run):
    log = everything / "ladder_h100.csv"
    study = everything / "tuning" / "16_h100.csv"
    for path in (log, study):
        lines = path.read_text().splitlines(keepends=True)
        lines.insert(2, "<b>what is this</b>\n")
        path.write_text("".join(lines))
    before = log.read_text(), study.read_text()
    code, _, err = run()
    assert code == 0
    for path in (log, study):
        assert f"{path}:3: 1 cells under" in err
        assert f"{path}:3: 1 cells under" in page(everything)
    assert "2 damaged lines in the logs" in page(everything)
    assert (log.read_text(), study.read_text()) == before


def test_a_file_that_is_another_table_is_named(folder, run):
    (folder / "ladder_h100.csv").write_text("name,age\nAda,36\n")
    code, _, err = run()
    assert code == console.EXIT_ERROR
    assert "ladder_h100.csv:1: this is no header of this log" in err


def test_what_the_logs_say_is_text_and_no_markup(folder, run):
    made_up.ladder(folder).append([made_up.row("02", "own", 512, notes="<script>alert(1)</script>")])
    run()
    assert "<script>alert" not in page(folder)


def test_a_study_shows_its_trials_and_its_winner(everything, run):
    run()
    html = page(everything)
    words = "4 trials of 16_static_stride, 3 measured; the winner, among the finalists, has the ratio 1.040"
    assert f"{words}: block_m=128, num_warps=4" in html
    for label in ("winner", "best so far", "FlashAttention-2"):
        assert f">{label}</text>" in html[html.index(words) :]
    assert 'data-tip="trial 2: hung: because&#10;block_m=64,num_warps=4"' in html


def test_what_slowed_the_gpu_is_said_once(folder, run):
    log = made_up.ladder(folder, dtypes=("bf16",))
    log.append([made_up.row("16", "own", 512, power_cap_share=0.97, notes="the GPU is shared with 2 other processes")])
    run()
    assert "The GPU: power cap in 90 to 97 % of samples; the GPU is shared with 2 other processes." in page(folder)


# The README


def test_the_readme_gets_its_table_and_its_chart(everything, run):
    run()
    text = (everything.parent / "README.md").read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("<!-- ladder:end -->\n\nThe end.\n")
    assert "(results/milestones_h100.svg)" in text
    (swizzling,) = re.findall(r"^\| \[02 Swizzling\]\(\S*\) (.*)$", text, re.MULTILINE)
    assert swizzling == f"| 228 | **0.76** | {catalog.find('02').milestone} |"
    assert "| FlashAttention-2, as torch ships it | 300 | 1 |" in text
    assert "The fastest rung of this run is [16]" in " ".join(text.split())
    assert "[All rungs](results/ladder.md)" in " ".join(text.split())
    assert "old" not in text
    charts = {path.name for path in everything.glob("*.svg")}
    assert charts == {"ladder_h100.svg", "milestones_h100.svg"}


def test_the_page_has_all_of_the_ladder(everything, run):
    run()
    text = (everything / ladder_page.PAGE).read_text()
    assert re.search(r"^!\[The ladder on .*\]\(ladder_h100.svg\)$", text, re.MULTILINE)
    expected = (
        "| Static global stride | 318 | **1.060** | 1.059 to 1.061 | +16.5 ± 0.0 % | 0.954 | +16.5 ± 0.0 % | 1.060 "
        "| 232 + 72 B | 128x64x4, default |"
    )
    assert expected in text
    assert "|  | FlashAttention-2 | 300 | 1 |" in text


@pytest.mark.parametrize(
    "ladder", [name for name in catalog.ladders() if any(rung.milestone for rung in catalog.versions(ladder=name))]
)
def test_about_ten_rungs_of_each_ladder_are_on_its_page_or_the_readme(ladder):
    text = (ROOT / ("README.md" if ladder == catalog.FIRST else f"versions/{ladder}/README.md")).read_text()
    new = {rung.title: rung.milestone for rung in catalog.versions(ladder=ladder) if rung.milestone}
    assert 5 <= len(new) <= 11
    for title, milestone in new.items():
        assert re.search(rf"^\| \[\S+ {re.escape(title)}\]\(\S+\) \|.* {re.escape(milestone)} \|$", text, re.MULTILINE)


@pytest.mark.slow
def test_check_says_what_is_out_of_date_and_changes_nothing(everything, run):
    readme, chart = everything.parent / "README.md", everything / "ladder_h100.svg"
    code, out, _ = run("--check")
    assert code == dashboard.EXIT_STALE
    assert "README.md is out of date" in out.replace("\n", "")
    assert not chart.exists()
    run()
    assert run("--check")[0] == 0

    made_up.ladder(everything).append([made_up.row("16", "own", 512, ratio=1.3)])
    before = readme.read_text(), chart.read_text()
    code, out, _ = run("--check")
    assert code == dashboard.EXIT_STALE
    assert "README.md" in out
    assert "ladder_h100.svg" in out.replace("\n", "")
    assert (readme.read_text(), chart.read_text()) == before
    run()
    assert run("--check")[0] == 0

    readme.write_text(readme.read_text().replace("0.76", "0.96"))
    assert run("--check")[0] == dashboard.EXIT_STALE
    run()
    chart.unlink()
    assert run("--check")[0] == dashboard.EXIT_STALE


def test_a_readme_without_markers_is_left_alone(everything, run):
    readme = everything.parent / "README.md"
    readme.write_text("# Title\n")
    code, _, err = run()
    assert code == console.EXIT_ERROR
    assert "<!-- ladder:begin -->" in err
    assert readme.read_text() == "# Title\n"


def test_the_projects_own_readme_is_up_to_date(monkeypatch, capsys):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(ROOT / "results"))
    code = console.run(dashboard.main, dashboard.parser(), ["--check"])
    assert code == 0, capsys.readouterr().out


def test_the_page_tells_runs_with_a_window_or_a_softcap(everything, run):
    def log(**bounds):
        rows = made_up.row("16", "own", 512, time="2026-01-03", num_heads=3, **bounds)
        Log(everything / "bench.csv", BENCH).append([{k: v for k, v in rows.items() if k in BENCH.columns}])

    for bounds in ({"softcap": 0.0}, {"window_left": 40, "softcap": 0.0}, {"window_right": 0, "softcap": 2.5}):
        log(**bounds)
    run()
    found = re.findall(r"32 x 3 x 512 x 128 ([^<]*)<", page(everything))
    assert found == ["bf16", "bf16, window 40", "bf16, window all,0, softcap 2.5"]


def test_the_readmes_are_not_told_of_other_results(everything, capsys, monkeypatch):
    """Without --readme, what a folder of results elsewhere says goes into that folder and nowhere else."""
    project = everything.parent / "project"
    (project / "results").mkdir(parents=True)
    readme = project / "README.md"
    readme.write_text("<!-- ladder:begin -->\nof the project\n<!-- ladder:end -->\n")
    monkeypatch.setattr(dashboard, "ROOT", project)
    rows = made_up.row("16", "own", 512)
    log = Log(everything / "references.csv", BENCH)
    log.append([{name: value for name, value in rows.items() if name in BENCH.columns} | {"version": "23_general"}])
    before = {path: path.read_bytes() for path in ROOT.glob("versions/*/README.md")}

    def call(*arguments):
        return console.run(dashboard.main, dashboard.parser(), [*arguments]), capsys.readouterr().out

    code, out = call()
    assert code == 0
    assert "the READMEs are left as they are" in out
    assert "of the project" in readme.read_text()
    assert {path: path.read_bytes() for path in before} == before
    assert list((project / "results").iterdir()) == []
    assert (everything / "dashboard.html").exists()
    assert call("--check")[0] == 0, "the folder's own charts are current, and no README is held against it"

    monkeypatch.setenv("FLASHLADDER_RESULTS", str(project / "results"))
    made_up.ladder(project / "results")
    parts = readme_part.parts(readme, project / "results", _loaded(project / "results"))
    assert readme in [part.path for part in parts if not part.is_current()]


def _loaded(folder):
    found = data.Results.load(folder).ladders
    return list(ladder_page.measured(found, ladders.summary(found)))


def test_only_ladders_of_one_run_are_published(folder, run):
    """One of joined runs stands there as long as there is no other, without steps."""
    joined = made_up.ladder(folder, round_us=None)
    run()
    readme, page_of_all = folder.parent / "README.md", folder / ladder_page.PAGE
    assert "Joined of 1 runs" in page_of_all.read_text()
    assert "| **1.060** | 1.059 to 1.061 |  |" in page_of_all.read_text()
    made_up.ladder(folder, gpu="h200", beside=("cudnn", "fa3", "triton"))
    run()
    text = page_of_all.read_text()
    assert "Joined" not in text
    for document in (text, readme.read_text()):
        assert "ladder_h100" not in document
        assert "NVIDIA H200 SXM 141 GB, bf16" in document
    assert "| FlashAttention-3 | 600 | **2.00** |" in readme.read_text()
    assert "| cuDNN (torch) | 570 | **1.90** |" in readme.read_text()
    assert "One run: made-up on NVIDIA H100 80GB HBM3, card 0a0a0a0a0a0a" in text
    assert "90 % of samples at the power cap, 0 % slowed by heat" in text.replace("\n", " ")
    assert "|  | Triton | 390 | **1.300** |" in text
    assert "cuDNN (torch), 1.90" in (folder / "ladder_h200.svg").read_text()
    assert '<th title="fa3">fa3</th>' in page(folder)
    assert joined.path.exists()


def test_two_runs_stand_side_by_side(folder, run):
    made_up.ladder(folder, gpu="h200", time="2026-01-01", run="one")
    other = made_up.ladder(folder, gpu="h200", run="two", gpu_id="0b0b0b0b0b0b")
    lines = [
        made_up.row(n, "own", s, ratio=1.01 * made_up.RATIOS[n], run="two", gpu_id="0b0b0b0b0b0b")
        for n in made_up.RATIOS
        for s in made_up.LENGTHS
    ]
    other.append(lines)
    run()
    text = (folder / ladder_page.PAGE).read_text()
    assert "| rung | run two | run one | gap |" in text
    assert "| 16 Static global stride | 1.071 | 1.060 | -1.0 % |" in text
    assert "<td>16 Static global stride</td><td>1.071</td><td>1.060</td><td>-1.0 %</td>" in page(folder)


def test_without_a_gpu_runs_have_no_rates(folder, run):
    """A log of nothing but emulated runs, as on a machine where FlashLadder was just installed."""
    made_up.runs(folder)
    (folder / "bench.csv").unlink()
    log = folder / "runs.csv"
    log.write_text("".join(line for line in log.open() if "emulator" in line or line.startswith("time,")))
    assert run()[0] == 0
    assert "<td>emulator</td>" in page(folder)


def test_an_unknown_gpu(run):
    code, _, err = run("--sass", "h1000")
    assert code == console.EXIT_ERROR
    assert "h1000" in err
