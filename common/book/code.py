"""Source files as HTML: highlighted line by line, alone or beside another, with what differs marked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from html import escape
from pathlib import Path

from flashladder.common.compiler.sources import find_header, header_folders

CONTEXT = 4  # lines that stay around a change
LEAST = 4  # lines that are worth folding
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_NAMED = re.compile(r'<span class="cpf">(?:&quot;|")([^&"]+)(?:&quot;|")</span>')


@dataclass(frozen=True)
class Stretch:
    """Lines of two files that are the same, or that differ."""

    is_same: bool
    lower: range
    upper: range


def stretches(lower: list[str], upper: list[str]) -> Iterator[Stretch]:
    """Two files as stretches, from top to bottom. Empty lines decide nothing."""
    matcher = SequenceMatcher(lambda line: not line.strip(), lower, upper, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        yield Stretch(tag == "equal", range(a, b), range(c, d))


@cache
def highlighted(path: Path) -> tuple[str, ...]:
    """The lines of a file in HTML."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import TextLexer, get_lexer_for_filename
    from pygments.util import ClassNotFound

    text = path.read_text(errors="replace")
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    return tuple(highlight(text, lexer, HtmlFormatter(nowrap=True)).splitlines())


def included(path: Path) -> dict[str, Path]:
    """The headers that a file includes in quotes, by the names that it gives them."""
    folders = (path.parent, *header_folders(path))
    names = _INCLUDE.findall(path.read_text(errors="replace")) if path.suffix in (".cu", ".cuh") else ()
    return {name: header for name in names if (header := find_header(name, folders))}


def listing(path: Path, links: dict[str, str] | None = None) -> str:
    """A file as a page shows it. `links`, of the page that is its own, leads from headers' names to their pages."""
    identity = "" if links is None else ' id="L{}"'

    def linked(match: re.Match[str]) -> str:
        target = (links or {}).get(match[1])
        return f'<a class="cpf" href="{escape(target)}">"{match[1]}"</a>' if target else match[0]

    lines = enumerate(highlighted(path), start=1)
    numbered = (_line(number, _NAMED.sub(linked, line), identity) for number, line in lines)
    return f'<div class="highlight listing"><pre tabindex="0">{"".join(numbered)}</pre></div>'


def folded(path: Path) -> str:
    """A file of which a reader first sees the name."""
    return f"<details><summary>{escape(path.name)}</summary>{listing(path)}</details>"


def beside(lower: Path, upper: Path, titles: tuple[str, str]) -> str:
    """Two files side by side, and one below the other where there is no room. What is the same is folded."""
    below, above = ([line.strip() for line in path.read_text().splitlines()] for path in (lower, upper))
    head = "".join(f"<div>{escape(title)}</div>" for title in titles)
    found = list(stretches(below, above))
    parts = "".join(_part(each, lower, upper, (each is found[0], each is found[-1])) for each in found)
    return f'<div class="highlight step"><div class="pair head">{head}</div>{parts}</div>'


def _part(each: Stretch, lower: Path, upper: Path, is_end: tuple[bool, bool]) -> str:
    """A stretch. The same lines are shown next to a change, and folded elsewhere."""
    if not each.is_same:
        return _pair("changed", lower, upper, each.lower, each.upper)
    first, last = (0 if end else CONTEXT for end in is_end)
    count = len(each.upper)
    if count < first + last + LEAST:
        return _pair("same", lower, upper, each.lower, each.upper)
    folded = each.upper[first : count - last]
    parts = [
        _pair("same", lower, upper, each.lower[:first], each.upper[:first]),
        f"<details><summary>{len(folded)} lines are the same</summary>{_lines(upper, folded, '')}</details>",
        _pair("same", lower, upper, each.lower[count - last :], each.upper[count - last :]),
    ]
    return "".join(parts)


def _pair(kind: str, lower: Path, upper: Path, of_lower: range, of_upper: range) -> str:
    if not (of_lower or of_upper):
        return ""
    twice = ' aria-hidden="true"' if kind == "same" else ""
    return (
        f'<div class="pair {kind}">{_lines(lower, of_lower, f" class=lower{twice}")}'
        f"{_lines(upper, of_upper, ' class=upper')}</div>"
    )


def _lines(path: Path, numbers: range, attributes: str) -> str:
    lines = highlighted(path)
    return f"<pre{attributes}>{''.join(_line(number + 1, lines[number]) for number in numbers)}</pre>"


def _line(number: int, line: str, identity: str = "") -> str:
    return f'<span class="line"{identity.format(number)} data-line="{number}">{line}</span>'
