"""Runs Sphinx over the book's sources."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from sphinx.application import Sphinx
from sphinx.util.console import strip_colors

from flashladder.common.book import words
from flashladder.common.book.sources import FRAGMENT, Book
from flashladder.common.errors import ResultsError
from flashladder.common.report.charts.theme import PALETTE, SCHEMES

STATIC = Path(__file__).parent / "static"
FIRST = "index.html"
MADE_BY = "searchindex.js"  # a folder that has this file is a book
_MATHJAX = "sphinx-mathjax-offline"  # a package with MathJax and its fonts
_SCRIPT, _FONTS = "tex-chtml.js", "output/chtml/fonts/woff-v2"  # of these, what a page needs
# What MyST reads otherwise than GitHub: a line that begins with % or (...)=, +++, {...} before a code.
_NOT_GITHUBS = ["myst_line_comment", "myst_target", "myst_block_break", "myst_role"]
_SIDES: dict[str, str] = {}  # tables of contents, by place


@dataclass(frozen=True)
class Built:
    """A book."""

    first: Path
    pages: int
    warnings: list[str]  # what Sphinx complained of


def build(folder: Path, workers: int, progress: Callable[[int, int], None]) -> Built:
    """Makes the book in a folder, in the place of what is there. ResultsError where that is no book."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MADE_BY).exists():
        raise ResultsError(f"{folder} has files, and is no book: name a folder that is new or empty")
    book = Book()
    with tempfile.TemporaryDirectory() as scratch:
        sources, made = Path(scratch, "sources"), Path(scratch, "book")
        book.write(sources)
        warnings = io.StringIO()
        status = cast(TextIO, _Status(progress))
        place = (sources, None, made, Path(scratch, "doctrees"))
        app = Sphinx(*place, "html", _settings(), status=status, warning=warnings, parallel=workers)
        app.connect("doctree-resolved", words.mark)
        app.connect("html-page-context", partial(_complete, book), priority=100)  # before furo reads the context
        app.build()
        _copy_mathjax(made / "_static")
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, folder)
    return Built(folder / FIRST, len(book.texts), strip_colors(warnings.getvalue()).splitlines())


def _complete(book: Book, app: Sphinx, page: str, _: str, context: dict[str, Any], __: Any) -> None:
    """Puts a page's fragments in, and a side that shows the branches around the page alone."""
    for name, html in book.fragments.get(page, {}).items():
        context["body"] = context["body"].replace(FRAGMENT.format(name), html())
    if whole := context.get("toctree"):
        context["toctree"] = partial(_side, whole, os.path.dirname(page) if page in book.apart else page)


def _side(whole: Callable[..., str], place: str, **options: Any) -> str:
    """The table of contents at a place, with the branches around it alone: the whole takes half a second a page."""
    if place not in _SIDES:
        _SIDES[place] = whole(**{**options, "collapse": True})
    return _SIDES[place]


class _Status:
    """What Sphinx says while it works, as progress."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress

    def write(self, said: str) -> None:
        if found := re.search(r"(reading|writing).*\[ *(\d+)%\]", said):
            self._progress(int(found[2]) + 100 * (found[1] == "writing"), 200)

    def flush(self) -> None: ...


def _copy_mathjax(static: Path) -> None:
    found = importlib.util.find_spec(_MATHJAX)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(name=_MATHJAX)
    package = Path(found.origin).parent / "static" / "mathjax"
    (static / "mathjax").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(package / _SCRIPT, static / "mathjax" / _SCRIPT)
    shutil.copytree(package / _FONTS, static / "mathjax" / _FONTS)


def _settings() -> dict[str, Any]:
    return {
        "project": "FlashLadder",
        "extensions": ["myst_parser", "sphinx.ext.mathjax"],
        "myst_enable_extensions": ["dollarmath"],
        "myst_disable_syntax": _NOT_GITHUBS,
        "myst_heading_anchors": 6,
        "mathjax_path": f"mathjax/{_SCRIPT}",
        "html_theme": "furo",
        "html_title": "FlashLadder",
        "html_static_path": [str(STATIC)],
        "html_css_files": ["book.css"],
        "html_js_files": [("book.js", {"defer": "defer"})],
        "html_copy_source": False,
        "html_show_copyright": False,
        "html_theme_options": {f"{scheme}_css_variables": _colours(scheme) for scheme in SCHEMES}
        | {"navigation_with_keys": True},
        "suppress_warnings": ["myst.header"],
    }


def _colours(scheme: str) -> dict[str, str]:
    """Furo's colours, and the roles of the charts."""
    roles = {role: values[SCHEMES.index(scheme)] for role, values in PALETTE.items()}
    links = {f"color-{name}": roles["own"] for name in ("brand-primary", "brand-content")}
    return {**links, **{f"book-{role}": value for role, value in roles.items()}}
