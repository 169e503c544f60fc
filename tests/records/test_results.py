"""The CSV store: nothing is lost to a kill, a tear or a new column, and damage is reported where it is."""

import random
import signal
import subprocess
import sys
import time

import pytest

from flashladder.common.errors import ResultsError
from flashladder.common.records.cells import PositiveFloat
from flashladder.common.records.log import Log, Schema

SCHEMA = Schema({"name": str, "count": int, "time_ms": float, "passed": bool})
ROW = {"name": 'a,b "c"', "count": 3, "time_ms": 0.25, "passed": True}
HEADER = "name,count,time_ms,passed\n"

WRITER = """
import sys
from pathlib import Path
from flashladder.common.records.log import Log, Schema
log = Log(Path(sys.argv[1]), Schema({"name": str, "count": int, "time_ms": float, "passed": bool}))
for count in range(int(sys.argv[2])):
    log.append([{"name": "x" * 3000, "count": count, "time_ms": 0.5, "passed": False}] * 5)
    print(count, flush=True)
"""


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "deep" / "runs.csv", SCHEMA)


def written(log, text):
    log.path.parent.mkdir(parents=True, exist_ok=True)
    log.path.write_bytes(text.encode(errors="surrogateescape"))
    return log


def test_rows_come_back_with_their_types(log):
    log.append([ROW, {"name": "two\nlines", "passed": False}])
    log.append([])
    frame, damaged = log.read()
    assert damaged == []
    assert frame.iloc[0].to_dict() == ROW
    assert frame["name"][1] == "two lines"
    assert frame[["count", "time_ms"]].iloc[1].isna().all()


def test_no_file_is_no_rows(log):
    frame, damaged = log.read()
    assert (len(frame), list(frame.columns), damaged) == (0, list(SCHEMA.columns), [])


def test_a_torn_last_line_is_set_aside(log):
    written(log, HEADER + "x,1,2.0,true\nx,1,2")
    _, damaged = log.read()
    assert [str(d) for d in damaged] == [f"{log.path}:3: torn: the line has no end"]
    log.append([ROW])
    frame, damaged = log.read()
    assert (len(frame), damaged) == (2, [])
    assert log.path.with_name("runs.csv.torn").read_text() == "x,1,2\n"


def test_a_torn_header_is_set_aside(log):
    written(log, "name,cou").append([ROW])
    assert log.path.read_text().startswith(HEADER)
    assert log.path.with_name("runs.csv.torn").read_text() == "name,cou\n"


def test_damaged_rows_are_reported_and_left_in_place(log):
    bad = ["x,1,2.0\n", "x,one,2.0,true\n", "x,1,2.0,maybe\n", 'x,"1,2.0,true\n', "\n", "\udcff\0,1,fast,true\n"]
    written(log, HEADER + "x,1,2.0,true\n" + "".join(bad))
    log.append([ROW])
    frame, damaged = log.read()
    assert len(frame) == 2
    assert [d.line for d in damaged] == [3, 4, 5, 6, 7, 8]
    reasons = [d.reason for d in damaged]
    assert reasons[0] == "3 cells under 4 columns"
    assert reasons[1].startswith("count='one' should be a valid integer")
    assert reasons[2] == "passed='maybe' should be 'true' or 'false'"
    assert reasons[3].startswith("no CSV")
    assert "".join(bad).encode(errors="surrogateescape") in log.path.read_bytes()


def test_who_appends_is_told_of_damage_once(log, capsys):
    written(log, HEADER + "x,1,2\nx,1,2.0,true\nx,one,2.0,tr")
    log.append([ROW])
    err = capsys.readouterr().err
    assert f"{log.path}:4: torn: the line has no end; it is now in runs.csv.torn" in err
    assert f"{log.path}:2: 3 cells under 4 columns; the line is left where it is" in err
    log.append([ROW])
    log.report()
    assert capsys.readouterr().err == ""


def test_who_has_read_is_not_told_again(log, capsys):
    written(log, HEADER + "x,1,2\n").read()
    log.append([ROW])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["nan", "inf", "-1.5", "0", "fast"])
def test_a_time_that_cannot_have_been_measured_is_damage(tmp_path, text):
    log = written(Log(tmp_path / "runs.csv", Schema({"time_us": PositiveFloat})), f"time_us\n{text}\n1.5\n")
    frame, damaged = log.read()
    assert [str(d).partition(" should be ")[0] for d in damaged] == [f"{log.path}:2: time_us={text!r}"]
    assert (frame["time_us"].dtype, list(frame["time_us"])) == (float, [1.5])


def test_an_older_file_gains_the_new_columns(log):
    written(log, "extra,name,count\ny,x,1\nbroken\n").append([ROW])
    text = log.path.read_text().splitlines()
    assert text[0] == "extra,name,count,time_ms,passed"
    assert text[1:3] == ["y,x,1,,", "broken"]
    frame, damaged = log.read()
    assert list(frame.columns) == [*SCHEMA.columns, "extra"]
    assert frame.iloc[1].to_dict() == {**ROW, "extra": ""}
    assert [d.line for d in damaged] == [3]


@pytest.mark.parametrize("first", ["version,ratio\n", "name,name,count\n", '"name\n'])
def test_another_table_is_refused(log, first):
    written(log, first + "x,1\n")
    for use in (log.read, lambda: log.append([ROW])):
        with pytest.raises(ResultsError, match=r"runs.csv:1: this is no header .* give it back its first line: name,"):
            use()
    assert log.path.read_text() == first + "x,1\n"


def test_an_unknown_column_is_refused(log):
    with pytest.raises(ResultsError, match="unknown columns speed; known: name, count"):
        log.append([{"speed": 1.0}])


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"cannot write .*file/runs.csv"):
        Log(tmp_path / "file" / "runs.csv", SCHEMA).append([ROW])


def writer(log, rows):
    command = [sys.executable, "-c", WRITER, str(log.path), str(rows)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_writers_at_once_lose_nothing(log):
    processes = [writer(log, 10) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    frame, damaged = log.read()
    assert (len(frame), damaged) == (4 * 10 * 5, [])


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_it_had_written(log):
    rng = random.Random(0)
    acknowledged = 0
    for _ in range(12):
        process = writer(log, 10**6)
        acknowledged += process.stdout.readline() != ""
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        acknowledged += len(process.communicate()[0].split())
    log.append([ROW])
    frame, damaged = log.read()
    assert damaged == []
    assert len(frame) >= 5 * acknowledged + 1
    assert frame.iloc[-1].to_dict() == ROW
    assert set(frame["name"][:-1]) == {"x" * 3000}
