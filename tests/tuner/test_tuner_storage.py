"""One study, many searches: a PostgreSQL server, claims that collide, searches that die; and storages that fail."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import TrialState

from flashladder.common.errors import ConfigError, ResultsError
from flashladder.tests.support import postgres, tuner_simulation
from flashladder.tests.tuner.test_tuner_kill import assert_log_agrees
from flashladder.tuner import ledger as ledgers
from flashladder.tuner import show, storage, trial_log
from flashladder.tuner.job import SearchSettings
from flashladder.tuner.ledger import ABANDONED, DUPLICATE, Ledger, code_of, verdict_of

pytestmark = pytest.mark.slow

FIELDS = {"block_m": [64, 128], "double_buffer": [False, True]}
PARAMS = {"block_m": 64, "double_buffer": False}
MEASURED = {"verdict": "measured", "low": 0.9, "high": 1.1}


@pytest.fixture(scope="module")
def database():
    if not postgres.binaries():
        pytest.skip("PostgreSQL is not installed: sudo apt-get install postgresql")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with postgres.server(Path(folder)) as url:
            yield url


@pytest.fixture
def sqlite(tmp_path):
    return f"sqlite:///{tmp_path / 'studies.db'}"


@pytest.fixture
def study(sqlite):
    """Opens the study once more, as another search would."""
    opened = []

    def open_again(url=sqlite, **identity):
        opened.append(Ledger(url, "study", {"gpu": "h100", **identity}, FIELDS))
        return opened[-1]

    yield open_again
    for each in opened:
        each.close()


def test_two_machines_share_a_study_on_postgresql(database, tmp_path, monkeypatch):
    """Two searches with two workers each, one killed on the way: every kernel is measured once, both logs agree."""
    monkeypatch.setenv("EVERY", "3")  # kernel, to be quick
    folders = [tmp_path / "one", tmp_path / "two"]
    searches = [_search(folder, database) for folder in folders]
    with_study = _job(folders[0], database).ledger()
    _wait_until(lambda: len(with_study.trials()) > 10 and with_study.valid())
    killed = _index_of(searches, with_study.valid()[0])  # it has measured, and another one is to go on
    os.killpg(searches[killed].pid, signal.SIGKILL)
    searches[killed].wait()
    searches[killed] = _search(folders[killed], database)
    outputs = [search.communicate(timeout=120) for search in searches]
    assert [search.returncode for search in searches] == [0, 0], outputs
    valid = Counter(code_of(trial) for trial in with_study.valid())
    assert set(valid.values()) == {1}
    assert valid.keys() == {kernel.code for kernel in _job(folders[0]).rank().stock.kernels}
    owners = Counter(trial.user_attrs["owner"] for trial in with_study.valid())
    assert len(owners) >= 2, "both searches took part"
    for folder in folders:
        monkeypatch.setenv("FLASHLADDER_RESULTS", str(folder))
        assert_log_agrees(with_study)


def _search(folder, url):
    command = [sys.executable, "-m", "flashladder.tests.support.tuner_simulation", str(folder), "--storage", url]
    command += ["--workers", "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _index_of(searches, trial):
    """Of the search that owns a trial: each has a process group of its own."""
    group = os.getpgid(int(trial.user_attrs["owner"].split("/")[-2]))
    return [search.pid for search in searches].index(group)


def _job(folder, url=None):
    return tuner_simulation.make_job(folder, url)


def _wait_until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "journal"])
def test_of_many_claims_of_one_kernel_exactly_one_holds(request, tmp_path, kind):
    """Threads stand for machines: each has a connection of its own."""
    if kind == "postgresql":
        url = request.getfixturevalue("database")
    else:
        url = {"sqlite": f"sqlite:///{tmp_path}/studies.db", "journal": f"journal://{tmp_path}/journal.log"}[kind]
    searches = [Ledger(url, "claims", {}, FIELDS) for _ in range(4)]
    barrier = threading.Barrier(len(searches))
    won = Counter()

    def claim_all(search):
        for code in "abcdef":
            barrier.wait()
            if search.claim(code, PARAMS, {}) is not None:
                won[code] += 1

    threads = [threading.Thread(target=claim_all, args=(search,)) for search in searches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == dict.fromkeys("abcdef", 1)
    losers = [trial for trial in searches[0].trials() if verdict_of(trial) == DUPLICATE]
    assert len(losers) == 6 * (len(searches) - 1)
    for search in searches:
        search.close()


def test_a_finished_trial_is_read_back(study):
    mine = study()
    trial = mine.claim("abc", PARAMS, {"registers": 128})
    mine.finish(trial, MEASURED, 1.25)
    (found,) = study().valid()
    assert (found.state, found.value, found.params) == (TrialState.COMPLETE, 1.25, PARAMS)
    assert found.user_attrs["registers"] == 128
    assert study().taken() == {"abc"}


def test_a_dead_search_s_claims_are_given_up(study, monkeypatch):
    dead, alive = study(), study()
    owner = _owner_that_ended()
    monkeypatch.setattr(ledgers, "me", lambda: owner)
    dead.claim("abc", PARAMS, {})
    assert alive.taken() == {"abc"}
    alive.rescue()
    assert alive.taken() == set()
    (trial,) = alive.trials()
    assert verdict_of(trial) == ABANDONED
    assert alive.claim("abc", PARAMS, {}) is not None


def test_what_a_dead_search_measured_is_kept(study, monkeypatch):
    """It died between the two writes of `finish`."""
    dead, alive = study(), study()
    trial = dead.claim("abc", PARAMS, {})
    monkeypatch.setattr(dead, "_complete", lambda *_: None)
    dead.finish(trial, MEASURED, 1.25)
    (found,) = alive.valid()
    assert (found.state, verdict_of(found)) == (TrialState.RUNNING, ""), "who reads it now finds no ratio"
    alive.rescue()
    assert (alive.trials()[0].state, alive.trials()[0].value) == (TrialState.COMPLETE, 1.25)


def test_the_heart_of_another_machine_stops(study, monkeypatch):
    monkeypatch.setattr(ledgers, "me", lambda: "another-boot/pid:[1]/1/1")
    monkeypatch.setattr(storage, "HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr(storage, "GRACE_SECONDS", 1)
    other = study()
    other.claim("abc", PARAMS, {})
    mine = study()
    mine.rescue()
    assert mine.taken() == {"abc"}, "it may be alive"
    other._mine.clear()  # no heartbeat any more
    time.sleep(2.1)
    mine.rescue()
    assert mine.taken() == set()
    assert [verdict_of(trial) for trial in mine.trials()] == [ABANDONED]


def test_the_claims_of_the_living_are_left_alone(study):
    mine, other = study(), study()
    mine.claim("abc", PARAMS, {})
    other.rescue()
    assert other.taken() == {"abc"}
    assert other.claim("abc", PARAMS, {}) is None


def test_another_gpu_s_study_is_refused_and_left_as_it_is(study):
    study().claim("abc", PARAMS, {})
    with pytest.raises(ConfigError, match=r"was made for gpu h100, not a100\. It is left as it is; start another"):
        study(gpu="a100")
    assert study().taken() == {"abc"}


def test_a_study_without_trials_is_anybody_s(study):
    study()
    study(gpu="a100").claim("abc", PARAMS, {})
    with pytest.raises(ConfigError, match="was made for gpu a100, not h100"):
        study()


def test_a_foreign_study_is_refused(study, sqlite):
    foreign = optuna.create_study(storage=sqlite, study_name="study")
    foreign.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(ConfigError, match="was not made by this tuner"):
        study()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:secret@127.0.0.1:1/studies", r"storage postgresql://me:\*\*\*@127.0.0.1:1/studies cannot be"),
        ("postgresql://127.0.0.1:1/studies", "sqlite:////home/me/studies.db"),
        ("nonsense", "storage nonsense cannot be used"),
        ("oracle://host/studies", "storage oracle://host/studies cannot be used"),
        ("sqlite:////proc/studies.db", "storage sqlite:////proc/studies.db cannot be used"),
    ],
)
def test_unusable_storages(study, url, message):
    with pytest.raises(ResultsError, match=message) as raised:
        study(url)
    assert "secret" not in str(raised.value)


SECRET = [
    "postgresql://me:SE/CRET@127.0.0.1:1/studies",
    "postgresql://me:SE@CRET@127.0.0.1:1/studies",
    "postgresql://me:SE@x/CRET@127.0.0.1:1/studies",
    "postgresql://me:SE?CRET=#@127.0.0.1:1/studies",
    "postgresql://me:SE%2fCRET%40@127.0.0.1:1/studies",
    "postgresql://me:SE:CRET@127.0.0.1:1/studies",
    "postgresql://:SE-CRET@127.0.0.1:1/studies",
    "postgresql://me:SE-CRET@127.0.0.1:port/studies",
    "postgresql://me:SE-CRET",
    "postgresql://127.0.0.1:1/studies?user=me&password=SE-CRET",
    "postgresql://127.0.0.1:1/studies?password=SE@CRET",
    "postgresql://127.0.0.1?password=SE@CRET",
    "postgresql://me@127.0.0.1:1/studies?sslpassword=SE-CRET&password=CRET",
    "postgresql//me:SE-CRET@127.0.0.1:1/studies",
    "host=127.0.0.1 port=1 password=SE-CRET",
    "mysql+nothing://me:SE-CRET@127.0.0.1:1/studies",
    "grpc://me:SE-CRET@127.0.0.1:1",
    "grpc://127.0.0.1:SE-CRET",
    "journal://me:SE-CRET@127.0.0.1/x/y",
    "sqlite://me:SE-CRET@127.0.0.1/studies",
]


@pytest.mark.parametrize("url", SECRET)
def test_no_part_of_a_password_is_shown(study, url, monkeypatch, tmp_path):
    """Not even by --traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "journal:").write_text("")  # no folder can be made here
    (tmp_path / "me:SE-CRET@127.0.0.1").write_text("")
    with pytest.raises(ResultsError, match="cannot be used") as raised:
        study(url)
    shown = "".join(traceback.format_exception_only(raised.value)) + storage.without_password(url)
    cause = raised.value
    while cause := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__):
        shown += str(cause)
    assert not re.search("SE|CRET|%2f", shown), shown
    assert url not in repr(SearchSettings(storage=url))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:local@localhost:5432/local", "postgresql://me:***@localhost:5432/local"),
        ("postgresql://me@localhost/studies?passfile=a", "postgresql://me@localhost/studies?passfile=a"),
        (
            "postgresql://h/s?user=me&password=x&sslmode=require",
            "postgresql://h/s?password=***&sslmode=require&user=me",
        ),
        ("sqlite:////home/me@work/a?b/studies.db", "sqlite:////home/me@work/a?b/studies.db"),
        ("journal:///home/me@work:1/journal.log", "journal:///home/me@work:1/journal.log"),
        ("grpc://localhost:13000", "grpc://localhost:13000"),
    ],
)
def test_what_is_no_secret_is_shown(url, shown):
    assert storage.without_password(url) == shown


