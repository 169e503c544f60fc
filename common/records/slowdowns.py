"""What slowed the GPU while rows were measured: shares of their samples, each in a column.

Older rows say it in sentences among their notes; `completed` gives them the columns.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

# The columns, and the words of measure.nvml that each counts.
SLOWDOWN_SHARES = {
    "power_cap_share": ("power cap",),
    "thermal_share": ("thermal slowdown", "hardware thermal slowdown"),
    "other_slowdown_share": ("hardware slowdown", "power brake", "board limit", "reliability"),
}
_TITLES = dict(zip(SLOWDOWN_SHARES, ("power cap", "thermal slowdown", "another slowdown"), strict=True))
_SENTENCE = re.compile(r"(.+) in (\d+)% of samples")
_UNKNOWN = "not recorded"


def completed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a log, where the timed ones of older files have the columns in the place of the sentences."""
    old = frame["samples"].isna() & frame["time_us"].notna()
    if not old.any():
        return frame
    found = frame.copy()
    found[[*SLOWDOWN_SHARES]] = found[[*SLOWDOWN_SHARES]].astype(float)
    found.loc[old, ["notes", *SLOWDOWN_SHARES]] = [_parsed(notes or "") for notes in frame.loc[old, "notes"]]
    return found


def _parsed(notes: str) -> list[Any]:
    """The notes without the sentences, and what those say for each column."""
    said, left = {}, []
    for part in filter(None, notes.split("; ")):
        if match := _SENTENCE.fullmatch(part):
            said[match[1]] = int(match[2]) / 100
        else:
            left.append(part)
    nothing = np.nan if any(_UNKNOWN in part for part in left) else 0.0
    shares = [max(said.get(word, nothing) for word in words) for words in SLOWDOWN_SHARES.values()]
    return ["; ".join(left), *shares]


def remarks(rows: pd.DataFrame, of: str = "GPU") -> str:
    """What slowed the GPU, in how many of the samples at least and at most; and the rows' notes. Empty for nothing."""
    said = []
    for name, title in _TITLES.items():
        percents = sorted({f"{100 * share:.0f}" for share in rows[name].dropna()}, key=int)
        if percents and percents != ["0"]:
            said.append(f"{title} in {' to '.join(dict.fromkeys((percents[0], percents[-1])))} % of samples")
    notes = [note for notes in rows["notes"].dropna() for note in notes.split("; ") if note]
    said += dict.fromkeys(notes)
    return f" The {of}: {'; '.join(said)}." if said else ""
