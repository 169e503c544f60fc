"""Pages, their order, and code beside code: what needs neither Sphinx nor a browser."""

import sys

import pytest

from flashladder.common import book, catalog
from flashladder.common.book import code, pages
from flashladder.common.paths import ROOT
from flashladder.tools.commands import main


def test_each_page_stands_in_one_table_of_contents():
    found = pages.pages()
    below = [page for tables in pages.tables(found).values() for table in tables.values() for page in table]
    assert sorted(below) == sorted(set(found) - {ROOT / pages.PAGE})


def test_the_parts_of_the_book_name_pages_that_exist():
    assert [name for part in pages.PARTS.values() for name in part if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("README.md", "index"),
        ("docs/tuner.md", "docs/tuner"),
        ("versions/forward/02_swizzling/README.md", "versions/forward/02_swizzling/index"),
        ("versions/forward/02_swizzling/kernel.cu", "versions/forward/02_swizzling/kernel.cu"),
        ("configs/gpus", "configs/gpus/index"),
    ],
)
def test_where_the_book_has_a_page(path, document):
    assert pages.document(ROOT / path) == document


@pytest.fixture
def files(tmp_path):
    """Two of thirty lines, of which the sixteenth differs, and the upper one has one more at its end."""
    lines = [f"int line_{number};" for number in range(30)]
    lower, upper = tmp_path / "lower.cu", tmp_path / "upper.cu"
    lower.write_text("\n".join(lines))
    upper.write_text("\n".join([*lines[:15], "float changed;", *lines[16:], "int last;"]))
    return lower, upper


def test_what_differs_is_marked_and_what_is_the_same_is_folded(files):
    html = code.beside(*files, ("one", "two"))
    changed = html.count('<div class="pair changed">')
    assert changed == 2
    assert html.count("<summary>11 lines are the same</summary>") == 1  # 15 above, without 4 that stay
    assert html.count("<summary>6 lines are the same</summary>") == 1  # 14 between, without 4 at each end
    marked = html.split('<div class="pair changed">')[1].partition("</div>")[0]
    assert "line_15" in marked
    assert "changed" in marked
    assert "line_14" not in marked


def test_a_line_keeps_its_number_and_no_markup_of_its_own(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text("// a < b\nint x;\n")
    html = code.listing(path, {})
    assert 'id="L2" data-line="2"' in html
    assert "a &lt; b" in html


def test_includes_lead_to_the_pages_of_headers():
    kernel = catalog.find("17").kernel
    header = code.included(kernel)["17_lazy_rescale/lazy_softmax.cuh"]
    assert header == kernel.with_name("lazy_softmax.cuh")
    assert '<a class="cpf" href="there.html">' in code.listing(
        kernel, {"17_lazy_rescale/lazy_softmax.cuh": "there.html"}
    )


def test_without_sphinx_the_command_says_what_brings_it(monkeypatch, capfd):
    for module in ("sphinx", "sphinx.application"):  # an earlier test may have made a book
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "flashladder.common.book.build", raising=False)
    monkeypatch.delattr(book, "build", raising=False)
    assert main(["book"]) == 2
    assert "sphinx" in capfd.readouterr().err


def test_a_folder_with_other_files_is_left_alone(tmp_path, capfd):
    pytest.importorskip("sphinx", reason="no Sphinx: pip install 'flashladder[book]'")
    (tmp_path / "mine").write_text("")
    assert main(["book", "--folder", str(tmp_path)]) == 2
    assert "is no book" in capfd.readouterr().err
    assert (tmp_path / "mine").exists()