def test_an_error_that_has_the_password_in_its_words_is_not_repeated():
    url = "postgresql://me:s%2Fcret@localhost/studies"
    for words in ("s/cret is wrong", "at s%2fcret", f"cannot parse {url}"):
        with pytest.raises(ResultsError) as raised, storage.named(url):
            raise ValueError(words)
        assert "cannot be used: ValueError, whose message might show the password" in str(raised.value)
        assert raised.value.__suppress_context__
    with pytest.raises(ResultsError, match="cannot be used: connection refused"), storage.named(url):
        raise ValueError("connection refused")


def test_the_end_of_a_search_shows_no_password(study, capsys):
    job = SimpleNamespace(space=SimpleNamespace(version=SimpleNamespace(name="02")), storage=SECRET[0])
    show.final(job, study(), None, "")
    assert "study study in postgresql://me:***@127.0.0.1:1/studies" in capsys.readouterr().out


def test_a_file_that_is_no_database(study, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, and they are longer than a header" * 10)
    with pytest.raises(ResultsError, match=r"notes.txt cannot be used: .*not a database"):
        study(f"sqlite:///{path}")
    assert path.read_text().startswith("these are my notes")


def test_the_log_of_an_unfinished_study(study, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    mine = study()
    mine.claim("abc", PARAMS, {})
    trial_log.write(mine)
    frame, _ = trial_log.read(trial_log.path_of("study")).read()
    assert frame.empty


def _owner_that_ended():
    process = subprocess.Popen(["sleep", "60"])
    mine = ledgers.me().rpartition("/")[0].rpartition("/")[0]
    start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    process.kill()
    process.wait()
    return f"{mine}/{process.pid}/{start}"
