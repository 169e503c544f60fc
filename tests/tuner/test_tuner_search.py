"""A search from end to end on the simulated bench: what is measured, chosen, logged, resumed and refused."""

import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from optuna.trial import TrialState

from flashladder.common.catalog import winners
from flashladder.common.errors import ConfigError, DeviceError
from flashladder.common.problem.config import load_gpu
from flashladder.tests.support.simulated_bench import Simulated, time_us
from flashladder.tests.support.tuner_stock import PROBLEM, make_predictions, make_stock
from flashladder.tuner import trial_log
from flashladder.tuner.job import Job, Ranking, SearchSettings
from flashladder.tuner.ledger import is_gone, me, verdict_of
from flashladder.tuner.worker import Comparison, Interrupted, Worker

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")


class Setup:
    """A job whose kernels were never compiled, and its parts."""

    def __init__(self, tmp_path, every=8, bad=(), workers=1, patience=60.0, seconds=0.0, **settings):
        self.journal = tmp_path / "journal"
        self.stock = make_stock(tmp_path / "artifacts", every=every)
        self.job = Job(self.stock.space, load_gpu("h100"), SearchSettings(**settings))
        predicted_us = make_predictions(self.stock)
        ranked = sorted(self.stock.kernels, key=lambda kernel: predicted_us[kernel.code])
        order = tuple(dict.fromkeys([*self.stock.seeds("h100"), *ranked]))
        self.ranking = Ranking(self.stock, order, predicted_us)
        bench = Simulated(str(self.journal), seconds, tuple(bad))
        self.workers = [Worker(bench, patience=patience) for _ in range(workers)]

    def tune(self):
        ledger = self.job.ledger()
        try:
            final, self.effort = self.job.tune(self.ranking, self.workers, ledger)
            return final, ledger
        finally:
            for worker in self.workers:
                worker.stop()
            ledger.close()

    @property
    def measured(self):
        return [line.split()[0] for line in self.journal.read_text().splitlines()]

    def frame(self):
        frame, damaged = trial_log.read(trial_log.path_of(self.job.study)).read()
        assert damaged == []
        return frame


def test_a_process_is_known_by_when_it_started():
    """Its id may be given to another one."""
    assert not is_gone(me())
    assert is_gone(f"{me()}0")
    assert not is_gone(f"elsewhere/{me()}0"), "nothing is known of other machines"


def test_every_kernel_of_a_small_space_is_measured_and_the_best_wins(tmp_path):
    setup = Setup(tmp_path)
    final, ledger = setup.tune()
    assert len(setup.measured) == len(set(setup.measured)) == len(setup.stock.kernels)
    fastest = min(setup.stock.kernels, key=lambda kernel: time_us(kernel.config))
    winner = next(kernel for kernel in setup.stock.kernels if kernel.code == final["winner"])
    assert time_us(winner.config) <= 1.01 * time_us(fastest.config)
    assert {trial.state for trial in ledger.trials()} == {TrialState.COMPLETE}


@pytest.mark.parametrize(("ranks", "trials", "measured"), [(True, None, 20), (False, None, 36), (False, 25, 25)])
def test_every_kernel_is_measured_where_the_cost_model_cannot_rank_them(tmp_path, capsys, ranks, trials, measured):
    """Unless somebody says how many."""
    setup = Setup(tmp_path, every=4, trials=trials)
    if not ranks:
        shuffled = random.Random(0).sample(list(setup.ranking.predicted_us.values()), len(setup.stock.kernels))
        predicted_us = dict(zip(setup.ranking.predicted_us, shuffled, strict=True))
        order = tuple(sorted(setup.ranking.order, key=lambda kernel: predicted_us[kernel.code]))
        setup.ranking = replace(setup.ranking, order=order, predicted_us=predicted_us)
    setup.tune()
    assert len(setup.stock.kernels) == 36
    assert len(setup.measured) == measured
    assert ("cannot rank these kernels" in capsys.readouterr().err) == (measured == 36)


def test_log_and_storage_agree(tmp_path):
    setup = Setup(tmp_path, every=16)
    _final, ledger = setup.tune()
    frame = setup.frame()
    trials = ledger.trials()
    assert list(frame["trial"]) == [trial.number for trial in trials]
    assert list(frame["ratio"]) == pytest.approx([trial.value for trial in trials])
    assert (frame["ratio_low"] <= frame["ratio"]).all()
    assert (frame["ratio"] <= frame["ratio_high"]).all()
    assert frame["winner"].sum() == 1
    assert frame.loc[frame["winner"], "final_ratio"].notna().all()
    assert set(frame["device"]) == {"simulated"}
    assert frame["registers"].eq(128).all()
    assert frame["same_code"].str.count("v_fragments").sum() + len(frame) == setup.stock.num_configs


