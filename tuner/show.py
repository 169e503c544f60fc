"""What a person sees of a search: what was compiled, who won and why, or what is predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from flashladder.common.catalog import winners
from flashladder.common.console import aside, console, duration, warn
from flashladder.common.measure.statistics import Verdict
from flashladder.common.predict import cost
from flashladder.common.predict.agreement import rank_correlation
from flashladder.common.problem.config import KernelConfig, parse_values, spell
from flashladder.common.report import formats
from flashladder.common.report.answer import Fault, Kernel, Ratio, Time
from flashladder.common.report.display import VERDICT_STYLES
from flashladder.common.report.tables import folding, numbers, table
from flashladder.tuner import trial_log
from flashladder.tuner.gpu_bench import opponents
from flashladder.tuner.ledger import MEASURED, Ledger, outcome_of, verdict_of
from flashladder.tuner.storage import without_password

if TYPE_CHECKING:
    from flashladder.tuner.candidates import Stock
    from flashladder.tuner.forecast import Forecast
    from flashladder.tuner.job import Job
    from flashladder.tuner.study_runner import Effort

SHOWN = 10  # kernels of a ranking that are printed; all are in its file


def begins(jobs: Sequence[Job], number: int, seconds: float) -> None:
    """Where a search of several rungs stands, "rung 3 of 25", and how long the rest takes, where that is bounded."""
    rungs = list(dict.fromkeys(job.space.version.name for job in jobs))
    job = jobs[number]
    what = f"rung {rungs.index(job.space.version.name) + 1} of {len(rungs)}: {job.space.version.name}"
    what += f", {job.space.words}" if len(jobs) > len(rungs) else ""
    left = "" if math.isinf(seconds) else f"; {duration(max(0.0, seconds))} at most for what is left"
    console.print(f"{what}{left}", style="bold", soft_wrap=True)


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


def forecast_answer(job: Job, found: Forecast) -> list[Kernel]:
    """The ranking for programs, one configuration of each machine code; times are means over the problems."""
    known = cost.experience(job.space.version)
    kernels = []
    for price, *_ in found.kernels:
        low, high = (price.predicted_us * known.low, price.predicted_us * known.high) if known else (None, None)
        time = Time(value=price.predicted_us, low=low, high=high, unit="us", basis="predicted", gpu=job.gpu.title)
        figures = {"registers": price.registers, "spill_bytes": price.local_bytes, "time": time}
        kernels.append(_of(job, price.config, **figures))
    return kernels


def final_answer(job: Job, record: dict[str, Any] | None) -> tuple[list[Kernel], list[Fault]]:
    """The finalists for programs, the winner first; a fault where there is none."""
    if record is None:
        return [], [Fault(kind="refused", message=f"{job.space.version.name}: no kernel could be measured")]
    kernels = []
    for each in sorted(record["standings"], key=lambda each: each["code"] != record["winner"]):
        gpu, to = record.get("device", job.gpu.title), opponents(job.space.problems)
        time = Time(value=cost.mean_us(each["times_us"]), unit="us", basis="measured", gpu=gpu)
        verdict: Verdict = "faster" if each["low"] > 1 else "slower" if each["high"] < 1 else "unclear"
        ratio = Ratio(to=to, value=each["ratio"], low=each["low"], high=each["high"], verdict=verdict)
        config = KernelConfig.of(**parse_values(each["config"]))
        kernels.append(_of(job, config, right=True, device=gpu, time=time, ratio=ratio))
    return kernels, []


def _of(job: Job, config: KernelConfig, **more: Any) -> Kernel:
    problems = "; ".join(problem.name for problem in job.space.problems)
    return Kernel(name=job.space.version.address, config=config.as_dict(), problem=problems, **more)


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
