"""A study as CSV, results/tuning/<study>.csv: a row for every trial, written from the study's storage, replaced whole.

So file and storage agree, whatever was killed when; only while a search runs may the file be some seconds old.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial

from flashladder.common.errors import ResultsError
from flashladder.common.paths import results_dir
from flashladder.common.records.cells import ConfigText, PositiveFloat
from flashladder.common.records.log import Log, Schema
from flashladder.tuner.ledger import Ledger, code_of, outcome_of, verdict_of

if TYPE_CHECKING:
    from flashladder.common.records.records import Row
    from flashladder.tuner.forecast import Forecast

_RESOURCES = {
    "registers": int,
    "spill_store_bytes": int,
    "spill_load_bytes": int,
    "shared_bytes": int,
    "ctas_per_sm": int,
    "compile_seconds": float,
}
SCHEMA = Schema(
    {
        "study": str,
        "trial": int,
        "version": str,
        "config": ConfigText,  # the fields that are searched; the first of those with the same code
        "code": str,  # digest
        "same_code": str,  # the other configurations with this code, between semicolons
        **_RESOURCES,
        "predicted_us": float,  # by the cost model
        "verdict": str,  # measured, or why not: wrong, faulted, hung, crashed, abandoned, duplicate
        "reason": str,
        "ratio": PositiveFloat,  # official time / ours, the geometric mean over the problems
        "ratio_low": PositiveFloat,
        "ratio_high": PositiveFloat,
        "times_us": str,  # for each problem, between bars
        "baseline_us": str,
        "seconds": float,  # that the trial took
        "time": str,  # UTC, when it was claimed
        "device": str,
        "gpu_id": str,
        "driver": str,
        "torch": str,
        "toolkit": str,
        "commit": str,
        "notes": str,
        "final_ratio": PositiveFloat,  # of the finalists, measured together
        "final_low": PositiveFloat,
        "final_high": PositiveFloat,
        "winner": bool,
    }
)

PREDICTIONS = Schema(
    {
        "version": str,
        "config": str,
        "code": str,
        "same_code": str,
        "predicted_us": float,
        "verdict": str,  # predicted
        "ranking": str,  # of how much: "partial: 42 of 2112 configurations"
    }
)


def path_of(study: str, folder: Path | None = None) -> Path:
    """Where a study's log is, in a folder of results."""
    return (folder or results_dir()) / "tuning" / f"{study}.csv"


def write(ledger: Ledger) -> Path:
    """Write the study's log anew. ResultsError where that cannot be done."""
    return replace(path_of(ledger.name, ledger.folder), SCHEMA, rows(ledger))


def write_predictions(forecast: Forecast, study: str, folder: Path) -> Path:
    """Write a ranking that nothing was measured for, the best first, into `predicted/`, which git does not track.

    ResultsError where that cannot be done.
    """
    rows: list[Row] = [
        {
            "version": forecast.space.version.name,
            "config": first.config.name,
            "code": first.code,
            "same_code": ";".join(price.config.name for price in others),
            "predicted_us": first.predicted_us,
            "verdict": "predicted",
            "ranking": forecast.extent,
        }
        for first, *others in forecast.kernels
    ]
    return replace(folder / "predicted" / f"{study}.csv", PREDICTIONS, rows)


def replace(path: Path, schema: Schema, rows: Sequence[Row]) -> Path:
    """Write a CSV in the place of an earlier one, whole or not at all. ResultsError where that cannot be done."""
    header = list(schema.columns)
    lines = [",".join(header) + "\n", *(schema.line(row, header) for row in rows)]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def read(path: Path) -> Log:
    """A study's log, to be read."""
    return Log(path, SCHEMA)


def rows(ledger: Ledger) -> list[Row]:
    """The trials that have ended, by number."""
    final = ledger.final or {}
    standings = {standing["code"]: standing for standing in final.get("standings", ())}
    return [
        _row(ledger.name, trial, standings.get(code_of(trial), {}), final)
        for trial in ledger.trials()
        if trial.state.is_finished()
    ]


def _row(study: str, trial: FrozenTrial, standing: dict[str, Any], final: dict[str, Any]) -> Row:
    outcome, facts = outcome_of(trial), trial.user_attrs
    measured = verdict_of(trial) == "measured"
    return {
        "study": study,
        "trial": trial.number,
        "code": code_of(trial),
        **{name: facts.get(name) for name in ("version", "config", *_RESOURCES, "predicted_us")},
        "same_code": ";".join(facts.get("same_code", ())),
        "verdict": verdict_of(trial),
        "reason": outcome.get("reason") or final.get("fallen", {}).get(code_of(trial), ""),
        "ratio": trial.value if measured else None,
        "ratio_low": outcome.get("low"),
        "ratio_high": outcome.get("high"),
        "times_us": _bars(outcome.get("times_us", ())),
        "baseline_us": _bars(outcome.get("baseline_us", ())),
        "seconds": outcome.get("seconds"),
        "time": datetime.fromtimestamp(facts.get("claimed", 0), timezone.utc).isoformat(timespec="seconds"),
        **{name: outcome.get(name) for name in ("device", "gpu_id", "driver", "torch", "toolkit", "commit")},
        "notes": "; ".join(outcome.get("notes", ())),
        "final_ratio": standing.get("ratio"),
        "final_low": standing.get("low"),
        "final_high": standing.get("high"),
        "winner": measured and code_of(trial) == final.get("winner"),
    }


def _bars(times: tuple[float, ...]) -> str:
    return "|".join(f"{time:.2f}" for time in times)
