"""Logs of a file a run: files of runs that have ended stay as they are, and every run is read."""

import pandas as pd
import pytest

from flashladder.common.errors import ResultsError
from flashladder.common.paths import PUBLISHED
from flashladder.common.records import run_files
from flashladder.common.records.log import Log, Schema
from flashladder.common.records.run_files import RunLog, read_all

SCHEMA = Schema({"run": str, "name": str, "count": int})
WIDER = Schema({**SCHEMA.columns, "word": str})


def row(run, count=1, **more):
    return {"run": run, "name": "x", "count": count, **more}


def logged(folder, *rows, schema=SCHEMA, name="bench"):
    log = RunLog(folder, name, schema)
    log.append(rows)
    log.seal()
    return log


def test_a_later_run_and_a_new_column_leave_earlier_files_as_they_are(tmp_path):
    (first,) = logged(tmp_path, row("1")).files
    before = first.read_bytes()
    log = logged(tmp_path, row("2", 2, word="new"), schema=WIDER)
    assert [path.name for path in log.files] == ["bench@1.csv.gz", "bench@2.csv.gz"]
    assert first.read_bytes() == before
    frame, damaged = log.read()
    assert (frame.to_dict("list"), damaged) == (
        {"run": ["1", "2"], "name": ["x", "x"], "count": [1, 2], "word": ["", "new"]},
        [],
    )
    assert len(pd.read_csv(log.path)) == 1


def test_a_killed_run_is_read_and_goes_on(tmp_path):
    RunLog(tmp_path, "bench", SCHEMA).append([row("1"), row("2")])
    log = RunLog(tmp_path, "bench", SCHEMA)
    assert list(log.read()[0]["run"]) == ["1", "2"]
    log.append([row("1", 2)])
    log.seal()
    assert [path.name for path in log.files] == ["bench@1.csv.gz", "bench@2.csv"]
    assert list(log.read()[0]["count"]) == [1, 2, 1]


def test_a_run_that_goes_on_after_its_end_gets_a_further_file(tmp_path):
    log = [logged(tmp_path, row("1", count)) for count in (1, 2, 3)][-1]
    assert [path.name for path in log.files] == [f"bench@1{more}.csv.gz" for more in ("", "+2", "+3")]
    assert list(log.read()[0]["count"]) == [1, 2, 3]


def test_an_older_log_with_all_its_runs_is_read_first(tmp_path):
    Log(tmp_path / "cells_l4.csv", SCHEMA).append([row("8"), row("9")])
    logged(tmp_path, row("1"), name="cells_l4")
    logged(tmp_path, row("1"), name="cells_l4-142sm")
    logged(tmp_path, row("1"), name="more/cells_l4")
    damaged = []
    found = read_all(tmp_path, "cells_*", SCHEMA, damaged)
    assert {gpu: list(frame["run"]) for gpu, frame in found.items()} == {"l4": ["8", "9", "1"], "l4-142sm": ["1"]}
    assert list(read_all(tmp_path, "more/cells_*", SCHEMA, damaged)) == ["l4"]
    assert damaged == []


def test_a_name_that_is_no_gpu_is_refused(tmp_path):
    logged(tmp_path, row("1"), name="cells_<b>")
    with pytest.raises(ResultsError, match=r"should be cells_\* with a GPU's name"):
        read_all(tmp_path, "cells_*", SCHEMA, [])


def test_the_index_is_of_the_files_that_there_are():
    """As `flashladder dashboard` writes it."""
    written = pd.read_csv(PUBLISHED / run_files.FOLDER / run_files.INDEX, dtype=str, keep_default_na=False)
    assert written.equals(run_files.index(PUBLISHED).fillna("").astype(str))
