"""The evidence of rungs: tables that a tool writes, and the check that they are current."""

import re
from types import SimpleNamespace

import pytest

from flashladder.common import console
from flashladder.common.catalog import find, finished
from flashladder.common.errors import ResultsError
from flashladder.common.records import ladders
from flashladder.common.report import ladder_tables, sections
from flashladder.common.report.pages import documents, evidence, steps
from flashladder.common.report.sections import Section
from flashladder.tests import made_up
from flashladder.tests.tiny_ladder import make_rung
from flashladder.tools.commands import evidence as tool

COMMITTED = ("02", "09", "14")  # `flashladder evidence --check` does all of them, in a minute
MARKED = "# A rung\n\nprose\n\n<!-- evidence:begin -->\nold\n<!-- evidence:end -->\n\nmore prose\n"
STORE = "params.lse[threadIdx.x + 128] = 2.0f;"


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = console.run(tool.main, tool.parser(), arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(MARKED)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("ladder")
    make_rung(root, "07_tiny")
    make_rung(root, "08_tinier", body=STORE)
    return root


@pytest.fixture
def ladder(built, monkeypatch):
    """The folder of two tiny rungs; the emulator's counters are made up, as they are no attention kernels."""
    counts = {"07_tiny": {"wavefronts": 80}, "08_tinier": {"wavefronts": 10, "of them by TMA": 4}}
    monkeypatch.setattr(evidence, "_count", lambda artifact: counts[artifact.version])
    return built


@pytest.fixture
def upper(ladder):
    """The upper rung, without evidence."""
    version = find("08", ladder)
    (version.directory / documents.EVIDENCE).unlink(missing_ok=True)
    return version


def row(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_only_what_is_between_the_markers_changes(document):
    assert sections.between(document, "evidence") == "old"
    section = Section(document, "evidence", lambda: "new\n\nlines")
    assert section.write()
    assert document.read_text() == MARKED.replace("old", "new\n\nlines")
    assert not section.write()


def test_missing_markers_are_named(document):
    with pytest.raises(ResultsError, match=r"README\.md has no lines <!-- table:begin --> and <!-- table:end -->"):
        Section(document, "table", lambda: "new").write()


def test_tables_say_before_and_after(upper):
    text = evidence.text(upper)
    assert text.startswith("07_tiny → 08_tinier, both with `dtype=bf16,head_dim=64,block_m=64,num_warps=4,")
    before, after = row(text, "instructions in the kernel")[0].split(" → ")
    assert int(after) > int(before)
    assert row(text, "shared memory, bytes") == ["1,024", "1,024"]  # what does not change stands once
    assert row(text, "wavefronts") == ["80 → 10"]
    assert row(text, "of them by TMA") == ["0 → 4"]
    assert f"ptxas {sections.compiler()}" in text
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", sections.compiler())


def test_the_lowest_rung_stands_alone(ladder):
    text = evidence.text(find("07", ladder))
    assert text.startswith("07_tiny with `dtype=bf16")
    assert "→" not in text


def test_evidence_is_begun_kept_and_found_out_of_date(upper):
    readme = upper.directory / documents.EVIDENCE
    assert not evidence.section(upper).is_current()
    assert evidence.section(upper).write()
    assert readme.read_text().startswith("# 08 Tiny: evidence\n\n")
    assert f"## {documents.BY_TOOLS}\n\n<!-- evidence:begin -->\n07_tiny → 08_tinier" in readme.read_text()
    assert evidence.section(upper).is_current()
    assert not evidence.section(upper).write()

    readme.write_text(readme.read_text().replace("## Tried", "By hand.\n\n## Tried").replace("80 → 10", "80 → 11"))
    assert evidence.section(upper).is_current() is False
    assert evidence.section(upper).write()
    assert "By hand." in readme.read_text()
    assert "80 → 10" in readme.read_text()


def test_what_another_compiler_made_is_not_judged(upper):
    evidence.section(upper).write()
    readme = upper.directory / documents.EVIDENCE
    readme.write_text(readme.read_text().replace(sections.compiler(), "12.4.131").replace("80 → 10", "80 → 11"))
    assert evidence.section(upper).is_current() is None


def test_a_rung_is_compared_with_one_for_the_same_instructions(ladder, upper):
    yaml = (upper.directory / "version.yaml").read_text()
    hopper = make_rung(ladder, "09_hopper", yaml=yaml.replace("ampere", "hopper"))
    ampere = make_rung(ladder, "10_ampere", yaml=yaml)
    assert [request.arch for request in evidence.requests(hopper)] == ["sm_90a"]
    assert [request.version.name for request in evidence.requests(ampere)] == ["08_tinier", "10_ampere"] * 2


def test_check_fails_where_evidence_is_out_of_date(ladder, upper, run, monkeypatch):
    monkeypatch.setattr(tool.catalog, "select", lambda names: [find(name, ladder) for name in names])
    assert run("08")[:2] == (0, "08_tinier/evidence.md brought up to date\n")
    assert run("08", "--check")[:2] == (0, "0 of 1 rungs and pages are out of date\n")
    readme = upper.directory / documents.EVIDENCE
    readme.write_text(readme.read_text().replace("80 → 10", "80 → 11"))
    code, out, _ = run("08", "--check")
    assert code == tool.EXIT_STALE
    assert "08_tinier/evidence.md is out of date; `flashladder evidence 08` mends it" in out
    assert "80 → 11" in readme.read_text()


def test_every_rung_has_evidence():
    for version in finished():
        assert "ptxas" in sections.between(version.directory / documents.EVIDENCE, documents.TABLES), version.name


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_evidence_is_current(name):
    is_current = evidence.section(find(name)).is_current()
    if is_current is None:
        pytest.skip(f"made with another compiler than {sections.compiler()}")
    assert is_current, f"`flashladder evidence {name}` mends it"


def measured(monkeypatch, folder, rung, **changes):
    """The table of a rung of a made-up ladder, and where its figures are from."""
    made_up.ladder(folder, dtypes=("bf16",), **changes)
    found = ladders.read(folder, [])
    monkeypatch.setattr(steps, "_ladders", lambda: (found, ladders.summary(found)))
    return steps.measured(find(rung))


def test_a_measured_rung_says_its_ratios_its_step_and_its_configuration(upper, monkeypatch, tmp_path):
    assert steps.measured(upper) == []
    assert steps.text(upper) == steps.NOT_TIMED
    table, source = measured(monkeypatch, tmp_path, "02")
    below, ours, step, configuration, registers = row(table, "each at its own best, bf16")
    assert (below, ours) == ("0.160 (0.160 to 0.160)", "0.760 (0.759 to 0.761)")
    assert step == "x 4.75 ± 0.00"
    assert (configuration, registers) == ("64x64x4, default", "232")
    assert row(table, "both in the one fixed configuration, bf16")[3] == "fixed"
    assert source.startswith("One run: made-up on NVIDIA H100 80GB HBM3, card 0a0a0a0a0a0a")


def test_a_page_says_the_step_of_one_run_and_nothing_where_there_is_none(monkeypatch, tmp_path):
    measured(monkeypatch, tmp_path, "02")
    table, said = steps.text(find("02")).split("\n\n")
    assert row(table, "each at its own best, bf16") == ["0.160", "0.760", "x 4.75 ± 0.00"]
    assert "the mean of 2 lengths from 512 to 4,096" in said
    assert steps.text(find("03")) == steps.NOT_TIMED


@pytest.mark.parametrize(
    ("step", "said"),
    [((1.01, 1.008, 1.012), "+1.0 ± 0.2 %"), ((1.01, 0.999, 1.02), "no gain"), ((1, 1, 1), "same code")],
)
def test_a_step_whose_interval_holds_one_is_no_gain(step, said):
    value, low, high = step
    assert ladder_tables.step(SimpleNamespace(step=value, step_low=low, step_high=high)) == said


def test_a_rung_has_no_step_where_rounds_were_not_kept_or_another_is_below(monkeypatch, tmp_path):
    """The made-up ladder has no 06, which rung 07 is compared with."""
    folder = tmp_path / "whole"
    folder.mkdir()
    table, _ = measured(monkeypatch, folder, "07")
    assert row(table, "each at its own best, bf16")[:3] == ["", "0.910 (0.909 to 0.911)", ""]
    table, source = measured(monkeypatch, tmp_path, "02", round_us=None)
    assert row(table, "each at its own best, bf16")[2] == ""
    assert source.startswith("From made-up on NVIDIA H100")


def test_the_ratios_in_all_evidence_are_those_of_the_log():
    for version in finished():
        text = sections.between(version.directory / documents.EVIDENCE, documents.TABLES)
        assert all(part in text for part in steps.measured(version)), (
            f"`flashladder evidence {version.number}` mends it"
        )
