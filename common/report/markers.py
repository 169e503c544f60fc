"""Text that a tool keeps up to date inside a document that people write, between `<!-- name:begin -->` and `:end`."""

from __future__ import annotations

import re
from pathlib import Path

from flashladder.common.errors import ResultsError


def empty(name: str) -> str:
    """The markers of a document with nothing between them yet."""
    first, last = _lines(name)
    return f"{first}\n{last}"


def has(path: Path, name: str) -> bool:
    """Whether there is a document, with these markers."""
    return path.exists() and empty(name).splitlines()[0] in path.read_text()


def between(path: Path, name: str) -> str:
    """The text between a document's markers; ResultsError where they are missing."""
    return _span(path, name)[2]


def replace(path: Path, name: str, body: str) -> bool:
    """Writes the text between a document's markers; whether that changed the document."""
    text = path.read_text()
    begin, end, old = _span(path, name)
    if old == body:
        return False
    path.write_text(text[:begin] + f"\n{body}\n" + text[end:])
    return True


def _span(path: Path, name: str) -> tuple[int, int, str]:
    """Where the text between the markers begins and ends, and the text itself without the line breaks around it."""
    first, last = _lines(name)
    match = re.search(f"{re.escape(first)}(.*?){re.escape(last)}", path.read_text(), re.DOTALL)
    if match is None:
        raise ResultsError(f"{path} has no lines {first} and {last}, between which a tool could write")
    return match.start(1), match.end(1), match[1].strip("\n")


def _lines(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
