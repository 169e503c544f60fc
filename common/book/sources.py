"""The Markdown that Sphinx reads, made from the repository's pages: what their links lead to has a page, too."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote

from flashladder.common import catalog
from flashladder.common.book import code, pages, rungs
from flashladder.common.errors import ResultsError
from flashladder.common.paths import ROOT
from flashladder.common.workshop import exercises

FRAGMENT = '<div class="fragment" id="fragment-{}"></div>'  # where a page gets HTML that Sphinx does not read
AS_THEY_ARE = (".svg", ".png", ".csv", ".gz")  # files that a page shows or offers
HIDDEN = re.compile(r"[._]|.*\.(egg-info|lock)$")
_CODE = re.compile(r"(^(?:```|~~~)[^\n]*\n.*?^(?:```|~~~)[ \t]*$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:)([^()#\s]+)(#[^()\s]*)?\)")
_ORPHAN = "---\norphan: true\n---\n"

Fragments = dict[str, Callable[[], str]]  # by their names


class Book:
    """The book's pages by their documents, the files that they show, and HTML that is put into them at last."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.texts: dict[str, str] = {}
        self.files: set[Path] = set()
        self.fragments: dict[str, Fragments] = {}
        self.apart: set[str] = set()  # pages of source files and folders, which no table of contents has
        self._known = {path: pages.document(path, root) for path in pages.pages(root)}
        self._waiting: list[Path] = []  # source files and folders that have no page yet
        tables = pages.tables(self._known, root)
        made = {version.directory / pages.PAGE: version for version in every_rung()}
        tasks = {each.version.directory / pages.PAGE: each for each in exercises.exercises()}
        for page, document in list(self._known.items()):
            parts = [self._relinked(page.read_text(), page)]
            if page in made:
                further, self.fragments[document] = rungs.further(made[page], FRAGMENT)
                parts.append(self._relinked(further, page))
            contents = {title: [*map(self._known.get, below)] for title, below in tables.get(page, {}).items()}
            if page in tasks:
                place = f"{os.path.dirname(document)}/exercise"
                self.texts[place] = self._relinked(rungs.task(tasks[page]), page)
                contents.setdefault("", []).append(place)
            self.texts[document] = "\n\n".join([*parts, *map(_contents, contents.items())])
        while self._waiting:
            self._add(self._waiting.pop())

    def write(self, folder: Path) -> None:
        """Writes what Sphinx reads."""
        for document, text in self.texts.items():
            path = folder / f"{document}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for file in self.files:
            path = folder / file.relative_to(self.root)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, path)

    def _relinked(self, text: str, page: Path) -> str:
        """A page's text with links that lead to pages of the book."""
        pieces = _CODE.split(text)
        pieces[::2] = (_LINK.sub(lambda match: f"]({self._target(match, page)})", piece) for piece in pieces[::2])
        return "".join(pieces)

    def _target(self, match: re.Match[str], page: Path) -> str:
        path = (page.parent / unquote(match[1])).resolve()
        if not path.exists() or not path.is_relative_to(self.root):
            raise ResultsError(f"{page} has a link to {match[1]}, which is no file of {self.root}")
        if path.suffix in AS_THEY_ARE:
            self.files.add(path)
            return match[1]
        return f"{self._relative(self._document(path), page)}.md{match[2] or ''}"

    def _document(self, path: Path) -> str:
        """Where the book has a page, a folder or a source file."""
        if path.is_dir() and path / pages.PAGE in self._known:
            path /= pages.PAGE
        if path not in self._known:
            self._known[path] = pages.document(path, self.root)
            self._waiting.append(path)
        return self._known[path]

    def _relative(self, document: str, page: Path) -> str:
        folder = page if page.is_dir() else page.parent
        return os.path.relpath(self.root / document, folder).replace(os.sep, "/")

    def _add(self, path: Path) -> None:
        """A page for a source file or for a folder."""
        document = self._known[path]
        self.apart.add(document)
        title = f"{_ORPHAN}# {path.relative_to(self.root)}\n\n"
        if path.is_dir():
            self.texts[document] = title + "".join(map(self._item, sorted(path.iterdir())))
            return
        links = {
            name: f"{self._relative(self._document(header), path)}.html" for name, header in code.included(path).items()
        }
        self.texts[document] = f"{title}{self._of(path)}{FRAGMENT.format('code')}\n"
        self.fragments[document] = {"code": lambda: code.listing(path, links)}

    def _of(self, path: Path) -> str:
        """A line that leads from a source file to the page around it."""
        around = (folder / pages.PAGE for folder in path.parents)
        page = next((each for each in around if each in self._known and each.parent != self.root), None)
        if page is None:
            return ""
        heading = page.read_text().partition("\n")[0].lstrip("# ")
        return f"Part of [{heading}]({self._relative(self._known[page], path)}.md).\n\n"

    def _item(self, path: Path) -> str:
        if HIDDEN.match(path.name):
            return ""
        if path.is_dir() or path.suffix in AS_THEY_ARE:
            return f"- {path.name}{'/' if path.is_dir() else ''}\n"
        return f"- [{path.name}]({self._relative(self._document(path), path.parent)}.md)\n"


def every_rung() -> list[catalog.Version]:
    """All rungs of this repository."""
    return [version for version in catalog.select(catalog.ladders()) if version.home is None]


def _contents(table: tuple[str, Iterable[str | None]]) -> str:
    """A table of contents that the side of the page shows, and the page does not."""
    title, documents = table
    lines = [f":caption: {title}"] if title else []
    entries = [f"/{document}" for document in documents]
    return "\n".join(["```{toctree}", ":hidden:", *lines, "", *entries, "```"]) if entries else ""
