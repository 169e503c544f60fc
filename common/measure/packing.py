"""Packed sequences beside official kernels', and beside padding: of the same lengths, in one contest."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from flashladder.common.catalog import FASTEST, choice
from flashladder.common.compiler import build
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.compile import BuildRequest
from flashladder.common.errors import ConfigError
from flashladder.common.measure import baselines
from flashladder.common.measure.contest import ProblemInstance
from flashladder.common.measure.timing import Measurement, TimingSettings, measure
from flashladder.common.problem.operations.packed import one_sequence
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.target import Target

MIXES = ("equal", "spread", "one long")
_EQUAL, _SHORT = 2048, 512  # tokens of a sequence


def lengths(mix: str, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Sequences of so many tokens in all: equal ones, any from 1 to 4,096, or one of half of them among short ones."""
    if mix not in MIXES:
        raise ConfigError(f"no mix {mix} of lengths; there are {', '.join(MIXES)}")
    if tokens < 2 * _EQUAL:
        raise ConfigError(f"tokens={tokens}: must be at least {2 * _EQUAL}, two sequences")
    if mix == "one long":
        found, shortest = [tokens // 2], _SHORT
    else:
        found, shortest = [], _EQUAL
    rng = random.Random(seed)
    while left := tokens - sum(found):
        wanted = rng.randint(1, 2 * _EQUAL) if mix == "spread" else shortest
        found.append(min(wanted, left))
    rng.shuffle(found)
    return tuple(found)


def padded(problem: Problem) -> Problem:
    """The problem that packing avoids: every sequence as long as the longest."""
    longest = max(problem.seqlens_q)
    return replace(one_sequence(problem, longest, longest, problem.layout), batch=len(problem.seqlens_q))


def kernels(problem: Problem, version: str, place: Target) -> dict[str, Artifact]:
    """What `attention(version=...)` launches for packed sequences, and without a version for padded ones."""
    asked = {"packed": (version, problem), "padded": (FASTEST, padded(problem))}
    chosen = [choice(each, place.card, name) for name, each in asked.values()]
    made = build([BuildRequest(*each, place.arch, lines=False) for each in chosen])
    for artifact in made:
        place.check(artifact)
    return dict(zip(asked, made, strict=True))


def contest(problem: Problem, ours: Mapping[str, Artifact], settings: TimingSettings) -> Measurement:
    """The kernels beside the official one, to which ratios refer, and others where they are installed.

    Each is checked. DeviceError without a GPU, VerificationError for an output that is wrong.
    """
    instances = {
        "packed": (packed := ProblemInstance(problem, "cuda")),
        "padded": ProblemInstance(padded(problem), "cuda"),
    }
    first, *others = baselines.of(problem.operation).values()
    official = [first, *(each for each in others if not (each.missing() or each.refusal(problem)))]
    launches = [instances[name].ours(name, kernel, timed=True) for name, kernel in ours.items()]
    return measure([*map(packed.official, official), *launches], settings)
