"""Check results that somebody sent, before they are merged: ladders and winners of cards not measured here.

flashladder received ladder_l40s.csv tuned/l40s.yaml
flashladder received results/ladder_h200.csv --known before.csv     rows that were there before are not looked at

Every figure is held against the others of its row, the rounds that it was made of, the card's limits, and the rungs as
they are. What is wrong is said with its row, and the exit code is 2. results/SENDING.md says how results are sent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashladder.common.console import EXIT_ERROR, Parser, console, warn
from flashladder.common.problem.config import gpu_names

SHOWN = 30  # faults of a file


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("files", nargs="+", type=Path, metavar="FILE", help="ladder_GPU.csv or tuned/GPU.yaml")
    made.add_argument("--known", type=Path, metavar="FILE", help="an earlier ladder_GPU.csv of the same GPU")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.records import received

    any_wrong = False
    for path in arguments.files:
        wrong = received.faults(path, arguments.known)
        gpu = path.stem.removeprefix("ladder_")
        if gpu not in gpu_names():
            warn(f"configs/gpus describes no {gpu}: its name and its limits were not checked")
        for fault in wrong[:SHOWN]:
            console.print(fault, soft_wrap=True)
        if len(wrong) > SHOWN:
            console.print(f"and {len(wrong) - SHOWN} more")
        console.print(
            f"{path}: {len(wrong)} faults" if wrong else f"{path}: nothing contradicts itself", soft_wrap=True
        )
        any_wrong |= bool(wrong)
    return EXIT_ERROR if any_wrong else 0
