"""What one rung has over another: ideas, and what of its limits is gone."""

from __future__ import annotations

from rich.table import Table

from flashladder.common.catalog import Version
from flashladder.common.predict.limits.diagnosis import FLOOR, Diagnosis
from flashladder.common.report.tables import numbers, table


def report(one: Diagnosis, other: Diagnosis) -> list[str]:
    """What is said, a paragraph each: the ideas that `other` has over `one`, and those that it lacks."""
    had, has = lineage(one.version), lineage(other.version)
    added = [rung for rung in has if rung not in had]
    lost = [rung for rung in had if rung not in has]
    said = [f"{other.version.name} has over {one.version.name}:" if added else _nothing(one, other)]
    said += [f"  {rung.address}  {rung.title}: {rung.idea}" for rung in added]
    if lost:
        said += [f"It is not made from these, which {one.version.name} has:"]
        said += [f"  {rung.address}  {rung.title}" for rung in lost]
    return said


def _nothing(one: Diagnosis, other: Diagnosis) -> str:
    return f"{other.version.name} has no idea that {one.version.name} has not."


def lineage(version: Version) -> list[Version]:
    """The rungs whose ideas it has, the first one first, itself the last."""
    found = [version]
    while below := found[0].below():
        found.insert(0, below)
    return found


def limits(one: Diagnosis, other: Diagnosis) -> Table:
    """What each limit costs both, where it costs one of them FLOOR. Their tiles may differ, so times are shares."""
    rows = [("tensor cores are needed, of the time", *(f"{each.tensor / each.time:.0%}" for each in (one, other)))]
    gains = [{limit.name: each.gain(limit) for limit in each.limits} for each in (one, other)]
    for name in dict.fromkeys(name for of_one in gains for name in of_one):
        both = [of_one.get(name, 0.0) for of_one in gains]
        if max(both) >= FLOOR:
            rows.append((f"faster without {name}", *(f"{gain:.1%}" if gain > 0 else "" for gain in both)))
    return table(f"Predicted, on {one.gpu}", ["", *numbers(one.version.address, other.version.address)], rows)
