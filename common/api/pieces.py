"""A problem that no launch takes at once, in pieces: CUDA's grids have bounds.

A piece has some of the sequences, or some heads of K with the heads of Q that share them. Its tensors are views of the
whole problem's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from flashladder.common.api import sequences
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.operations.forward import SLOPES
from flashladder.common.problem.operations.packed import STARTS
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import launch

Piece = tuple[Problem, dict[str, torch.Tensor]]
_OF_ROWS = ("q", "o", "lse", "dout", "dlse", "dq", "dsinks")  # tensors of packed sequences that have the rows of Q
_OF_KEYS = ("k", "v", "dk", "dv")


def require_one_launch(problem: Problem) -> None:
    """UnsupportedProblemError for dropout in more sequences or heads than a grid has.

    Which weights are dropped depends on the number of a head in a launch: in a piece others would be.
    """
    most = launch.MAX_GRID_YZ
    if problem.dropout_p and max(problem.batch, problem.num_heads) > most:
        raise UnsupportedProblemError(
            f"dropout_p={problem.dropout_p} with batch={problem.batch} and num_heads={problem.num_heads}: kernels drop "
            f"weights in up to {most} sequences and heads at a time; call it on fewer, or without dropout"
        )


def halves(problem: Problem, tensors: Mapping[str, torch.Tensor], error: UnsupportedProblemError) -> Iterator[Piece]:
    """Both, with their tensors. The error, which says why it is too large, where it has no halves."""
    of_heads = problem.num_heads_k > problem.batch
    count = problem.num_heads_k if of_heads else problem.batch
    if count == 1 or problem.dropout_p or problem.mods:  # expressions name heads and sequences
        require_one_launch(problem)
        raise error
    for begin, end in ((0, count // 2), (count // 2, count)):
        if problem.packed and not of_heads:
            yield _of_sequences(problem, tensors, begin, end)
            continue
        group = problem.num_heads // problem.num_heads_k
        heads: dict[str, Any] = {"num_heads_k": end - begin, "num_heads": (end - begin) * group}
        piece = replace(problem, **heads) if of_heads else replace(problem, batch=end - begin)
        yield piece, _views(problem, piece, tensors, begin, count)


def _views(
    problem: Problem, piece: Problem, tensors: Mapping[str, torch.Tensor], begin: int, count: int
) -> dict[str, torch.Tensor]:
    """Of each tensor the part of the piece that begins with number `begin` of so many: along what differs in size."""
    found: dict[str, torch.Tensor] = {}
    for name, declared in piece.tensors.items():
        if (part := tensors.get(name)) is None:
            continue
        sizes = zip(problem.tensors[name].shape, declared.shape, strict=True)
        for dimension, (size, wanted) in enumerate(sizes):
            if size != wanted:
                part = part.narrow(dimension, begin * (size // count), wanted)
        found[name] = part
    return found


def _of_sequences(problem: Problem, tensors: Mapping[str, torch.Tensor], begin: int, end: int) -> Piece:
    """Packed sequences, with their rows; the last piece also has those of no sequence."""
    rows: dict[str, tuple[int, int]] = {}
    parts: dict[str, torch.Tensor] = {}
    for of, name in zip("qk", STARTS, strict=True):
        starts = sequences.bounds(tensors[name])
        rows[of] = starts[begin], tensors[of].shape[1] if end == problem.batch else starts[end]
        parts[name] = tensors[name][begin : end + 1] - starts[begin]
    totals: dict[str, Any] = {}
    for of, (first, behind) in rows.items():
        total = max(1, behind - first)
        totals |= {f"total_{of}": total, f"seqlen_{of}": min(getattr(problem, f"seqlen_{of}"), total)}
    for name, whole in tensors.items():
        if name in (*_OF_ROWS, *_OF_KEYS):
            first, behind = rows["k" if name in _OF_KEYS else "q"]
            parts[name] = whole[:, first:behind]
        elif name not in parts:
            parts[name] = whole[begin:end] if name == SLOPES else whole
    return replace(problem, batch=end - begin, **totals), parts
