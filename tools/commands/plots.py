"""A study as pictures, by Optuna's own plotting.

flashladder plots 02_swizzling-h100-bf16-d128-full --out pictures

They are those of the dashboard. To watch a study while it runs: flashladder studies --serve.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common.console import Parser, console
from flashladder.common.errors import ConfigError, instead
from flashladder.common.paths import results_dir

if TYPE_CHECKING:
    import optuna


def load(study: str, storage: str | None = None) -> optuna.Study:
    """A study by its name; ConfigError lists those there are."""
    import optuna

    from flashladder.tuner.storage import default_url, named, open_existing, without_password

    url = storage or default_url(results_dir())
    opened = open_existing(url)
    with named(url):
        names = optuna.get_all_study_names(opened)
        if study in names:
            return optuna.load_study(study_name=study, storage=opened)
    raise ConfigError(f"no study {study} in {without_password(url)}{instead(study, sorted(names))}")


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("study", metavar="STUDY")
    made.add_argument("--storage", metavar="URL", help="default: results/tuning/studies.db")
    made.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.report.charts import studies

    drawn = studies.draw(load(arguments.study, arguments.storage))
    if not drawn:
        raise ConfigError(
            f"{arguments.study} has fewer than {studies.FEWEST} measured kernels: there is nothing to be seen yet"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    for title, png in drawn.items():
        path = arguments.out / f"{arguments.study}-{title.lower().replace(' ', '-')}.png"
        path.write_bytes(png)
        console.print(str(path), soft_wrap=True)
    return 0
