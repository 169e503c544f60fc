"""The glossary's words in the text of other pages: links that hold the beginning of the entry, for a tooltip."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from docutils import nodes
from sphinx.application import Sphinx

GLOSSARY = "docs/glossary"
SILENT = ("CHANGELOG", GLOSSARY)  # pages in which no word is marked
_CLASS = "glossary-word"
_NO_PROSE = (nodes.reference, nodes.title, nodes.literal, nodes.literal_block, nodes.math, nodes.raw, nodes.image)
_SMALL = 3  # letters: shorter words, such as S, are marked nowhere
_ORDINARY = ("own", "page", "part", "cache", "release")  # words that mostly mean what they always mean


@dataclass(frozen=True)
class Entry:
    """An entry of the glossary."""

    identity: str  # of its place on the page
    words: tuple[str, ...]
    meaning: str  # its first paragraph


@cache
def entries(app: Sphinx) -> dict[str, Entry]:
    """By their places on the page."""
    found: dict[str, Entry] = {}
    for section in app.env.get_doctree(GLOSSARY).findall(nodes.section):
        title, paragraph = section[0].astext(), next(iter(section[1:]), None)
        if isinstance(section.parent, nodes.section) and isinstance(paragraph, nodes.paragraph):
            words = tuple(word.removeprefix("To ") for word in re.split(r", | and ", title))
            meaning = " ".join(paragraph.astext().split())
            found |= {identity: Entry(section["ids"][0], words, meaning) for identity in section["ids"]}
    return found


@cache
def _pattern(app: Sphinx) -> tuple[re.Pattern[str], dict[str, Entry]]:
    every = ((_key(word), entry) for entry in entries(app).values() for word in entry.words)
    by_word = {word: entry for word, entry in every if len(word) >= _SMALL and word not in _ORDINARY}
    longest_first = sorted(by_word, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?:s|es)?(?![\w-])"), by_word


def _key(word: str) -> str:
    """As it stands in a sentence: `Warp` as warp, and TMA as it is."""
    return word if word[1:2].isupper() else word[0].lower() + word[1:]


def mark(app: Sphinx, doctree: nodes.document, document: str) -> None:
    """Gives links to the glossary their tooltip, and the first of each further word on a page such a link."""
    if GLOSSARY not in app.env.found_docs:
        return
    place = app.builder.get_relative_uri(document, GLOSSARY) if document != GLOSSARY else ""
    linked = set()
    for link in doctree.findall(nodes.reference):
        target, _, identity = link.get("refuri", f"#{link.get('refid', '')}").partition("#")
        if target == place and (entry := entries(app).get(identity)):
            link["reftitle"] = entry.meaning
            linked.add(entry.identity)
    if document in SILENT:
        return
    for text in list(doctree.findall(nodes.Text)):
        if not any(isinstance(parent, _NO_PROSE) for parent in _parents(text)) and _is_prose(text):
            _mark(app, text, place, linked)


def _mark(app: Sphinx, text: nodes.Text, place: str, linked: set[str]) -> None:
    pattern, by_word = _pattern(app)
    pieces: list[nodes.Node] = []
    rest, end = str(text), 0
    for match in pattern.finditer(rest):
        entry = by_word[match[1]]
        if entry.identity in linked:
            continue
        linked.add(entry.identity)
        link = nodes.reference("", "", nodes.inline("", match[0]), refuri=f"{place}#{entry.identity}", internal=True)
        link["classes"].append(_CLASS)
        link["reftitle"] = entry.meaning
        pieces += [nodes.Text(rest[end : match.start()]), link]
        end = match.end()
    if pieces:
        text.parent.replace(text, [*pieces, nodes.Text(rest[end:])])


def _is_prose(text: nodes.Text) -> bool:
    return any(isinstance(parent, nodes.paragraph) for parent in _parents(text))


def _parents(node: nodes.Node) -> list[nodes.Node]:
    found = []
    while node := node.parent:
        found.append(node)
    return found
