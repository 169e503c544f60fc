"""A problem on a model's tensors, wherever they are: by the kernel that takes it, on their GPU or on the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache

import torch

from flashladder.common import catalog
from flashladder.common.build import build_one
from flashladder.common.build.artifact import Artifact
from flashladder.common.config import listing
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.measure.entrants import Entrant
from flashladder.common.problem import DTYPES, Problem, Tensors, allocate
from flashladder.common.run import target
from flashladder.common.run.execute import on_emulator, on_gpu
from flashladder.common.run.launch import check

RUNG = "woven_general"  # the one that takes packed sequences, windows and softcaps
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_of(q: torch.Tensor) -> str:
    """As a problem spells it. UnsupportedProblemError for one that no kernel takes."""
    if q.dtype not in _NAMES:
        raise UnsupportedProblemError(f"q is {q.dtype}; kernels take {listing(_NAMES)}")
    return _NAMES[q.dtype]


def run(problem: Problem, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
    """Fills the outputs. UnsupportedProblemError for tensors that are not the problem's, or that no kernel takes."""
    tensors = Tensors({**inputs, **outputs}, problem.asked)
    if (device := tensors.device).type == "cuda":
        with torch.cuda.device(device):
            on_gpu(_artifact(_kind(problem), device.index), problem, tensors)()
        return
    check(problem, tensors)
    guarded = allocate(problem)  # in memory whose bounds the emulator knows
    for name, tensor in inputs.items():
        guarded.by_name[name].copy_(tensor)
    on_emulator(_artifact(_kind(problem), None), problem, guarded, race=False)
    for name, output in outputs.items():
        output.copy_(guarded.by_name[name])


def _kind(problem: Problem) -> Problem:
    """All problems that one kernel computes, as the smallest of them."""
    return dataclasses.replace(
        problem,
        batch=1,
        num_heads=1,
        num_heads_k=1,
        seqlen_q=1,
        seqlen_k=1,
        softmax_scale=1.0,
        window_left=None if problem.window_left is None else 0,
        window_right=None if problem.window_right is None else 0,
        softcap=1.0 if problem.softcap else 0.0,
        total_q=1 if problem.packed else problem.total_q,
        total_k=1 if problem.packed else problem.total_k,
    )


@lru_cache(maxsize=64)
def _artifact(kind: Problem, device: int | None) -> Artifact:
    """What runs on the device, which is current, or with None on the emulator: as tuned for it, or the default."""
    rung, place = catalog.find(RUNG), target.resolve("emulator" if device is None else "gpu", None)
    entrant = Entrant(RUNG, rung, {}, tuned_for=place.gpu.name)
    artifact = build_one(rung, entrant.config(kind, place.gpu), place.arch)
    place.check(artifact)
    return artifact
