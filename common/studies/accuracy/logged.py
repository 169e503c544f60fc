"""A whole study, each part of which is logged as soon as it is known."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from flashladder.common.records.run_files import RunLog
from flashladder.common.records.schemas import ACCURACY
from flashladder.common.studies.accuracy import study as studies
from flashladder.common.studies.accuracy import tiles, timing
from flashladder.common.studies.accuracy.study import Study


def run(study: Study, log: RunLog | None, timed: bool) -> pd.DataFrame:
    """Runs a study, logging each kernel and batch as soon as it is done; its rows as the log would give them."""
    found: list[Mapping[str, object]] = []
    wrong: set[tuple[object, ...]] = set()
    for rows in studies.rows(study):
        found += rows
        wrong |= {(row["version"], row["dtype"], row["family"]) for row in rows if row["verdict"] == studies.MISSED}
        if log:
            log.append(rows)
    if timed:
        more = timing.rows(study, lambda *what: what in wrong) if study.place.on_gpu else tiles.rows(study)
        for rows in more:
            found += rows
            if log:
                log.append(rows)
    if log:
        log.seal()
    return pd.DataFrame(found).reindex(columns=[*ACCURACY.columns])
