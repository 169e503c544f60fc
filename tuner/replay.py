"""How good is the search? Replay it, for many seeds, over a study in which every kernel was measured.

python tuner/search.py 02 --gpu h100 --exhaustive      the study, on a GPU
python tuner/replay.py 02_swizzling-h100-bf16-d128-full --seeds 5

A replay runs the tuner's own strategy and hands it the recorded ratios, so it needs no GPU. It measures as many kernels
as the tuner would, or a part of them (--part), and is told nothing of the rung's default, which may be the best
already. What it found is judged by the final's ratios, as far as kernels were in it: they are the more precise ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    from flashladder.common.config import KernelConfig, Value
    from flashladder.common.console import Parser, console, exit_with, table
    from flashladder.common.errors import ResultsError
    from flashladder.common.results.log import Schema
    from flashladder.common.results.records import Row
    from flashladder.tuner import trial_log
    from flashladder.tuner.candidates import Candidate
    from flashladder.tuner.job import usual_trials
    from flashladder.tuner.model import rank_correlation
    from flashladder.tuner.strategy import Guided
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/python tuner/replay.py`")

CLOSE = 0.99  # of the best ratio
SCHEMA = Schema(
    {
        "study": str,
        "seed": int,
        "kernels": int,
        "configurations": int,
        "measured": int,  # kernels
        "found": float,  # the best ratio among them, as a part of the study's best
        "trials_to_1_percent": int,  # until the best so far was within 1 % of it
        "rank_correlation": float,  # Spearman's, of predicted and measured times
    }
)


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
            raise ResultsError(f"{path} has no measured trials; `python tuner/search.py RUNG --gpu GPU --exhaustive`")
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


def replay(recorded: ExhaustiveStudy, seed: int, trials: int) -> Replay:
    """Run the strategy over a recorded study."""
    strategy = Guided(recorded.kernels, recorded.predicted_us, recorded.fields, seed)
    best, highest = max(recorded.truth.values()), 0.0
    progress: list[float] = []
    taken: dict[str, None] = {}
    while len(taken) < trials and (kernel := strategy.propose(taken)):
        taken[kernel.code] = None
        strategy.tell(kernel, recorded.ratios[kernel.code])
        highest = max(highest, recorded.truth[kernel.code])
        progress.append(highest / best)
    return Replay(seed, tuple(taken), tuple(progress))


def parser() -> Parser:
    """The options."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    made = Parser(summary, epilog=rest)
    made.add_argument("studies", nargs="+", metavar="STUDY", help="a study's name, or its CSV")
    made.add_argument("--seeds", type=int, default=5, metavar="N", help="default: 5")
    made.add_argument("--out", type=Path, metavar="CSV", help="where to keep what the replays gave")
    made.add_argument("--part", type=float, help="of the kernels to measure (default: as the tuner, all of up to 20)")
    return made


def main(arguments: argparse.Namespace) -> int:
    rows = []
    for study in arguments.studies:
        recorded = ExhaustiveStudy.load(study)
        kernels = len(recorded.kernels)
        trials = max(1, int(arguments.part * kernels)) if arguments.part else usual_trials(kernels)
        replays = [replay(recorded, seed, trials) for seed in range(arguments.seeds)]
        show(recorded, replays)
        rows += [_row(recorded, each) for each in replays]
    if arguments.out:
        trial_log.replace(arguments.out, SCHEMA, rows)
    return 0


def _row(recorded: ExhaustiveStudy, each: Replay) -> Row:
    return {
        "study": recorded.name,
        "seed": each.seed,
        "kernels": len(recorded.kernels),
        "configurations": recorded.num_configs,
        "measured": len(each.progress),
        "found": each.found,
        "trials_to_1_percent": each.trials_to_close,
        "rank_correlation": recorded.rank_correlation,
    }


def show(recorded: ExhaustiveStudy, replays: Sequence[Replay]) -> None:
    """The replays as a table."""
    title = (
        f"{recorded.name}: {recorded.num_configs} configurations are {len(recorded.kernels)} kernels; the best has the "
        f"ratio {max(recorded.truth.values()):.3f}. Spearman's rank correlation with the predicted times: "
        f"{recorded.rank_correlation:.2f}"
    )
    figures = ("measured", "of the configurations", "of the kernels", "found", "within 1 % after")
    made = table(title, "seed", *figures, right=figures)
    for each in replays:
        measured = len(each.progress)
        made.add_row(
            str(each.seed),
            str(measured),
            f"{measured / recorded.num_configs:.1%}",
            f"{measured / len(recorded.kernels):.1%}",
            f"{each.found:.4f} of the best",
            str(each.trials_to_close or "-"),
        )
    console.print(made)


if __name__ == "__main__":
    exit_with(main, parser())
