"""What tools keep up to date: a part of a document between `<!-- name:begin -->` and `:end`, or a whole file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashladder.common.compiler.toolchain import toolchain, version_text
from flashladder.common.errors import ResultsError

_COMPILER = re.compile(r"ptxas (\d[\d.]*\d)")


@dataclass(frozen=True)
class Section:
    """What a tool writes into a document; ResultsError where that has no markers. Without a name: all of the file."""

    path: Path
    name: str
    text: Callable[[], str]
    begins: str = ""  # the document, where there is none yet
    heading: str = ""  # of a last part, which a document without the markers gets

    def write(self) -> bool:
        """Brings the document up to date; whether that changed it."""
        before, kept, after = _parts(self.path, self._document(), self.name)
        if kept == (text := self.text()):
            return False
        self.path.write_text(f"{before}{text}{after}")
        return True

    def is_current(self) -> bool | None:
        """Whether the document says what would be written; None where another compiler made what it says."""
        if not self.path.exists():
            return False
        _, kept, _ = _parts(self.path, self._document(), self.name)
        made_with = _COMPILER.search(kept)
        if made_with and made_with[1] != compiler():
            return None
        return kept == self.text()

    def _document(self) -> str:
        """The document, with a place for the section where it has a heading."""
        document = self.path.read_text() if self.path.exists() else self.begins
        if not self.heading or _lines(self.name)[0] in document:
            return document
        heading = "" if f"## {self.heading}\n" in document else f"## {self.heading}\n\n"
        return f"{document.rstrip()}\n\n{heading}{marked(self.name)}\n".lstrip()

    @property
    def has_place(self) -> bool:
        """Whether there is a document, with these markers."""
        return self.path.exists() and _lines(self.name)[0] in self.path.read_text()


@cache
def compiler() -> str:
    """The version of ptxas, which decides the machine code."""
    match = re.search(r"V(\d[\d.]*\d)", version_text(toolchain().ptxas))
    return match[1] if match else toolchain().release


def marked(name: str, text: str = "") -> str:
    """The markers of a document with this text between them, or nothing yet."""
    first, last = _lines(name)
    return "\n".join(filter(None, (first, text, last)))


def between(path: Path, name: str) -> str:
    """The text between a document's markers; ResultsError where they are missing."""
    return _parts(path, path.read_text(), name)[1]


def _parts(path: Path, document: str, name: str) -> tuple[str, str, str]:
    """What stands before a section, the section without the line breaks around it, and what stands after it."""
    if not name:
        return "", document, ""
    first, last = _lines(name)
    match = re.search(f"{re.escape(first)}(.*?){re.escape(last)}", document, re.DOTALL)
    if match is None:
        raise ResultsError(f"{path} has no lines {first} and {last}, between which a tool could write")
    return f"{document[: match.start(1)]}\n", match[1].strip("\n"), f"\n{document[match.end(1) :]}"


def _lines(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
