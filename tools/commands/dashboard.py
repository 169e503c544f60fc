"""Tables and pictures of all of results/: dashboard.html (open it in a browser), dashboard.csv, the READMEs' parts.

flashladder dashboard
flashladder dashboard --sass h100     disassemble the rungs for an H100 first; no GPU needed
flashladder dashboard --check         change nothing, and fail where a README's part is out of date
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashladder.common.console import Parser, aside, console, progress, warn
from flashladder.common.paths import ROOT, results_dir

EXIT_STALE = 1


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("--sass", metavar="GPU", help="count the rungs' instructions for this GPU first")
    made.add_argument(
        "--readme", type=Path, metavar="FILE", help="default: the project's, of the project's own results"
    )
    made.add_argument("--check", action="store_true", help="say what is out of date, and change nothing")
    return made


def main(arguments: argparse.Namespace) -> int:
    import pandas as pd

    from flashladder.common.escape import spreadsheet
    from flashladder.common.records import benches, ladders, run_files
    from flashladder.common.report.dashboard import data, opcodes, page
    from flashladder.common.report.pages import (
        cell_overview,
        cell_page,
        ladder,
        limits,
        programs,
        readme,
        references,
        steps,
    )
    from flashladder.common.workshop import tried
    from flashladder.common.workshop.exercises import page as exercises

    folder = results_dir()
    if arguments.sass:
        with progress("compiled") as update:
            aside(str(opcodes.count(arguments.sass, folder, update)))
    results = data.Results.load(folder)
    for damage in results.damaged:
        warn(f"{damage}; the line is left where it is, and out of the pictures")
    summary = ladders.summary(results.ladders)
    is_own = folder == ROOT / "results"  # the project's READMEs tell of its own results, and of no others
    page_of = arguments.readme or (ROOT / "README.md" if is_own else None)
    measured = list(ladder.measured(results.ladders, summary))
    parts = [
        *(each.chart(folder) for each in measured),
        *(readme.parts(page_of, folder, measured) if page_of else []),
        *ladder.sections(folder, measured),
        *cell_page.parts(folder, results.cells),
        *(cell_overview.sections(page_of, folder, results.cells) if page_of else []),
        *(
            [*references.sections(results.references), limits.section(folder), programs.section(), *steps.sections()]
            if is_own
            else []
        ),
        *([exercises.section(), *tried.sections()] if is_own else []),
    ]
    if arguments.check:
        return _check([part.path for part in parts if not part.is_current()])
    for part in parts:
        if part.write():
            aside(str(part.path))
    if not is_own:
        aside(f"the READMEs are left as they are: they tell of {ROOT / 'results'}")
    folder.mkdir(parents=True, exist_ok=True)
    lines = pd.concat([summary, benches.summary(results.benches)])
    spreadsheet(lines).to_csv(folder / "dashboard.csv", index=False, float_format="%.6g")
    if (folder / run_files.FOLDER).exists():
        run_files.index(folder).to_csv(folder / run_files.FOLDER / run_files.INDEX, index=False)
    (folder / "dashboard.html").write_text(page.render(results, summary))
    aside(f"{folder / 'dashboard.csv'}\n{folder / 'dashboard.html'}")
    return 0


def _check(stale: list[Path]) -> int:
    for path in stale:
        console.print(f"{path} is out of date; `flashladder dashboard` mends it")
    return EXIT_STALE if stale else 0
