"""The studies of searches: which there are and how far they are, or optuna-dashboard to watch them in a browser.

flashladder studies
flashladder studies --serve                                  http://127.0.0.1:8080
flashladder studies --storage postgresql://user:password@host/database
"""

from __future__ import annotations

import argparse

from flashladder.common.console import Parser, console
from flashladder.common.paths import results_dir
from flashladder.common.report.tables import folding, numbers, table

HOST, PORT = "127.0.0.1", 8080


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("--storage", metavar="URL", help="default: results/tuning/studies.db")
    made.add_argument("--serve", action="store_true", help="open optuna-dashboard on them, until Ctrl-C")
    made.add_argument("--port", type=int, default=PORT, help=f"of the dashboard (default: {PORT})")
    return made


def main(arguments: argparse.Namespace) -> int:
    from optuna import get_all_study_summaries

    from flashladder.tuner.storage import default_url, named, open_existing

    url = arguments.storage or default_url(results_dir())
    storage = open_existing(url)
    if arguments.serve:
        import optuna_dashboard

        console.print(f"http://{HOST}:{arguments.port}, until Ctrl-C")
        optuna_dashboard.run_server(storage, HOST, arguments.port)
        return 0
    with named(url):
        summaries = get_all_study_summaries(storage)
    rows = (
        (each.study_name, each.n_trials, f"{each.best_trial.value:.3f}" if each.best_trial else "")
        for each in summaries
    )
    console.print(table("Studies", [*folding("name"), *numbers("trials", "best ratio")], rows))
    return 0
