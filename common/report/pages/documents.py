"""A rung's two documents: its page of one screen or two, and the evidence beside it, where tools write."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashladder.common.escape import Markdown
from flashladder.common.report import sections
from flashladder.common.report.templating import render

PAGE, EVIDENCE = "README.md", "evidence.md"
STEP = "step"  # what a page has of the ladder's run
TABLES, TRIED = "evidence", "tried"  # what `flashladder evidence` writes, and what `flashladder run --against` does
PARTS = (  # of a rung's page, in this order
    "What the rung below wastes",
    "The idea",
    "Where to look",
    "Expected, measured, why",
)
BY_TOOLS, BY_HAND, DROPPED = "Machine code, counters, figures", "Measured by hand", "Tried and dropped"
MADE = {PARTS[3]: STEP, BY_TOOLS: TABLES, DROPPED: TRIED}  # what tools write, by the part that ends with it
NOTHING: Mapping[str, str] = MappingProxyType({})


def page(number: str, title: str, idea: str, words: Mapping[str, str] = NOTHING) -> str:
    """A rung's page, whose parts have these words."""
    return _document(f"{number} {title}", idea, {part: words.get(part, "") for part in PARTS})


def evidence(number: str, title: str, dropped: str = "") -> str:
    """The document beside it, which says in words what was `dropped`."""
    about = f"What tools, counters and trials say of [this rung]({PAGE})."
    return _document(f"{number} {title}: evidence", about, {BY_TOOLS: "", DROPPED: dropped})


def _document(title: str, beginning: str, words: Mapping[str, str]) -> str:
    bodies = {
        part: [Markdown(block) for block in (text, sections.empty(MADE[part]) if part in MADE else "") if block]
        for part, text in words.items()
    }
    return render("rung.md.j2", title=title, beginning=Markdown(beginning), bodies=bodies) + "\n"
