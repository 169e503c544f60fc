"""What the pages of versions/ promise a reader: few parts, links that lead somewhere, names and figures that exist."""

import re
from functools import cache

import pytest

from flashladder.common import own
from flashladder.common.catalog import finished, versions
from flashladder.common.paths import VERSIONS
from flashladder.common.report import sections
from flashladder.common.report.pages import documents, steps
from flashladder.common.workshop import scaffold, tried

PAGES = [page for page in sorted(VERSIONS.glob("**/*.md")) if own.PRIVATE not in page.parents]
RUNGS = finished()
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
MOST = 6500  # bytes of the four parts
WHOLE = 8000  # bytes of a page: one screen or two
MADE = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
FIGURE = re.compile(r"(?<![\w.,])(?:[+-]?\d+\.\d %|\d\.\d{3}|\d{1,3}(?:,\d{3})+)(?![\d,]*\d)")
DATE = re.compile(r"20\d\d-\d\d-\d\d")

of_each_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)


def prose(path):
    """What people wrote of a page, without what tools write into it."""
    return MADE.sub("", path.read_text())


def parts(path):
    """The parts of a page, by their headings."""
    _, *found = re.split(r"^## (.*)\n", prose(path), flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def behind(path):
    """The names of the parts of a page that may have dates."""
    return [*parts(path)][len(documents.PARTS) :]


def paragraphs(path):
    return re.split(r"\n\n|\n(?=- )", prose(path))


@cache
def anchors(path):
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def made_by_tools():
    return "".join(made[0] for page in PAGES for made in MADE.finditer(page.read_text()))


@of_each_rung
def test_a_page_has_its_parts_and_no_history(rung):
    page = rung.directory / documents.PAGE
    text = page.read_text()
    beginning, _, _ = text.partition("\n## ")
    assert " ".join(beginning.split()) == f"# {rung.number} {rung.title} {rung.idea}"
    assert tuple(parts(page))[: len(documents.PARTS)] == documents.PARTS
    assert documents.BY_HAND not in behind(page)[1:]
    assert documents.DROPPED not in behind(page)[:-1]
    assert all(part.strip() for name, part in parts(page).items() if name != documents.DROPPED)
    assert scaffold.OPEN not in text
    assert sections.between(page, documents.STEP) == steps.text(rung), "`flashladder dashboard` mends it"
    front, _, _ = text.partition(f"\n## {next(iter(behind(page)), '')}\n")
    assert not DATE.search(front)
    assert len(front.encode()) <= MOST
    assert len(text.encode()) <= WHOLE, f"what was measured by hand may lie in {documents.MEASURED}"


@of_each_rung
def test_the_table_of_what_was_tried_is_that_of_the_log(rung):
    assert all(section.is_current() for section in tried.sections_of(rung)), "`flashladder dashboard` mends it"
    rows, damaged = tried.log_of(rung).read()
    assert not damaged
    for row in rows.itertuples():
        assert rung.name in (row.version, row.parent)
        assert not row.patch or (rung.directory / row.patch).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(VERSIONS).as_posix())
def test_links_lead_somewhere(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@of_each_rung
def test_names_in_where_to_look_are_in_the_files_linked_there(rung):
    page = rung.directory / "README.md"
    part = parts(page)["Where to look"]
    files = [(page.parent / path).resolve() for path, _ in LINK.findall(part)]
    known = " ".join(path.read_text() for path in files if path.suffix != ".md")
    names = re.findall(r"`([^`]+)`", re.sub(r"\[[^\]]*\]\([^)]*\)", "", part))
    assert names
    assert [name for name in names if name not in known and not name.startswith("flashladder ")] == []


@of_each_rung
def test_a_figure_comes_from_a_tool_or_says_when_it_was_measured(rung):
    """Or it stands again behind the parts without dates, with its date."""
    page = rung.directory / documents.PAGE
    written = [path for path in (page, rung.directory / documents.MEASURED) if path.exists()]
    said = [paragraph for path in written for paragraph in paragraphs(path)]
    dated = [paragraph for paragraph in said if DATE.search(paragraph)]
    known = made_by_tools() + "".join(dated)
    for paragraph in said:
        if paragraph not in dated:
            assert [figure for figure in FIGURE.findall(paragraph) if figure not in known] == [], paragraph


def test_the_path_names_every_rung_as_its_page_does():
    named = re.findall(r"\[(\d\d) ([^\]]*)\]\((\w+)/README\.md\)", (VERSIONS / "forward" / "README.md").read_text())
    assert [version for version in named if version[0] < "20"] == [
        (version.number, version.title, version.name) for version in finished() if version.number < "20"
    ]
    path = [name for _, _, name in named]
    assert path == [version.name for version in versions() if version.name in path or not version.draft]
