"""What a person sees of a search: what was compiled, who won and why, or what is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from flashladder.common.catalog import winners
from flashladder.common.console import aside, console, warn
from flashladder.common.predict.agreement import rank_correlation
from flashladder.common.problem.config import spell
from flashladder.common.report import formats
from flashladder.common.report.display import VERDICT_STYLES
from flashladder.common.report.tables import folding, numbers, table
from flashladder.tuner import trial_log
from flashladder.tuner.ledger import MEASURED, Ledger, outcome_of, verdict_of
from flashladder.tuner.storage import without_password

if TYPE_CHECKING:
    from flashladder.common.problem.config import KernelConfig
    from flashladder.tuner.candidates import Stock
    from flashladder.tuner.forecast import Forecast
    from flashladder.tuner.job import Job
    from flashladder.tuner.study_runner import Effort

SHOWN = 10  # kernels of a ranking that are printed; all are in its file


def stock(found: Stock) -> str:
    """What compiling gave, in a line: '02_swizzling: 528 configurations are 131 kernels; left out: ...'."""
    text = f"{found.space.version.name}: {found.num_configs} configurations are {len(found.kernels)} kernels"
    return text + (f"; left out: {_counts(found.left_out)}" if found.left_out else "")


def final(job: Job, ledger: Ledger, record: dict[str, Any] | None, effort: Effort) -> None:
    """The finalists and the winner, how good the cost model was, and where everything is."""
    console.print(str(effort))
    if record is None:
        warn(f"{job.space.version.name}: no kernel could be measured, and nothing was written to configs/tuned")
    else:
        console.print(_standings(job, record))
    predicted, ratios = _pairs(ledger)
    if len(ratios) > 2:
        correlation = rank_correlation(predicted, [-ratio for ratio in ratios])
        console.print(
            f"Predicted and measured times: Spearman's rank correlation {correlation:.2f}, {len(ratios)} kernels"
        )
    places = [
        str(trial_log.path_of(ledger.name, ledger.folder)),
        f"study {ledger.name} in {without_password(job.storage)}",
    ]
    if record:
        places.insert(0, f"{winners.path_of(job.gpu.name, job.home)}: {job.space.kind}")
    aside("\n".join(places))


def interrupted(job: Job, ledger: Ledger) -> None:
    """After Ctrl-C: the best so far, and how to go on."""
    trial_log.write(ledger)
    trials = [trial for trial in ledger.valid() if verdict_of(trial) == MEASURED]
    best = max(trials, key=lambda trial: trial.value or 0.0, default=None)
    if best:
        found = outcome_of(best)
        console.print(
            f"\n{job.space.version.name}: the best of {len(trials)} kernels so far, not measured again: "
            f"{best.user_attrs['config']}, ratio {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]",
            soft_wrap=True,
        )
    path = trial_log.path_of(ledger.name, ledger.folder)
    console.print(f"Nothing is lost: the same command goes on. {path}", soft_wrap=True)


def forecast(job: Job, found: Forecast) -> None:
    """The ranking of the cost model, as a table and, whole, as a file."""
    name, default = job.space.version.name, job.space.default
    if not found.prices:
        console.print(f"{name} on {job.gpu.title}: {found.extent}: none is priced yet")
        console.print("The same command goes on with the others.")
        return
    title = f"{name} on {job.gpu.title}: PREDICTED by the cost model, nothing was measured; {found.extent}"
    what = "what differs from the default"  # as --config takes it
    rows = []
    for alike in found.kernels[:SHOWN]:
        first, is_default = alike[0], default in (price.config for price in alike)
        change = "nothing" if is_default else _differing(first.config, default)
        limits = (first.registers, first.local_bytes, first.ctas_per_sm)
        rows.append((change, f"{first.predicted_us:.0f}", *limits, len(alike)))
    figures = numbers("predicted us", "registers", "spills", "CTAs/SM", "alike")
    console.print(table(title, [*folding(what), *figures], rows))
    if found.left_out:
        console.print(f"left out: {_counts(found.left_out)}", soft_wrap=True)
    if not found.is_whole:
        console.print("The same command goes on with the others.")
    path = trial_log.write_predictions(found, job.study, job.folder)
    aside(str(path))


def _differing(config: KernelConfig, default: KernelConfig) -> str:
    pairs = zip(config.items, default.items, strict=True)
    return " ".join(f"{name}={spell(value)}" for (name, value), (_, usual) in pairs if value != usual)


def _counts(left_out: Mapping[str, int]) -> str:
    return "; ".join(f"{count} {reason}" for reason, count in left_out.items())


def _standings(job: Job, record: dict[str, Any]) -> Table:
    rounds = "+".join(map(str, record["rounds"]))
    title = f"{job.space.version.name} on {record.get('device', job.gpu.title)}: finalists, in {rounds} rounds together"
    rows = []
    for each in record["standings"]:
        ratios = (formats.ratio(each["ratio"]), formats.interval(each["low"], each["high"]))
        versus = formats.ratio(each["to_default"]) if "to_default" in each else "-"
        winner = Text("winner", VERDICT_STYLES["faster"]) if each["code"] == record["winner"] else None
        rows.append((each["config"].replace(",", ", "), *ratios, versus, winner))
    figures = numbers("ratio", "95 % interval", "to the default")
    return table(title, [*folding("configuration"), *figures, ""], rows)


def _pairs(ledger: Ledger) -> tuple[list[float], list[float]]:
    """Predicted times and measured ratios."""
    trials = [trial for trial in ledger.valid() if verdict_of(trial) == MEASURED]
    return [trial.user_attrs["predicted_us"] for trial in trials], [trial.value or 0.0 for trial in trials]
