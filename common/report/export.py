"""Figures as a file, for what people make of them elsewhere."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from flashladder.common.errors import ResultsError


def write_csv(path: Path, rows: Sequence[dict[str, str | int]]) -> None:
    """Writes rows of the same columns, with a header. ResultsError where the file cannot be written."""
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ResultsError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None
