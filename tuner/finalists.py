"""Who wins: the best trials once more, in the same rounds, and a choice that noise does not make.

A winner is never slower than the rung's default. Of kernels that nobody can tell apart from the fastest the default
wins, then an earlier winner, then the one that takes fewer resources, then the one whose name comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashladder.common.measure.statistics import Estimate, geometric_mean, verdict
from flashladder.tuner.candidates import Candidate
from flashladder.tuner.worker import Comparison

LIMIT = 8  # finalists, the default and an earlier winner among them


@dataclass(frozen=True)
class Standing:
    """How a finalist did."""

    kernel: Candidate
    ratio: Estimate  # the baseline's time / the kernel's
    to_default: Estimate | None  # the default's time / the kernel's; None where the default does not run


@dataclass(frozen=True)
class Final:
    """The contest's end. Standings: the fastest first."""

    winner: Candidate
    standings: tuple[Standing, ...]
    control: Estimate  # the baseline against itself


def choose(
    results: Mapping[str, Estimate], kernels: Sequence[Candidate], always: Sequence[Candidate]
) -> list[Candidate]:
    """The kernels, `always` first, whose measured ratio noise may have put below the best one's, the fastest first."""
    measured = sorted((kernel for kernel in kernels if kernel.code in results), key=lambda k: -results[k.code].value)
    if not measured:
        return []
    least = results[measured[0].code].low
    close = [kernel for kernel in measured if results[kernel.code].high >= least]
    first = [kernel for kernel in always if kernel.code in results]
    return list(dict.fromkeys([*first, *close]))[: max(LIMIT, len(first) + 1)]


def decide(comparison: Comparison, finalists: Sequence[Candidate], default: Candidate | None) -> Final:
    """The winner of finalists that were measured together; their order says who is preferred at a tie."""
    ratios = {k.code: geometric_mean(comparison.pairs(comparison.baseline, k.code)) for k in finalists}
    control = geometric_mean(comparison.pairs(comparison.baseline, comparison.control))
    ranking = sorted(finalists, key=lambda kernel: -ratios[kernel.code].value)
    leader = ranking[0]

    def is_slower(kernel: Candidate) -> bool:
        to_leader = geometric_mean(comparison.pairs(leader.code, kernel.code))
        return kernel != leader and verdict(to_leader, control) == "slower"

    least = ratios[default.code].value if default else 0.0
    tied = [kernel for kernel in finalists if ratios[kernel.code].value >= least and not is_slower(kernel)]
    preferred = {kernel.code: place for place, kernel in enumerate(finalists)}
    winner = min(tied, key=lambda kernel: (kernel != default, preferred[kernel.code]))
    standings = [
        Standing(
            kernel,
            ratios[kernel.code],
            geometric_mean(comparison.pairs(default.code, kernel.code)) if default else None,
        )
        for kernel in ranking
    ]
    return Final(winner, tuple(standings), control)


def by_preference(kernels: Sequence[Candidate], first: Sequence[Candidate]) -> list[Candidate]:
    """Those in `first`, in its order; then by registers, shared memory, threads and name."""

    def key(kernel: Candidate) -> tuple[object, ...]:
        one = kernel.artifacts[0]
        place = first.index(kernel) if kernel in first else len(first)
        return place, one.registers, one.launch.shared_bytes, one.launch.num_threads, kernel.config.name

    return sorted(kernels, key=key)
