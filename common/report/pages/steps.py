"""What the ladder's largest run says of a rung: a short table on its page."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.paths import ROOT
from flashladder.common.report import formats, ladder_tables
from flashladder.common.report.pages import documents
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import markdown, numbers
from flashladder.common.report.templating import fill

if TYPE_CHECKING:
    import pandas as pd

    from flashladder.common.records.ladder_runs import Ladder

KINDS = {"own": "each at its own best", "fixed": "both in the one fixed configuration"}  # of `flashladder ladder`


def sections() -> list[Section]:
    """The table on each rung's page that has a place for it."""
    rungs = catalog.select(catalog.ladders())
    found = [Section(rung.directory / documents.PAGE, documents.STEP, partial(text, rung)) for rung in rungs]
    return [section for section in found if section.has_place]


def text(version: Version) -> str:
    """The rung and the one below in the largest run on one card, in Markdown."""
    if (found := largest()) is None:
        return documents.NOT_TIMED
    gpu, ladder = found
    lines = _summary()
    rows = [
        (kind, formats.ratio(lower.ratio) if lower else "", formats.ratio(ours.ratio), step)
        for kind, lower, ours, step in _lines(version, lines[lines["gpu"] == gpu])
    ]
    if not rows:
        return documents.NOT_TIMED
    of_rung = lines[(lines["gpu"] == gpu) & (lines["version"] == version.name)]
    fixed = ladder_tables.fixed_configuration(of_rung[of_rung["dtype"] == of_rung["dtype"].iloc[0]])
    measured = ladder.rows
    lengths = sorted(measured["seqlen_q"].unique())
    said = (
        f"Speed as a multiple of FlashAttention-2's: the mean of {len(lengths)} lengths from {lengths[0]:,} to "
        f"{lengths[-1]:,}, head_dim {measured['head_dim'].iloc[0]}, no mask, one run. "
        "`results/ladder.md` has the intervals." + (f" Fixed: {fixed}." if fixed else "")
    )
    return f"{markdown([title(gpu), *numbers('rung below', 'this rung', 'step')], rows)}\n\n{fill(said)}"


def largest() -> tuple[str, Ladder] | None:
    """The largest run of the ladder on one card, with its GPU; None where there is none."""
    paired = {gpu: ladder for gpu, ladder in _ladders().items() if ladder.is_one_run}
    if not paired:
        return None
    return max(paired.items(), key=lambda each: (len(each[1].runs[0].cells), each[1].rows["time"].max()))


def title(gpu: str) -> str:
    """A GPU as its description has it."""
    from flashladder.common.records.ladders import Limits

    limits = Limits.of(gpu)
    return limits.title if limits else gpu


def _lines(version: Version, rows: pd.DataFrame) -> Iterator[tuple[str, Any, Any, str]]:
    """For each kind of configuration and dtype: a title, the line of the rung below, the rung's, and the step."""
    below = version.below()
    found = {(row.kind, row.dtype, row.version): row for row in rows.itertuples()}
    for (kind, words), dtype in product(KINDS.items(), rows["dtype"].unique()):
        if (ours := found.get((kind, dtype, version.name))) is None:
            continue
        lower = found.get((kind, dtype, below.name)) if below else None
        is_pair = lower and ours.below == lower.version
        yield f"{words}, {dtype}", lower, ours, ladder_tables.step(ours) if is_pair else ""


@cache
def _ladders() -> dict[str, Ladder]:
    """What results/ holds of the ladder, for all rungs."""
    from flashladder.common.records import ladders

    return ladders.read(ROOT / "results", [])


@cache
def _summary() -> pd.DataFrame:
    from flashladder.common.records import ladders

    return ladders.summary(_ladders())
