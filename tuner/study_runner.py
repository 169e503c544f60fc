"""The search of one study: workers claim kernels, measure them and record the outcome until the budget is spent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from flashladder.common.compiler import sass
from flashladder.common.measure.statistics import Estimate, geometric_mean
from flashladder.common.predict.agreement import rank_correlation
from flashladder.common.problem.config import GpuDescription
from flashladder.tuner import finalists, trial_log
from flashladder.tuner.candidates import Candidate, Stock
from flashladder.tuner.finalists import Final
from flashladder.tuner.ledger import ABANDONED, MEASURED, Ledger, code_of, outcome_of, verdict_of
from flashladder.tuner.strategies import Strategy
from flashladder.tuner.worker import Comparison, Interrupted, Quarantine, Worker

ROUNDS = 8  # of a trial: enough to tell finalists, which are measured again, from the others
WIDE = 0.02  # a ratio's interval, as a part of it: something disturbed the rounds
AGAIN = 4  # times as many rounds for a trial that was disturbed
LOG_SECONDS = 5.0  # between two writings of the log
# Below this rank correlation of what was measured the cost model does not rank. In whole studies of 124 to 226 kernels
# the parts that a search measured had 0.6 to 0.98; with predictions that were shuffled, 0.12 at most.
RANKS = 0.4

TrialProgress = Callable[[int, int, str], None]  # trials done, of how many, and the best so far


@dataclass(frozen=True)
class Budget:
    """When a search ends, at the latest: so many trials in the study, so many seconds of this search.

    One that `may_grow` has trials for every kernel where it turns out that the cost model cannot rank them.
    """

    trials: int
    seconds: float = float("inf")
    may_grow: bool = False


@dataclass(frozen=True)
class Effort:
    """What a search did."""

    trials: int
    seconds: float
    workers: int

    def __str__(self) -> str:
        return f"kernels measured: {self.trials} in {self.seconds:.0f} s, {self.workers} at a time"


class StudyRunner:
    """One study, as this process works on it."""

    def __init__(
        self,
        stock: Stock,
        predicted_us: Mapping[str, float],
        gpu: GpuDescription,
        ledger: Ledger,
        strategy: Strategy,
        workers: Sequence[Worker],
        budget: Budget,
        *,
        rounds: int = ROUNDS,
        progress: TrialProgress | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        self._stock = stock
        self._kernels = {kernel.code: kernel for kernel in stock.kernels}
        self._predicted_us = predicted_us
        self._gpu = gpu
        self._ledger = ledger
        self._strategy = strategy
        self._workers = workers
        self._budget = budget
        self._rounds = rounds
        self._progress = progress
        self._warn = warn
        self._lock = threading.Lock()
        self._told: set[int] = set()  # numbers of trials that the strategy knows of
        self._ends = time.monotonic() + budget.seconds
        self._stopped = False
        self._log_due = 0.0
        self._done = 0  # trials of this search

    def run(self) -> Effort:
        """Search until the budget is spent or every kernel is measured, by this search and all others of the study."""
        begin = time.monotonic()
        self._report()
        while not self._stopped:
            with ThreadPoolExecutor(len(self._workers)) as pool:
                jobs = [pool.submit(self._work, worker) for worker in self._workers]
                try:
                    wait(jobs, return_when=FIRST_EXCEPTION)
                    for job in jobs:
                        if job.done():
                            job.result()
                except BaseException:
                    self.stop()
                    raise
            if not self._others_at_work():
                break
            time.sleep(1)
        trial_log.write(self._ledger)
        return Effort(self._done, time.monotonic() - begin, len(self._workers))

    def stop(self) -> None:
        """End at once; what is being measured is given up."""
        self._stopped = True
        for worker in self._workers:
            worker.stop()

    def conclude(self) -> dict[str, Any] | None:
        """The finalists' contest, as the study keeps it; None where nothing was measured, or every finalist failed.

        It is held again only where trials were added since.
        """
        trials = self._measured()
        final = self._ledger.final
        if final and final["trials"] == len(trials):
            trial_log.write(self._ledger)
            return final
        results = {code: _estimate(trial) for code, trial in trials.items()}
        seeds = [kernel for kernel in self._stock.seeds(self._gpu.name) if kernel.code in results]
        chosen = finalists.by_preference(finalists.choose(results, self._stock.kernels, seeds[:2]), seeds)
        fallen: dict[str, str] = {}
        while chosen:
            entrants = {kernel.code: kernel.artifacts for kernel in chosen}
            answer = self._workers[0].compare(self._stock.space.problems, entrants, None)
            if isinstance(answer, Comparison):
                default = self._stock.default if self._stock.default in chosen else None
                decided = finalists.decide(answer, chosen, default)
                record = _record(decided, answer) | {"trials": len(trials), "fallen": fallen, **self._workers[0].place}
                self._ledger.conclude(record)
                trial_log.write(self._ledger)
                return record
            culprit = self._culprit(answer, chosen)
            chosen.remove(culprit)
            fallen[culprit.code] = f"{answer.verdict} in the final: {answer.reason}"
        return None

    def _work(self, worker: Worker) -> None:
        while claimed := self._next():
            trial, kernel = claimed
            begin = time.monotonic()
            try:
                answer = self._measure(worker, kernel)
            except BaseException as error:
                reason = "interrupted" if isinstance(error, Interrupted) else f"the search ended: {error}"
                self._ledger.finish(trial, {"verdict": ABANDONED, "reason": reason})
                if isinstance(error, Interrupted):
                    return
                raise
            ratio, outcome = _outcome(answer, kernel)
            self._ledger.finish(trial, {**outcome, **worker.place, "seconds": time.monotonic() - begin}, ratio)
            with self._lock:
                self._done += 1
            if isinstance(answer, Quarantine):
                self._warn(f"quarantine: {kernel.config.name} {answer.verdict}: {answer.reason}")
            self._report()

    def _measure(self, worker: Worker, kernel: Candidate) -> Comparison | Quarantine:
        """Measure a kernel, and once more, for longer, where the first time was disturbed."""
        problems, entrants = self._stock.space.problems, {kernel.code: kernel.artifacts}
        answer = worker.compare(problems, entrants, self._rounds)
        if isinstance(answer, Comparison):
            ratio = geometric_mean(answer.pairs(answer.baseline, kernel.code))
            if ratio.high - ratio.low > WIDE * ratio.value:
                return worker.compare(problems, entrants, AGAIN * self._rounds)
        return answer

    def _next(self) -> tuple[int, Candidate] | None:
        """A claimed trial; None when there is nothing to do any more."""
        with self._lock:
            while True:
                self._ledger.rescue()
                self._tell()
                taken = self._ledger.taken()
                if len(taken & self._kernels.keys()) >= self._budget.trials and self._budget.may_grow:
                    self._measure_all_unless_ranked()
                spent = len(taken & self._kernels.keys()) >= self._budget.trials or time.monotonic() > self._ends
                kernel = None if spent or self._stopped else self._strategy.propose(taken)
                if kernel is None:
                    return None
                trial = self._ledger.claim(kernel.code, kernel.config.as_dict(), self._facts(kernel))
                if trial is not None:
                    return trial, kernel

    def _measure_all_unless_ranked(self) -> None:
        """The budget becomes every kernel where measured times do not go with predicted ones."""
        ratios = {code: trial.value or 0.0 for code, trial in self._measured().items()}
        ranks = rank_correlation([self._predicted_us[code] for code in ratios], [-ratio for ratio in ratios.values()])
        trials = self._budget.trials
        if not ranks >= RANKS and trials < len(self._kernels):
            trials = len(self._kernels)
            self._warn(
                f"the cost model cannot rank these kernels (rank correlation {ranks:.2f} of {len(ratios)}): "
                f"all {trials} are measured; --trials measures fewer"
            )
        self._budget = replace(self._budget, trials=trials, may_grow=False)

    def _tell(self) -> None:
        """Tell the strategy what this and other searches have found."""
        for trial in self._ledger.valid():
            kernel = self._kernels.get(code_of(trial))
            if trial.state.is_finished() and trial.number not in self._told and kernel:
                self._told.add(trial.number)
                self._strategy.tell(kernel, trial.value if verdict_of(trial) == MEASURED else None)

    def _facts(self, kernel: Candidate) -> dict[str, Any]:
        """What is known of a kernel before it is measured."""
        artifact = kernel.artifacts[0]
        return {
            "version": artifact.version,
            "config": kernel.config.name,
            "same_code": [config.name for config in kernel.configs[1:]],
            "registers": artifact.registers,
            "spill_store_bytes": artifact.spill_store_bytes,
            "spill_load_bytes": artifact.spill_load_bytes,
            "shared_bytes": artifact.launch.shared_bytes,
            "ctas_per_sm": sass.occupancy(artifact, self._gpu).ctas,
            "compile_seconds": artifact.compile_seconds,
            "predicted_us": self._predicted_us.get(kernel.code),
        }

    def _measured(self) -> dict[str, FrozenTrial]:
        """The measured trials by code."""
        return {
            code_of(trial): trial
            for trial in self._ledger.valid()
            if verdict_of(trial) == MEASURED and code_of(trial) in self._kernels
        }

    def _others_at_work(self) -> bool:
        """Whether to wait for other searches: what they measure counts, and what they give up is to be done."""
        self._ledger.rescue()
        running = any(trial.state == TrialState.RUNNING for trial in self._ledger.valid())
        return running and time.monotonic() < self._ends

    def _report(self) -> None:
        with self._lock:
            trials = self._measured().values()
            if time.monotonic() > self._log_due:
                trial_log.write(self._ledger)
                self._log_due = time.monotonic() + LOG_SECONDS
        if self._progress:
            best = max(trials, key=lambda trial: trial.value or 0.0, default=None)
            total = min(self._budget.trials, len(self._kernels))
            self._progress(len(trials), total, f"best {best.value:.3f} {best.user_attrs['config']}" if best else "")

    def _culprit(self, quarantine: Quarantine, chosen: Sequence[Candidate]) -> Candidate:
        """Who made the finalists' contest fail: whom the reason names, or else the one that is preferred least."""
        named = [kernel for kernel in chosen if kernel.code in quarantine.reason]
        culprit = (named or chosen)[-1]
        self._warn(f"out of the final: {culprit.config.name}, which {quarantine.verdict}: {quarantine.reason}")
        return culprit


