"""Attention as a function of torch tensors, for models: a rung that takes any attention behind one call."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch

from flashladder.common import catalog
from flashladder.common.build import build_one
from flashladder.common.build.artifact import Artifact
from flashladder.common.config import listing
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.measure.entrants import Entrant
from flashladder.common.problem import DTYPES, Problem, Tensors, make_inputs
from flashladder.common.run import target
from flashladder.common.run.execute import on_emulator, on_gpu
from flashladder.common.run.launch import check

DEFAULT = "woven_general"  # the fastest that takes any attention
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    version: str = DEFAULT,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V, as the rung `version` computes it; forward only.

    q is (batch, seqlen_q, num_heads, head_dim), k and v are (batch, seqlen_k, num_heads_k, head_dim), of bf16 or fp16,
    with any strides whose last is 1; num_heads_k divides num_heads. A causal mask is aligned to the bottom right.
    softmax_scale defaults to 1 / sqrt(head_dim). Returns O, shaped as q, and with `return_lse` also the log-sum-exp of
    each row of scores, (batch, num_heads, seqlen_q), fp32, in natural logarithms. A row that sees no key has O = 0 and
    a log-sum-exp of -inf.

    The kernel is compiled at the first call for a dtype, head_dim and mask, once with the log-sum-exp and once without,
    and launched on the current stream. Tensors on the CPU go through the emulator, which takes seconds for some hundred
    rows. Works under torch.compile.

    Raises UnsupportedProblemError for tensors that the rung does not take, or that want a gradient; ConfigError for an
    unknown version.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise UnsupportedProblemError(
            "the inputs want a gradient, and kernels compute none: call it in torch.no_grad()"
        )
    o, lse = _forward(q, k, v, causal, softmax_scale, version, return_lse)
    return (o, lse) if return_lse else o


@torch.library.custom_op("flashladder::attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    version: str,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp; the latter has no elements unless it is asked for."""
    problem = _problem(q, k, causal, softmax_scale, lse)
    outputs = _outputs(q, lse)
    asked = dict(zip(problem.outputs, outputs, strict=False))
    if q.is_cuda:
        with torch.cuda.device(q.device):
            tensors = Tensors({"q": q, "k": k, "v": v, **asked})
            on_gpu(_artifact(version, problem, q.device.index), problem, tensors)()
    else:
        _emulate(problem, q, k, v, asked, version)
    return outputs


@_forward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    version: str,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q, lse)


def _outputs(q: torch.Tensor, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, num_heads, _ = q.shape
    rows = (batch, num_heads, seqlen_q) if lse else (0,)
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


def _problem(q: torch.Tensor, k: torch.Tensor, causal: bool, softmax_scale: float | None, lse: bool) -> Problem:
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4:
            shape = tuple(tensor.shape)
            raise UnsupportedProblemError(f"{name} has shape {shape}; it should be (batch, seqlen, heads, head_dim)")
    if q.dtype not in _NAMES:
        raise UnsupportedProblemError(f"q is {q.dtype}; kernels take {listing(_NAMES)}")
    batch, seqlen_q, num_heads, head_dim = q.shape
    return Problem(
        batch=batch,
        num_heads=num_heads,
        num_heads_k=k.shape[2],
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        head_dim=head_dim,
        dtype=_NAMES[q.dtype],
        causal=causal,
        softmax_scale=softmax_scale,  # type: ignore[arg-type]  # None: the default
        lse=lse,
    )


@lru_cache(maxsize=1024)
def _artifact(version: str, problem: Problem, device: int | None) -> Artifact:
    """What runs on the device, which is current, or with None on the emulator: as tuned for it, or the default."""
    rung, place = catalog.find(version), target.resolve("emulator" if device is None else "gpu", None)
    entrant = Entrant(version, rung, {}, tuned_for=place.gpu.name)
    artifact = build_one(rung, entrant.config(problem, place.gpu), place.arch)
    place.check(artifact)
    return artifact


def _emulate(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outputs: dict[str, torch.Tensor], version: str
) -> None:
    """On copies of the tensors, in memory whose bounds the emulator knows."""
    artifact, tensors = _artifact(version, problem, None), make_inputs(problem)
    check(problem, dataclasses.replace(tensors, by_name={**tensors.by_name, "q": q, "k": k, "v": v}))
    for copy, tensor in ((tensors.q, q), (tensors.k, k), (tensors.v, v)):
        copy.copy_(tensor)
    on_emulator(artifact, problem, tensors, race=False)
    for name, output in outputs.items():
        output.copy_(getattr(tensors, name))
