"""Text that a stranger may have written, made harmless for where it goes: one function for each place.

On HTML pages jinja2 escapes it, and in pictures matplotlib and ElementTree do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 60  # characters of what was given, in a message
# Of ASCII and Latin 1, what turns the direction of writing or has no width, and bytes that were no UTF-8.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_MARKUP = re.compile(r"[\\`*\[\]<>|$&~]|(?<=:)//|(?<=www)\.")  # the last two make a link of an address
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Markdown(str):
    """What is Markdown already, such as a link."""


def controls(text: str) -> str:
    """For a terminal, or XML: control characters are spelled out, but for the end of a line and the tabulator."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def quoted(text: str) -> str:
    """For a message: in quotes, not too long, and nothing in it acts."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def markdown(value: object) -> Markdown:
    """For a page in Markdown, within a line of it; None is nothing."""
    if isinstance(value, Markdown):
        return value
    text = "" if value is None else controls(str(value)).replace("\n", " ")
    return Markdown(_MARKUP.sub(r"\\\g<0>", text))


def spreadsheet(frame: pd.DataFrame) -> pd.DataFrame:
    """For a CSV file that may be opened in a spreadsheet: what would be a formula there begins with an apostrophe."""
    return frame.map(lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell)
