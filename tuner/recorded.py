"""A study in which every kernel was measured, and the search replayed over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashladder.common.errors import ResultsError
from flashladder.common.predict.agreement import rank_correlation
from flashladder.common.problem.config import KernelConfig, Value
from flashladder.tuner import trial_log
from flashladder.tuner.candidates import Candidate
from flashladder.tuner.strategies import USUAL, Ranked, strategy

CLOSE = 0.99  # of the best ratio


@dataclass(frozen=True)
class ExhaustiveStudy:
    """A study in which every kernel was measured: kernels in the order of their predicted times."""

    name: str
    kernels: tuple[Candidate, ...]
    ratios: dict[str, float]  # by code, of the trials
    truth: dict[str, float]  # of the final, or else of the trial
    predicted_us: dict[str, float]

    @classmethod
    def load(cls, study: str) -> ExhaustiveStudy:
        """A study by its name, or by the path of its CSV. ResultsError where there is no such study."""
        path = Path(study) if study.endswith(".csv") else trial_log.path_of(study)
        log = trial_log.read(path)
        log.report()
        frame, _ = log.read()
        measured = frame[frame["verdict"] == "measured"]
        if measured.empty:
            raise ResultsError(f"{path} has no measured trials; `flashladder search RUNG --gpu GPU --exhaustive`")
        found = []
        for row in measured.sort_values("trial").itertuples():
            names = [row.config, *filter(None, row.same_code.split(";"))]
            found.append(Candidate(row.code, tuple(map(KernelConfig.parse, names)), ()))
        predicted_us = dict(zip(measured["code"], measured["predicted_us"], strict=True))
        found.sort(key=lambda kernel: predicted_us[kernel.code])
        final = measured["final_ratio"].fillna(measured["ratio"])
        ratios, truth = (dict(zip(measured["code"], values, strict=True)) for values in (measured["ratio"], final))
        return cls(path.stem, tuple(found), ratios, truth, predicted_us)

    @property
    def num_configs(self) -> int:
        """Configurations that the kernels stand for."""
        return sum(len(kernel.configs) for kernel in self.kernels)

    @property
    def fields(self) -> dict[str, list[Value]]:
        """The searched fields with the values that occur."""
        configs = [config for kernel in self.kernels for config in kernel.configs]
        return {name: sorted({getattr(config, name) for config in configs}, key=str) for name in configs[0].fields}

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predicted and measured times."""
        codes = list(self.ratios)
        return rank_correlation([self.predicted_us[code] for code in codes], [-self.ratios[code] for code in codes])


@dataclass(frozen=True)
class Replay:
    """One replay: the best ratio so far after each trial, as a part of the study's best."""

    seed: int
    measured: tuple[str, ...]  # codes, one after the other
    progress: tuple[float, ...]

    @property
    def found(self) -> float:
        return self.progress[-1]

    @property
    def trials_to_close(self) -> int | None:
        """Trials until the best so far was within 1 % of the best; None where it never was."""
        return next((number for number, part in enumerate(self.progress, start=1) if part >= CLOSE), None)


def replay(recorded: ExhaustiveStudy, seed: int, trials: int, name: str = USUAL) -> Replay:
    """Run a strategy over a recorded study."""
    known = Ranked(recorded.kernels, recorded.predicted_us, recorded.fields, seed=seed)
    chosen = strategy(name, known)
    best, highest = max(recorded.truth.values()), 0.0
    progress: list[float] = []
    taken: dict[str, None] = {}
    while len(taken) < trials and (kernel := chosen.propose(taken)):
        taken[kernel.code] = None
        chosen.tell(kernel, recorded.ratios[kernel.code])
        highest = max(highest, recorded.truth[kernel.code])
        progress.append(highest / best)
    return Replay(seed, tuple(taken), tuple(progress))
