"""Nothing is lost: kill -9 at random moments, and Ctrl-C."""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from optuna.trial import TrialState

from flashladder.tests.support import interruptible, tuner_simulation
from flashladder.tuner import trial_log
from flashladder.tuner.ledger import code_of, verdict_of

pytestmark = pytest.mark.slow

KILLS = 15


@pytest.fixture
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    monkeypatch.setattr("flashladder.common.catalog.winners.FOLDER", tmp_path / "tuned")
    return tmp_path


def latest_worker(journal):
    """The process that began the latest measurement."""
    with suppress(OSError, IndexError):
        return int(journal.read_text().splitlines()[-1].split()[2])
    return None


def finished(ledger):
    return {trial.number: (verdict_of(trial), trial.value) for trial in ledger.trials() if trial.state.is_finished()}


def test_many_kills(places):
    """Kill the search or its worker again and again: no finished trial is lost, none is measured twice."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashladder.tests.support.tuner_simulation", "flashladder.tuner.show"])
    rng = random.Random(5)
    ledger = tuner_simulation.make_job(places).ledger()
    known = {}
    kills = searches = 0
    while kills < KILLS:
        process = context.Process(target=tuner_simulation.simulate, args=(str(places),))
        process.start()
        searches += 1
        while kills < KILLS and process.is_alive():
            time.sleep(rng.uniform(0.0, 0.7))
            worker = latest_worker(places / "journal")
            with suppress(ProcessLookupError):
                os.kill(worker if worker and rng.random() < 0.4 else process.pid, signal.SIGKILL)
                kills += 1
        process.kill()
        process.join()
        now = finished(ledger)
        assert known.items() <= now.items(), "a finished trial was lost or changed"
        known = now
        assert process.exitcode, "the search ended before it was killed often enough"
    assert tuner_simulation.simulate(str(places)) == 0

    assert known.items() <= finished(ledger).items()
    stock = tuner_simulation.make_job(places).rank().stock
    valid = Counter(code_of(trial) for trial in ledger.valid())
    assert {verdict_of(trial) for trial in ledger.valid()} == {"measured", "wrong"}, "a kill is no kernel's fault"
    assert valid.keys() == {kernel.code for kernel in stock.kernels}
    assert set(valid.values()) == {1}
    assert_none_measured_after_it_was_finished(ledger, places / "journal")
    assert_log_agrees(ledger)
    assert searches > KILLS / 4


def assert_none_measured_after_it_was_finished(ledger, journal):
    ends = {code_of(t): t.datetime_complete.timestamp() for t in ledger.trials() if t.state == TrialState.COMPLETE}
    for line in journal.read_text().splitlines():
        code, begin, _ = line.split()
        if code in ends:
            assert float(begin) < ends[code]


def assert_log_agrees(ledger):
    frame, damaged = trial_log.read(trial_log.path_of(tuner_simulation.STUDY)).read()
    assert damaged == []
    assert list(zip(frame["trial"], frame["verdict"], strict=True)) == [
        (number, verdict) for number, (verdict, _) in finished(ledger).items()
    ]
    measured = frame[frame["verdict"] == "measured"]
    ratios = {number: ratio for number, (_, ratio) in finished(ledger).items() if ratio is not None}
    assert dict(zip(measured["trial"], measured["ratio"], strict=True)) == pytest.approx(ratios)


def test_ctrl_c_ends_cleanly_with_the_best_so_far(places):
    command = [sys.executable, "-m", "flashladder.tests.support.tuner_simulation", str(places)]
    search = interruptible.start(command, start_new_session=True)
    ledger = tuner_simulation.make_job(places).ledger()
    deadline = time.monotonic() + 120
    while len(finished(ledger)) < 5:
        assert time.monotonic() < deadline, "the search did not get going"
        time.sleep(0.05)
    worker = latest_worker(places / "journal")
    os.killpg(search.pid, signal.SIGINT)
    out, err = search.communicate(timeout=90)
    assert search.returncode == 130
    assert "kernels so far" in out
    assert "the same command goes on" in " ".join(out.split())
    assert "Traceback" not in err
    assert not Path(f"/proc/{worker}").exists()
    states = [trial.state for trial in ledger.trials()]
    assert TrialState.RUNNING not in states
    assert [verdict_of(t) for t in ledger.trials() if t.state == TrialState.FAIL] in ([], ["abandoned"])
    assert_log_agrees(ledger)
