"""What tools write into a rung's page: only between markers, and the step of the ladder's largest run."""

from types import SimpleNamespace

import pytest

from flashladder.common.catalog import find
from flashladder.common.errors import ResultsError
from flashladder.common.records import ladders
from flashladder.common.report import ladder_tables, sections
from flashladder.common.report.pages import documents, steps
from flashladder.common.report.sections import Section
from flashladder.tests.support import made_up

MARKED = "# A rung\n\nprose\n\n<!-- step:begin -->\nold\n<!-- step:end -->\n\nmore prose\n"


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(MARKED)
    return path


def row(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_only_what_is_between_the_markers_changes(document):
    assert sections.between(document, "step") == "old"
    section = Section(document, "step", lambda: "new\n\nlines")
    assert not section.is_current()
    assert section.write()
    assert document.read_text() == MARKED.replace("old", "new\n\nlines")
    assert section.is_current()
    assert not section.write()


def test_missing_markers_are_named(document):
    with pytest.raises(ResultsError, match=r"README\.md has no lines <!-- table:begin --> and <!-- table:end -->"):
        Section(document, "table", lambda: "new").write()


def test_a_last_part_is_added_once(document):
    section = Section(document, "tried", lambda: "new", heading="Tried")
    assert not section.is_current()
    assert section.write()
    last = "\n## Tried\n\n<!-- tried:begin -->\nnew\n<!-- tried:end -->\n"
    assert document.read_text() == MARKED + last
    assert not section.write()
    document.write_text(MARKED + "\n## Tried\n\nIn words.\n")
    assert section.write()
    assert document.read_text() == MARKED + last.replace("## Tried\n", "## Tried\n\nIn words.\n")


def made_up_ladder(monkeypatch, folder, **changes):
    """The ladder of a made-up log, in the place of the published ones."""
    made_up.ladder(folder, dtypes=("bf16",), **changes)
    found = ladders.read(folder, [])
    monkeypatch.setattr(steps, "_ladders", lambda: found)
    monkeypatch.setattr(steps, "_summary", lambda: ladders.summary(found))


def test_a_page_says_the_step_of_one_run_and_nothing_where_there_is_none(monkeypatch, tmp_path):
    made_up_ladder(monkeypatch, tmp_path)
    table, said = steps.text(find("02")).split("\n\n")
    assert row(table, "each at its own best, bf16") == ["0.160", "0.760", "x 4.75 ± 0.00"]
    assert "the mean of 2 lengths from 512 to 4,096" in said
    assert steps.text(find("03")) == documents.NOT_TIMED


def test_a_rung_has_no_step_where_another_is_below(monkeypatch, tmp_path):
    """The made-up ladder has no 06, which rung 07 is compared with."""
    made_up_ladder(monkeypatch, tmp_path)
    table, _ = steps.text(find("07")).split("\n\n")
    assert row(table, "each at its own best, bf16") == ["", "0.910", ""]


def test_a_page_has_no_table_where_rounds_were_not_kept(monkeypatch, tmp_path):
    made_up_ladder(monkeypatch, tmp_path, round_us=None)
    assert steps.text(find("02")) == documents.NOT_TIMED


@pytest.mark.parametrize(
    ("step", "said"),
    [((1.01, 1.008, 1.012), "+1.0 ± 0.2 %"), ((1.01, 0.999, 1.02), "no gain"), ((1, 1, 1), "same code")],
)
def test_a_step_whose_interval_holds_one_is_no_gain(step, said):
    value, low, high = step
    assert ladder_tables.step(SimpleNamespace(step=value, step_low=low, step_high=high)) == said
