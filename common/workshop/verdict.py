"""What a trial comes to, in the words of a person who has to decide."""

from __future__ import annotations

from flashladder.common.measure.statistics import Estimate
from flashladder.common.workshop.trial import Idea, Timing, Trial

LOOP, CYCLES, SPILLS = (  # of Code.figures
    "instructions in the main loop",
    "cycles to issue the loop, one warp",
    "spill stores and loads, bytes",
)
TELLING = 0.005  # a change of the schedule's length below this says nothing of the time
ADVICE = {
    "faster": "keep it",
    "slower": "drop it",
    "tied": "keep it only if it is simpler",
    "unclear": "measure again with more --rounds",
}


def in_words(trial: Trial) -> str:
    """A sentence: how much faster or slower, of what, at what, how sure, and what to do."""
    parent, what = trial.idea.against, f"at {trial.idea.problem.name}"
    if trial.is_same_code:
        return (
            f"the same machine code as {parent} {what}: the compiler sees no difference, and there is none to measure"
        )
    if trial.timing is None:
        return f"predicted, not measured: {_predicted(trial)}"
    return f"{_measured(trial.timing, parent)} {what}, {_interval(trial.timing.ratio)}: {ADVICE[trial.timing.verdict]}"


def short(trial: Trial) -> str:
    """In a word or two, for a table."""
    if trial.is_same_code:
        return "same code"
    return trial.timing.verdict if trial.timing else "predicted"


def untried(idea: Idea) -> str:
    """What the rung takes and this problem does not ask for, in words; empty where it is all there is."""
    supports, problem = idea.version.supports, idea.problem
    kinds = [
        *(["causal masks"] if supports.causal and not problem.causal else []),
        *(dtype for dtype in supports.dtype if dtype != problem.dtype),
        *(f"head_dim {head_dim}" for head_dim in supports.head_dim if head_dim != problem.head_dim),
    ]
    return f"not tried: {', '.join(kinds)}" if kinds else ""


def changes(trial: Trial) -> dict[str, tuple[int, int]]:
    """The figures of the machine code that changed, before and after."""
    after = trial.ours.figures()
    return {name: (value, after[name]) for name, value in trial.parent.figures().items() if value != after[name]}


def _measured(timing: Timing, parent: str) -> str:
    if timing.verdict == "tied":
        return f"no difference from {parent} that can be measured"
    if timing.verdict == "unclear":
        return f"neither faster nor slower than {parent} for sure"
    return f"{_percent(timing.ratio.value).lstrip('+-')} {timing.verdict} than {parent}"


def _interval(ratio: Estimate) -> str:
    return f"95 % interval {_percent(ratio.low)} to {_percent(ratio.high)}"


def _percent(ratio: float) -> str:
    """How much faster the rung is: the parent's time over its own, less one."""
    return f"{100 * (ratio - 1):+.1f} %"


def _predicted(trial: Trial) -> str:
    """What the machine code says of the time, and how far that goes."""
    before, after, parent = trial.parent.figures(), trial.ours.figures(), trial.idea.against
    figures = (
        "; ".join(f"{name}: {old:,} → {new:,}" for name, (old, new) in changes(trial).items()) or "no figure changed"
    )
    work = _work(trial)
    change = after[CYCLES] / before[CYCLES] / work - 1 if before[CYCLES] else 0.0
    of = f"{parent}, for as much work" if work != 1 else parent
    if trial.idea.version.instruction_set != trial.idea.parent.instruction_set:
        guess = f"its products are other instructions than those of {parent}, so the lengths of the loops say nothing"
    elif after[SPILLS] > before[SPILLS]:
        guess = f"it spills {after[SPILLS] - before[SPILLS]:,} bytes more than {parent}, which costs time"
    elif abs(change) < TELLING:
        guess = f"the main loop is as long as that of {of}"
    else:
        longer = "shorter" if change < 0 else "longer"
        guess = f"the main loop's schedule is {100 * abs(change):.1f} % {longer} than that of {of}"
    return f"{guess} ({figures}). A GPU decides"


def _work(trial: Trial) -> float:
    """The products of a warp in a pass through the loop, by those in its parent's; 1 without tensor cores."""
    ours, parents = trial.ours.loop_flops, trial.parent.loop_flops
    return ours / parents if ours and parents else 1.0
