"""How far each rung's code is from that of the rung below, in lines without comments. No GPU needed.

flashladder neighbours          every step of the ladder
flashladder neighbours 17 18    two steps, and which definitions of headers they newly use
flashladder neighbours --check  fails where a step is larger than it may be (common/report/neighbours.py)

whole: lines added to the kernel, and all lines of the headers that no lower rung includes
used: lines added to the kernel, and the definitions of headers that no lower rung uses
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashladder.common import catalog
from flashladder.common.console import Parser, aside, console
from flashladder.common.errors import ConfigError
from flashladder.common.report import neighbours

EXIT_TOO_LARGE = 1


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("versions", nargs="*", help="rungs, such as 08 or swizzling; default: all")
    made.add_argument("--check", action="store_true", help="fail where a step is larger than it may be")
    made.add_argument("--csv", type=Path, metavar="FILE", help="write the steps to a file")
    return made


def main(arguments: argparse.Namespace) -> int:
    if not (steps := neighbours.steps(catalog.select(arguments.versions))):
        raise ConfigError(f"{' '.join(arguments.versions)} has no rung below; name a higher one")
    console.print(neighbours.overview(steps))
    for step in steps if arguments.versions else ():
        console.print(neighbours.details(step))
    if arguments.csv:
        import pandas as pd

        pd.DataFrame([neighbours.row(step) for step in steps]).to_csv(arguments.csv, index=False)
        aside(f"steps written to {arguments.csv}")
    return _check(steps) if arguments.check else 0


def _check(steps: list[neighbours.LadderStep]) -> int:
    too_large = [step for step in steps if step.is_too_large]
    for step in too_large:
        console.print(f"{step.upper.name} has {max(step.whole, step.used)} lines; it may have {step.limit}")
    return EXIT_TOO_LARGE if too_large else 0
