"""Compiles attention.c for this machine's CPU and calls it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashladder.common import host
from flashladder.common.compiler.library import build_library, find_c_compiler
from flashladder.common.compiler.toolchain import version_text
from flashladder.common.measure.references import Prepared
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem

SOURCE = Path(__file__).parent / "attention.c"
REALS = {"fp32": (torch.float32, "float"), "fp64": (torch.float64, "double")}


class _Problem(ctypes.Structure):
    """attention.c's Problem."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "head_dim")),
        ("causal", ctypes.c_int),
        ("softmax_scale", ctypes.c_double),
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    accumulate: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """Exact attention, everything computed in `accumulate` (fp32 or fp64): o like q and lse, of that dtype.

    q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_k, head_dim), of any dtype; o is not rounded.
    """
    dtype, _ = REALS[accumulate]
    (batch, seqlen_q, heads, head_dim), (seqlen_k, heads_k) = q.shape, k.shape[1:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    problem = _Problem(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, causal, scale)
    inputs = [tensor.to(dtype).contiguous() for tensor in (q, k, v)]
    o = torch.empty(q.shape, dtype=dtype)
    lse = torch.empty(batch, heads, seqlen_q, dtype=dtype)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*inputs, o, lse)]
    _library(accumulate).attention_forward(ctypes.byref(problem), host.threads(), *pointers)
    return o, lse


@cache
def _library(accumulate: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build_library(SOURCE, {"real": REALS[accumulate][1]})))


def toolkit() -> str:
    """The C compiler."""
    return version_text(find_c_compiler()).splitlines()[0]


def prepare(problem: Problem, config: KernelConfig, tensors: Tensors) -> Prepared:
    """Compiles, and binds to the tensors."""
    _library(config.accumulate)

    def launch() -> None:
        o, lse = attention(
            tensors.q,
            tensors.k,
            tensors.v,
            softmax_scale=problem.softmax_scale,
            causal=problem.causal,
            accumulate=config.accumulate,
        )
        tensors.o.copy_(o)
        if problem.lse:
            tensors.lse.copy_(lse)

    return Prepared(launch)