def test_the_winner_and_its_evidence_are_saved_and_found(tmp_path):
    setup = Setup(tmp_path)
    final, _ = setup.tune()
    (winner,) = winners.of_gpu("h100")
    assert winner.version == "02_swizzling"
    assert winner.kind == winners.name_of(PROBLEM)
    standing = next(each for each in final["standings"] if each["code"] == final["winner"])
    assert winner.evidence["ratio"].startswith(f"{standing['ratio']:.4f} [")
    assert winner.evidence["problems"] == [PROBLEM.name]
    found = winners.config(setup.stock.space.version, "h100", PROBLEM)
    assert setup.stock.of(setup.stock.space._of_values(found.as_dict())).code == final["winner"]
    assert winners.config(setup.stock.space.version, "a100", PROBLEM) is None


def test_a_winner_may_go_to_a_folder_of_its_own(tmp_path):
    setup = Setup(tmp_path, every=16)
    setup.job = replace(setup.job, winners=tmp_path / "adopted")
    (tmp_path / "adopted").mkdir()
    setup.tune()
    (winner,) = winners.of_gpu("h100", tmp_path / "adopted")
    assert winner.evidence["study"] == setup.job.study
    assert winners.of_gpu("h100") == []


def test_a_large_space_is_searched_in_part(tmp_path):
    setup = Setup(tmp_path, every=1, trials=30)
    final, _ledger = setup.tune()
    assert len(setup.measured) == 30 < len(setup.stock.kernels)
    assert setup.stock.default.code in setup.measured
    fastest = min(time_us(kernel.config) for kernel in setup.stock.kernels)
    winner = next(kernel for kernel in setup.stock.kernels if kernel.code == final["winner"])
    assert time_us(winner.config) <= 1.02 * fastest


def test_a_search_goes_on_where_it_was(tmp_path):
    Setup(tmp_path, every=4, trials=5).tune()
    setup = Setup(tmp_path, every=4, trials=12)
    final, _ledger = setup.tune()
    assert len(setup.measured) == len(set(setup.measured)) == 12
    assert final["trials"] == 12
    assert str(setup.effort).startswith("kernels measured: 7 in ")
    assert str(setup.effort).endswith(" s, 1 at a time")
    again, _ = Setup(tmp_path, every=4, trials=12).tune()
    assert again == final
    assert len(setup.measured) == 12, "nothing was left to be measured"


def test_bad_kernels_go_into_quarantine_and_the_search_goes_on(tmp_path, capsys):
    bad = [
        ("block_m=64,block_n=64,num_warps=4,q_fragments=4", "wrong"),
        ("block_m=64,block_n=32", "faulted"),
        ("block_m=128,block_n=32,num_warps=4", "crashed"),
    ]
    setup = Setup(tmp_path, every=12, bad=bad)
    _final, _ledger = setup.tune()
    frame = setup.frame()
    assert set(frame["verdict"]) == {"measured", "wrong", "faulted", "crashed"}
    reasons = frame.groupby("verdict")["reason"].first()
    assert "o[0, 0, 0, 0] is 2 instead of 1" in reasons["wrong"]
    assert reasons["faulted"] == "CUDA error: an illegal memory access was encountered"
    assert "free(): invalid pointer" in reasons["crashed"]
    assert frame.loc[frame["verdict"] != "measured", "ratio"].isna().all()
    assert len(frame) == len(setup.stock.kernels)
    processes = frame.loc[frame["verdict"] == "measured", "driver"].nunique()
    assert processes > 1, "the process is replaced after each"
    assert "quarantine: block_m=" in capsys.readouterr().err


def test_a_disturbed_trial_is_measured_again(tmp_path):
    setup = Setup(tmp_path, every=12, bad=[("block_m=64,block_n=32", "disturbed")])
    setup.tune()
    disturbed = {kernel.code for kernel in setup.stock.kernels if "block_m=64,block_n=32" in kernel.config.name}
    times = Counter(setup.measured)
    assert disturbed
    assert times == {kernel.code: 2 if kernel.code in disturbed else 1 for kernel in setup.stock.kernels}
    assert len(setup.frame()) == len(setup.stock.kernels)


def test_a_hanging_kernel_is_given_up(tmp_path):
    setup = Setup(tmp_path, every=16, bad=[("block_m=128,block_n=32,num_warps=4", "hung")], patience=1.0)
    setup.tune()
    frame = setup.frame()
    hung = frame[frame["verdict"] == "hung"]
    assert hung["reason"].to_list() == ["no answer within 1 s"]
    assert len(frame) == len(setup.stock.kernels)


