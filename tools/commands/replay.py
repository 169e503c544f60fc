"""How good is the search? Replay it, for many seeds, over a study in which every kernel was measured.

flashladder search 02 --gpu h100 --exhaustive      the study, on a GPU
flashladder replay 02_swizzling-h100-bf16-d128-full --seeds 5

A replay runs a strategy and hands it the recorded ratios, so it needs no GPU. It measures as many kernels as the tuner
would, or a part of them (--part), and is told nothing of the rung's default, which may be the best already. What it
found is judged by the final's ratios, as far as kernels were in it: they are the more precise ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common.console import Parser, console
from flashladder.common.report.tables import numbers, table
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.records.records import Row
    from flashladder.tuner.recorded import ExhaustiveStudy, Replay

COLUMNS = {
    "study": str,
    "seed": int,
    "kernels": int,
    "configurations": int,
    "measured": int,  # kernels
    "found": float,  # the best ratio among them, as a part of the study's best
    "trials_to_1_percent": int,  # until the best so far was within 1 % of it
    "rank_correlation": float,  # Spearman's, of predicted and measured times
}


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("studies", nargs="+", metavar="STUDY", help="a study's name, or its CSV")
    made.add_argument("--seeds", type=int, default=5, metavar="N", help="default: 5")
    made.add_argument("--out", type=Path, metavar="CSV", help="where to keep what the replays gave")
    options.add_strategy(made)
    made.add_argument("--part", type=float, help="of the kernels to measure (default: as the tuner, all of up to 20)")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.records.log import Schema
    from flashladder.tuner import trial_log
    from flashladder.tuner.job import usual_trials
    from flashladder.tuner.recorded import ExhaustiveStudy, replay

    rows = []
    for study in arguments.studies:
        recorded = ExhaustiveStudy.load(study)
        kernels = len(recorded.kernels)
        trials = max(1, int(arguments.part * kernels)) if arguments.part else usual_trials(kernels)
        replays = [replay(recorded, seed, trials, arguments.strategy) for seed in range(arguments.seeds)]
        show(recorded, replays)
        rows += [_row(recorded, each) for each in replays]
    if arguments.out:
        trial_log.replace(arguments.out, Schema(COLUMNS), rows)
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
    rows = []
    for each in replays:
        measured = len(each.progress)
        shares = (f"{measured / recorded.num_configs:.1%}", f"{measured / len(recorded.kernels):.1%}")
        rows.append((each.seed, measured, *shares, f"{each.found:.4f} of the best", each.trials_to_close or "-"))
    figures = numbers("measured", "of the configurations", "of the kernels", "found", "within 1 % after")
    console.print(table(title, ["seed", *figures], rows))
