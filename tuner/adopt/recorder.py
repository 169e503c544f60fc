"""A Python program is run, and the attention problems that it asks for are noted.

    python -m flashladder.tuner.adopt.recorder FILE script.py ARGUMENTS
    python -m flashladder.tuner.adopt.recorder FILE -m MODULE ARGUMENTS

Noted are the calls of torch.nn.functional.scaled_dot_product_attention and of this project's functions, in all threads
of this process. torch.compile is off meanwhile, and so is the fast path of torch.nn.MultiheadAttention: what they
compile makes no calls. The replay of a CUDA graph makes none either; its capture counts once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import runpy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional

from flashladder.common.api import operator
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.tuner.adopt.demand import Demand

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Recorder:
    """Counts problems, and the reasons why other calls ask for none that kernels here take."""

    def __init__(self) -> None:
        self.calls: Counter[Problem] = Counter()
        self.refused: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._within = threading.local()  # a call of torch's, which may come to ours: it counts once

    def start(self) -> None:
        """From now on calls are noted, for as long as the process lives."""
        torch.compiler.set_stance("force_eager")
        torch.backends.mha.set_fastpath_enabled(False)
        torchs = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = self._noting(torchs)
        operator.watch = self._ours

    def demand(self, words: Sequence[str]) -> Demand:
        """What was noted so far."""
        return Demand(tuple(words), dict(self.calls), dict(self.refused))

    def _noting(self, torchs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(torchs)
        def attend(*arguments: Any, **options: Any) -> torch.Tensor:
            self._within.torchs = True
            try:
                found = torchs(*arguments, **options)
            finally:
                self._within.torchs = False
            self._note(_of_torch, arguments, options)
            return found

        return attend

    def _ours(self, *arguments: Any, **options: Any) -> None:
        if not getattr(self._within, "torchs", False):
            self._note(_of_ours, arguments, options)

    def _note(self, asked: Callable[..., Problem], arguments: Any, options: Any) -> None:
        try:
            problem = asked(*arguments, **options)
        except UnsupportedProblemError as error:
            with self._counting:
                self.refused[str(error)] += 1
        else:
            with self._counting:
                self.calls[problem] += 1


def _of_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """What a call of scaled_dot_product_attention asks for: tensors are (batch, heads, seqlen, head_dim)."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise UnsupportedProblemError("a gradient is wanted: only forward passes are tuned for a program")
    if attn_mask is not None:
        raise UnsupportedProblemError("attn_mask is a tensor: kernels take causal masks, windows and packed sequences")
    if not query.dim() == key.dim() == value.dim() == 4:
        raise UnsupportedProblemError("tensors of other than four dimensions: kernels take (batch, heads, seqlen, d)")
    if key.shape != value.shape or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise UnsupportedProblemError("q, k and v of other batches or head_dims: kernels take them alike")
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedProblemError("is_causal with seqlen_q != seqlen_k: kernels align to the bottom right")
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return _problem(query.transpose(1, 2), key.transpose(1, 2), dtype, causal=is_causal, lse=False, dropout_p=dropout_p)


def _of_ours(problem: Problem, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None) -> Problem:
    """What `attention` computed, or `packed_attention`, whose lengths are read."""
    changed: dict[str, Any] = {"softmax_scale": None}  # on which no kernel's speed depends
    for name, ends in (("seqlens_q", cu_seqlens_q), ("seqlens_k", cu_seqlens_k)):
        if ends is not None and ends.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedProblemError(
                "packed sequences in the capture of a CUDA graph: their lengths cannot be read"
            )
        if ends is not None:
            changed[name] = tuple(ends.diff().tolist())
    return dataclasses.replace(problem, **changed)


def _problem(q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype, **others: Any) -> Problem:
    """Of tensors (batch, seqlen, heads, head_dim), without their softmax_scale."""
    if q.device.type not in ("cuda", "cpu"):
        raise UnsupportedProblemError(f"tensors on {q.device.type}: kernels run on NVIDIA's GPUs, or emulated on a CPU")
    if dtype not in _NAMES:
        raise UnsupportedProblemError(f"q is {dtype}: kernels take {listing(_NAMES)}")
    batch, seqlen_q, heads, head_dim = q.shape
    sizes: dict[str, Any] = {"batch": batch, "num_heads": heads, "num_heads_k": k.shape[2], "head_dim": head_dim}
    return Problem(**sizes, seqlen_q=seqlen_q, seqlen_k=k.shape[1], dtype=_NAMES[dtype], **others)


def record(file: Path, words: Sequence[str]) -> None:
    """Runs `script.py ARGUMENTS` or `-m MODULE ARGUMENTS` as Python would; in the end writes what it asked for."""
    recorder, process = Recorder(), os.getpid()
    recorder.start()
    try:
        _run(words)
    finally:
        if os.getpid() == process:  # not in a fork of the program's
            recorder.demand(words).save(file)


def _run(words: Sequence[str]) -> None:
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2:])
