"""A study of the tuner as Optuna's own plotting shows it: history, importances, parallel coordinates."""

from __future__ import annotations

import base64
import io
import warnings
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import pandas as pd

from flashladder.common.problem.config import parse_values

if TYPE_CHECKING:
    import optuna

FEWEST = 3  # measured kernels of which there is something to be seen


def pictures(trials: pd.DataFrame) -> dict[str, str]:
    """The pictures of a study's log by title, as data URIs; none where Optuna is not installed."""
    measured = trials[trials["ratio"].notna()]
    try:
        drawn = draw(_study(measured)) if len(measured) else {}
    except ModuleNotFoundError:
        return {}
    return {title: f"data:image/png;base64,{base64.b64encode(png).decode()}" for title, png in drawn.items()}


def draw(study: optuna.Study) -> dict[str, bytes]:
    """PNGs by title; none of a study with few measured kernels."""
    import optuna
    from optuna.visualization import matplotlib as plots

    if len(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))) < FEWEST:
        return {}
    found = {}
    with plt.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Optuna's matplotlib plots are experimental
        for title, plot in (
            ("History", plots.plot_optimization_history),
            ("Importances", plots.plot_param_importances),
            ("Parallel coordinates", plots.plot_parallel_coordinate),
        ):
            plot(study, target_name="ratio")
            figure = plt.gcf()
            figure.set_size_inches(10, 4)
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
            plt.close(figure)
            found[title] = file.getvalue()
    return found


def _study(measured: pd.DataFrame) -> optuna.Study:
    """The study in memory, from its log."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    params = [parse_values(config) for config in measured["config"]]
    values = {name: sorted({each[name] for each in params}) for name in params[0]}
    choices: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(known) for name, known in values.items()
    }
    study = optuna.create_study(direction="maximize")
    for each, ratio in zip(params, measured["ratio"], strict=True):
        study.add_trial(optuna.create_trial(params=each, distributions=choices, value=ratio))
    return study
