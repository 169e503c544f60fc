"""A rung's page: one screen or two in four parts, then what was measured by hand, and what was tried and dropped."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashladder.common.escape import Markdown
from flashladder.common.report import sections
from flashladder.common.report.templating import render

PAGE, MEASURED = "README.md", "measured.md"  # the second has what was measured by hand, where that is long
STEP, TRIED = "step", "tried"  # what the ladder's run says, and what `flashladder run --against` does
PARTS = (  # in this order
    "What the rung below wastes",
    "The idea",
    "Where to look",
    "Expected, measured, why",
)
BY_HAND, DROPPED = "Measured by hand", "Tried and dropped"  # behind them, where there is something to say
NOTHING: Mapping[str, str] = MappingProxyType({})
NOT_TIMED = "`flashladder ladder` has not timed this rung."
# What tools write, by the part that ends with it, as they would write it of a rung that was just made.
_BY_TOOLS = {PARTS[3]: sections.marked(STEP, NOT_TIMED), DROPPED: sections.marked(TRIED)}


def page(number: str, title: str, idea: str, words: Mapping[str, str] = NOTHING, dropped: str = "") -> str:
    """A rung's page, whose parts have these words; the last says what was `dropped`."""
    parts = {**{part: words.get(part, "") for part in PARTS}, DROPPED: dropped}
    bodies = {
        part: [Markdown(block) for block in (text, _BY_TOOLS.get(part, "")) if block] for part, text in parts.items()
    }
    return render("rung.md.j2", title=f"{number} {title}", beginning=Markdown(idea), bodies=bodies) + "\n"