def test_the_default_is_never_beaten_by_a_slower_one(tmp_path):
    """The default is as good as the best, to which noise adds or takes: it wins."""
    setup = Setup(tmp_path, every=1, trials=40)
    best = min(setup.stock.kernels, key=lambda kernel: time_us(kernel.config))
    space = type(setup.stock.space)(**{**vars(setup.stock.space), "default": best.config})
    stock = type(setup.stock)(space, setup.stock.kernels, {})
    setup.ranking = Ranking(stock, (best, *setup.ranking.order), setup.ranking.predicted_us)
    final, _ = setup.tune()
    assert final["winner"] == best.code
    standing = next(each for each in final["standings"] if each["code"] == best.code)
    assert standing["to_default"] == 1.0


def test_a_finalist_that_fails_falls_out(tmp_path, capsys):
    setup = Setup(tmp_path, every=8)
    ledger = setup.job.ledger()
    setup.job.tune(setup.ranking, setup.workers, ledger)
    first = ledger.final["winner"]
    ledger.conclude({**ledger.final, "trials": -1})
    name = next(kernel.config.name for kernel in setup.stock.kernels if kernel.code == first)
    worker = Worker(Simulated(bad=((name, "wrong"),)))
    again, _ = setup.job.tune(setup.ranking, [worker], ledger)
    worker.stop()
    assert first not in {standing["code"] for standing in again["standings"]}
    assert first in again["fallen"]
    assert "out of the final" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "a100"}, "gpu a100, not h100"),
        ({"compiler": "CUDA 12.0, 0123"}, "compiler CUDA 12.0, 0123, not CUDA"),
        ({"kernel": "0123"}, "kernel 0123, not "),
    ],
)
def test_a_study_of_something_else_is_left_alone(tmp_path, monkeypatch, change, message):
    identity = Job.identity
    monkeypatch.setattr(Job, "identity", lambda self: identity(self) | change)
    Setup(tmp_path, every=32, study="mine").tune()
    before = trial_log.path_of("mine").read_text()
    monkeypatch.setattr(Job, "identity", identity)
    with pytest.raises(ConfigError, match=message):
        Setup(tmp_path, every=32, study="mine").job.ledger()
    assert trial_log.path_of("mine").read_text() == before


def test_a_machine_without_the_gpu_ends_the_search(tmp_path):
    setup = Setup(tmp_path, every=32, bad=[("start", "fails")])
    with pytest.raises(DeviceError, match="there is no such GPU"):
        setup.tune()
    assert [verdict_of(trial) for trial in setup.job.ledger().trials()] == ["abandoned"]


def test_a_mistake_in_the_bench_is_no_quarantine(tmp_path):
    setup = Setup(tmp_path, every=32, bad=[("block_m", "broken")])
    with pytest.raises(RuntimeError, match="a mistake in the bench"):
        setup.tune()


def test_two_workers_measure_side_by_side(tmp_path):
    setup = Setup(tmp_path, every=12, workers=2, seconds=0.3)
    _, ledger = setup.tune()
    spans = [(trial.datetime_start, trial.datetime_complete) for trial in ledger.trials()]
    side_by_side = [any(a < end and start < b for a, b in spans if (a, b) != (start, end)) for start, end in spans]
    assert sum(side_by_side) > len(spans) / 2
    assert setup.frame()["driver"].nunique() == 2
    assert len(setup.measured) == len(set(setup.measured)) == len(setup.stock.kernels)


def test_a_killed_worker_is_replaced_and_the_kernel_measured(tmp_path):
    setup = Setup(tmp_path, seconds=0.5)
    (worker,) = setup.workers
    kernel = setup.stock.kernels[0]
    killer = threading.Thread(target=_kill_when_it_measures, args=(setup, worker))
    killer.start()
    answer = worker.compare(setup.stock.space.problems, {kernel.code: kernel.artifacts}, 8)
    killer.join()
    worker.stop()
    assert isinstance(answer, Comparison)
    assert setup.measured == [kernel.code] * 2


def _kill_when_it_measures(setup, worker):
    while not (setup.journal.exists() and setup.measured):
        time.sleep(0.01)
    os.kill(worker._process.pid, signal.SIGKILL)


def test_a_stopped_worker_measures_no_more(tmp_path):
    setup = Setup(tmp_path)
    (worker,) = setup.workers
    worker.stop()
    with pytest.raises(Interrupted):
        worker.compare(setup.stock.space.problems, {}, 8)
