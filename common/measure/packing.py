"""Packed sequences beside official kernels', and beside padding: of the same lengths, in one contest."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flashladder.common.compiler import build
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.errors import ConfigError
from flashladder.common.measure.baselines import BASELINES, Baseline, Output, RunOnce
from flashladder.common.measure.contest import ProblemInstance
from flashladder.common.measure.timing import Measurement, TimingSettings, measure
from flashladder.common.problem.problem import Problem, Tensors
from flashladder.common.runtime import ahead
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
    return replace(
        problem,
        operation="forward",
        batch=len(problem.seqlens_q),
        seqlen_q=longest,
        seqlen_k=longest,
        seqlens_q=(),
        seqlens_k=(),
        total_q=None,  # type: ignore[arg-type]  # of packed sequences alone
        total_k=None,  # type: ignore[arg-type]
    )


def kernels(problem: Problem, version: str, place: Target) -> dict[str, Artifact]:
    """What `attention(version=...)` launches for packed sequences, and without a version for padded ones."""
    asked = {"packed": (version, problem), "padded": (ahead.DEFAULT, padded(problem))}
    made = build([ahead.request(*each, place.arch, place.gpu) for each in asked.values()])
    for artifact in made:
        place.check(artifact)
    return dict(zip(asked, made, strict=True))


def contest(problem: Problem, ours: Mapping[str, Artifact], settings: TimingSettings) -> Measurement:
    """The kernels beside FlashAttention-2, to which ratios refer, and FlashAttention-3 where it is installed.

    Each is checked. DeviceError without a GPU, VerificationError for an output that is wrong.
    """
    instances = {
        "packed": (packed := ProblemInstance(problem, "cuda")),
        "padded": ProblemInstance(padded(problem), "cuda"),
    }
    official = [FA2_PACKED, *([] if FA3_PACKED.missing() or FA3_PACKED.refusal(problem) else [FA3_PACKED])]
    launches = [instances[name].ours(name, kernel, timed=True) for name, kernel in ours.items()]
    return measure([*map(packed.official, official), *launches], settings)


def _flash_packed(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Without an LSE: torch's is laid out as its FlashAttention-2 has it."""
    q, k, v = tensors.q[0], tensors.k[0], tensors.v[0]
    kernel = torch.ops.aten._flash_attention_forward.default
    starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k)
    causal, scale = problem.causal, problem.softmax_scale

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, *starts, 0.0, causal, False, scale=scale)
        return Output(o[None], lse)

    return run


FA2_PACKED = Baseline(
    "fa2",
    "FlashAttention-2 of packed sequences (torch)",
    "torch",
    "torch",
    "pip install torch",
    _flash_packed,
    operation="packed",
)


def _flash_3_packed(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = tensors.q[0], tensors.k[0], tensors.v[0]
    starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k)
    options = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}

    def run() -> Output:
        return Output(module.flash_attn_varlen_func(q, k, v, *starts, **options)[None])

    return run


FA3_PACKED = replace(
    BASELINES["fa3"], title="FlashAttention-3 of packed sequences", bind=_flash_3_packed, operation="packed", bounds=()
)
