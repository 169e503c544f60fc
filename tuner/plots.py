"""A study as pictures, by Optuna's own plotting.

python tuner/plots.py 02_swizzling-h100-bf16-d128-full --out pictures
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import optuna

    from flashladder.common.console import Parser, console, exit_with
    from flashladder.common.errors import ConfigError, ToolchainError
    from flashladder.common.paths import results_dir
    from flashladder.tuner.storage import default_url, named, open_storage, without_password
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/python tuner/plots.py`")

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FEWEST = 3  # measured kernels of which there is something to be seen


def figures(study: optuna.Study) -> dict[str, Figure]:
    """The history of a study, what its fields are worth, and its trials as parallel coordinates, as plotly figures.

    Of a study with fewer than three measured kernels there are none. ToolchainError where plotly is missing.
    """
    measured = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(measured) < FEWEST:
        return {}
    try:
        from optuna import visualization
    except ImportError:
        raise ToolchainError(f"no plotly: {sys.executable} -m pip install plotly") from None
    return {
        "history": visualization.plot_optimization_history(study, target_name="ratio"),
        "importances": visualization.plot_param_importances(study, target_name="ratio"),
        "parallel": visualization.plot_parallel_coordinate(study, target_name="ratio"),
    }


def load(study: str, storage: str | None = None) -> optuna.Study:
    """A study by its name; ConfigError lists those there are."""
    url = storage or default_url(results_dir())
    opened = open_storage(url)
    with named(url):
        names = optuna.get_all_study_names(opened)
        if study in names:
            return optuna.load_study(study_name=study, storage=opened)
    raise ConfigError(f"no study {study} in {without_password(url)}; there are {', '.join(sorted(names)) or 'none'}")


def parser() -> Parser:
    """The options."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    made = Parser(summary, epilog=rest)
    made.add_argument("study", metavar="STUDY")
    made.add_argument("--storage", metavar="URL", help="default: results/tuning/studies.db")
    made.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    return made


def main(arguments: argparse.Namespace) -> int:
    drawn = figures(load(arguments.study, arguments.storage))
    if not drawn:
        raise ConfigError(
            f"{arguments.study} has fewer than {FEWEST} measured kernels: there is nothing to be seen yet"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        path = arguments.out / f"{arguments.study}-{name}.html"
        figure.write_html(path, include_plotlyjs="directory")
        console.print(str(path), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    exit_with(main, parser())
