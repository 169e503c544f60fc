"""What a program asks of attention, and what it gains, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from flashladder.common.problem.config import GpuDescription
from flashladder.common.problem.problem import Problem
from flashladder.common.report.display import VERDICT_STYLES
from flashladder.common.report.tables import folding, numbers, table
from flashladder.tuner.adopt.demand import Alike, Demand, least_us
from flashladder.tuner.adopt.gains import Gain

SHOWN = 20  # problems


def demand(asked: Demand, alike: Sequence[Alike], gpu: GpuDescription) -> Table:
    """The problems, those first that should take most of the time. Shares are of the least that the GPU can take."""
    least = [each.weight * least_us(each.problem, gpu) for each in alike]
    title = f"{' '.join(asked.command)}: {sum(asked.calls.values())} calls, {len(asked.calls)} problems"
    rows = [
        (_spelled(each.problem), each.calls, each.different, f"{time / sum(least):.1%}")
        for each, time in zip(alike, least, strict=True)
    ]
    rest = f"and {len(alike) - SHOWN} more, {sum(least[SHOWN:]) / sum(least):.1%}" if len(alike) > SHOWN else None
    columns = [*folding("the heaviest of those alike"), *numbers("calls", "problems", "share")]
    return table(title, columns, rows[:SHOWN], rest)


def _spelled(problem: Problem) -> str:
    """In words that fold; of packed sequences not each length."""
    p = problem
    if not p.packed:
        return p.name.replace(",", ", ")
    heads = f"num_heads={p.num_heads}, num_heads_k={p.num_heads_k}, head_dim={p.head_dim}, dtype={p.dtype}"
    return f"{p.batch} packed sequences of {p.total_q} rows and {p.total_k} keys, {heads}" + ", causal" * p.causal


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of a kind: microseconds of the default and of the best configuration so far."""

    kind: str
    share: float  # of the program's attention
    default_us: float
    best_us: float
    extent: str  # how much of the space is ranked


def predicted(kinds: Sequence[Prediction]) -> Table:
    """The gain of each kind, and of all, over the rung's default."""
    rows = []
    for each in kinds:
        times = (f"{each.default_us:.1f}", f"{each.best_us:.1f}", f"x {each.default_us / each.best_us:.3f}")
        rows.append((each.kind, f"{each.share:.1%}", *times, each.extent))
    before = sum(each.share for each in kinds)
    after = sum(each.share * each.best_us / each.default_us for each in kinds)
    columns = ["kind", *numbers("share", "default, us", "best, us", "gain"), *folding("ranked")]
    title = "PREDICTED by the cost model, nothing was measured"
    return table(title, columns, rows, f"In all, predicted: x {before / after:.3f}")


def gained(gains: Sequence[Gain], alike: int) -> Table:
    """Each problem's times of one call, and what all calls come to, in milliseconds."""
    title = "measured; a program leaves to torch what torch is faster at"
    figures = ("calls", "torch, us", "default, us", "ours, us", "torch's / ours", "default / ours")
    before, after = (sum(getattr(gain, name) for gain in gains) / 1e3 for name in ("before_us", "after_us"))
    in_all = (
        f"In all: attention took {before:.1f} ms, and takes {after:.1f} ms with what is adopted, x {before / after:.3f}"
        + (f"; of {len(gains)} groups of {alike}, the heaviest" if len(gains) < alike else "")
    )
    return table(title, [*folding("problem"), *numbers(*figures)], map(_gained, gains), in_all)


def _gained(gain: Gain) -> Sequence[object]:
    style = VERDICT_STYLES["faster" if gain.ratio.low > 1 else "slower" if gain.ratio.high < 1 else "tied"]
    official, by = (f"{gain.baseline_us:.1f}", Text(str(gain.ratio), style)) if gain.has_official else ("", Text())
    times = (f"{gain.default_us:.1f}", f"{gain.ours_us:.1f}")
    return _spelled(gain.problem), gain.calls, official, *times, by, gain.to_default