def _outcome(answer: Comparison | Quarantine, kernel: Candidate) -> tuple[float | None, dict[str, Any]]:
    """The ratio and the ledger's outcome of a trial."""
    if isinstance(answer, Quarantine):
        return None, {"verdict": answer.verdict, "reason": answer.reason}
    ratio = geometric_mean(answer.pairs(answer.baseline, kernel.code))
    return ratio.value, {
        "verdict": MEASURED,
        "low": ratio.low,
        "high": ratio.high,
        "times_us": answer.medians(kernel.code),
        "baseline_us": answer.medians(answer.baseline),
        "notes": list(answer.notes),
    }


def _estimate(trial: FrozenTrial) -> Estimate:
    outcome = outcome_of(trial)
    return Estimate(outcome["ratio"], outcome["low"], outcome["high"])


def _record(final: Final, comparison: Comparison) -> dict[str, Any]:
    """A final as the ledger keeps it: plain values."""
    return {
        "winner": final.winner.code,
        "standings": [
            {
                "code": standing.kernel.code,
                "config": standing.kernel.config.name,
                **_plain(standing.ratio, ("ratio", "low", "high")),
                **_plain(standing.to_default, ("to_default", "to_default_low", "to_default_high")),
                "times_us": comparison.medians(standing.kernel.code),
            }
            for standing in final.standings
        ],
        "baseline_us": comparison.medians(comparison.baseline),
        "control": [final.control.low, final.control.high],
        "rounds": [len(times[comparison.baseline]) for times in comparison.times],
        "notes": list(comparison.notes),
    }


def _plain(estimate: Estimate | None, names: tuple[str, str, str]) -> dict[str, float]:
    return dict(zip(names, (estimate.value, estimate.low, estimate.high), strict=True)) if estimate else {}
