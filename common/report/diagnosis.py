"""A diagnosis in words a person would use, and as a table."""

from __future__ import annotations

import linecache
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flashladder.common.catalog import Version
from flashladder.common.compiler.sass.instruction import Position
from flashladder.common.paths import ROOT
from flashladder.common.predict.limits.diagnosis import FLOOR, MICROSECONDS, Diagnosis, Limit
from flashladder.common.report.tables import numbers, styled, table

_TIMES = {True: "{:,.1f} us", False: "{:,.0f} cycles"}


def report(found: Diagnosis) -> list[str]:
    """What is said, a paragraph each: the time, the limiter and its lines, the idea against it."""
    return [_time(found), *_memory(found), *_limiter(found), _idea(found), _source(found)]


def _time(found: Diagnosis) -> str:
    if found.is_measured:
        what = f"A launch of {found.version.name} takes {_spelled(found, found.time)} on {found.gpu}."
    else:
        what = (
            f"Predicted: a CTA of {found.version.name} takes {_spelled(found, found.time)} of an SM for one pass "
            f"through its main loop, on {found.gpu}."
        )
    if not found.tensor:
        return f"{what} The tensor cores have no part in it."
    return f"{what} The tensor cores need {_spelled(found, found.tensor)} of that, {found.tensor / found.time:.0%}."


def _memory(found: Diagnosis) -> list[str]:
    if not found.memory:
        return []
    said = f"On a full GPU, an SM's share of the memory takes {_spelled(found, found.memory)} for these keys."
    if found.memory < found.time:
        return [said]
    return [f"{said} That is longer: then memory is the limit, and what follows counts where few CTAs run."]


def _limiter(found: Diagnosis) -> list[str]:
    limit = found.limiter
    if limit is None:
        return [f"Nothing beside the products costs {FLOOR:.0%} or more."]
    most = "at best " if found.is_measured else ""
    said = (
        f"What costs most is {limit.meaning}. Without that, {most}{_spelled(found, limit.without)} would be left: "
        f"{_faster(found.gain(limit))}."
    )
    return [said, *(_line(place, share) for place, share in limit.lines)]


def _line(place: Position, share: float) -> str:
    return f"  {share:4.0%}  {place}  {linecache.getline(*place).strip()}"


def _idea(found: Diagnosis) -> str:
    limiter, advice = found.limiter, found.advice
    if limiter is None:
        return "No idea of a later rung is against what is left."
    if advice is None:
        return f"No later rung of this ladder has an idea against it, nor against another limit that costs {FLOOR:.0%}."
    nearest, *others = found.ideas(advice)
    also = f" Later ones: {', '.join(rung.address for rung in others)}." if others else ""
    idea = f"rung {nearest.address}, {nearest.title}: {nearest.idea} ({page(nearest)}){also}"
    if advice is limiter:
        return f"The idea against it is that of {idea}"
    return (
        f"No later rung has an idea against that. The next limit with one is {advice.meaning}. Without that, "
        f"{_spelled(found, advice.without)} would be left: {_faster(found.gain(advice))}. The idea is that of {idea}"
    )


def _faster(gain: float) -> str:
    return f"{gain:.0%} faster" if gain < 1 else f"{1 + gain:.1f} times as fast"


def _source(found: Diagnosis) -> str:
    if found.is_measured:
        return "Nsight Compute sampled where warps were, and what they waited for."
    said = (
        "This is a prediction: the loop, simulated without each limit in turn, and the emulator's bank conflicts. It "
    )
    if not found.experience:
        return f"{said}ranks limits; how far its times are off is not known for this rung."
    low, high = found.experience
    return f"{said}ranks limits; on an H200, rungs 02 to 24 took {low:g} to {high:g} times as long as it says."


def page(version: Version) -> str:
    """A rung's page, as a path from here."""
    path = version.directory / "README.md"
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def limits(found: Diagnosis) -> Table:
    """All limits, the costliest first, and the later rungs against each."""
    columns = ["limit", *numbers("without it", "faster by"), "ideas"]
    return table(
        "What is gained without" + ("" if found.is_measured else ", predicted"),
        columns,
        (_gained(found, limit) for limit in found.limits),
    )


def _gained(found: Diagnosis, limit: Limit) -> list[Text]:
    gain = found.gain(limit)
    ideas = ", ".join(later.address for later in found.ideas(limit))
    cells = (limit.name, _spelled(found, limit.without), f"{gain:.1%}" if gain > 0 else "nothing", ideas)
    return styled("" if gain >= FLOOR else "dim", cells)


def summary(diagnoses: Sequence[Diagnosis]) -> Table:
    """Several rungs, a line each."""
    columns = ["rung", *numbers("time", "tensor", "gain"), "limiter", "idea"]
    return table("What costs most, predicted, and the next idea against it", columns, map(_line_of, diagnoses))


def _line_of(found: Diagnosis) -> list[str]:
    limit = found.limiter
    costs = [f"{found.gain(limit):.0%}", limit.name] if limit else ["", "none"]
    tensor = f"{found.tensor / found.time:.0%}"
    return [found.version.address, _spelled(found, found.time), tensor, *costs, _short(found)]


def _short(found: Diagnosis) -> str:
    advice = found.advice
    if advice is None:
        return "none in a later rung"
    against = "" if advice is found.limiter else f", against {advice.name}"
    return f"{found.ideas(advice)[0].name}{against}"


def _spelled(found: Diagnosis, time: float) -> str:
    return _TIMES[found.unit == MICROSECONDS].format(time)
