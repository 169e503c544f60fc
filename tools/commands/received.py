"""Check results that somebody sent, before they are merged: ladders and winners of cards not measured here.

flashladder received results/runs/ladder_l40s@RUN.csv.gz tuned/l40s.yaml

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
    made.add_argument("files", nargs="+", type=Path, metavar="FILE", help="ladder_GPU@RUN.csv.gz or tuned/GPU.yaml")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.records import received

    any_wrong = False
    for path in arguments.files:
        wrong = received.faults(path)
        gpu = received.gpu_of_file(path)
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
