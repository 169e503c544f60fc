"""What the two tiled algorithms in plain Python share: counted memory, tiles, the mask, and torch's autograd.

A GPU has a large memory (HBM) and, in each multiprocessor, a small one (SRAM). Nothing is computed in HBM: a tile
is loaded, worked on, and stored. `Hbm` counts those bytes, which is what FlashAttention is about.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flashladder.common.measure.references import Prepared
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem


@dataclass
class Hbm:
    """Moves tiles between HBM and SRAM, and counts the bytes by the name of the matrix."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)

    def load(self, name: str, tile: Tensor) -> Tensor:
        """A tile of a matrix, as numbers to compute with: fp32, or fp64 where the matrix is."""
        self.read[name] += tile.numel() * tile.element_size()
        return tile.to(precision(tile))

    def store(self, name: str, place: Tensor, tile: Tensor) -> None:
        """Writes a tile to its place in a matrix, rounded to the matrix's dtype."""
        self.written[name] += place.numel() * place.element_size()
        place.copy_(tile)

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.read.total() + self.written.total()


def precision(tensor: Tensor) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def tiles(length: int, size: int) -> Iterator[slice]:
    """The tiles of so many rows; the last may be shorter."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees: all, or, causal, those up to its own place counted from the ends of Q and K."""

    causal: bool
    shift: int  # seqlen_k - seqlen_q

    def hides(self, rows: slice, keys: slice) -> bool:
        """Whether no row of the tile sees any of its keys, so that the tile can be left out."""
        return self.causal and keys.start > rows.stop - 1 + self.shift

    def apply(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """The tile of S = Q K^T with minus infinity where a row does not see a key."""
        if not self.causal or keys.stop - 1 <= rows.start + self.shift:
            return scores
        row = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=scores.device)
        return scores.masked_fill(key > row + self.shift, -math.inf)


@dataclass(frozen=True)
class Tiling:
    """What a tiled algorithm needs to know beside its matrices."""

    softmax_scale: float
    mask: AttentionMask
    block_m: int  # B_r in the papers: rows of a tile of Q
    block_n: int  # B_c: rows of a tile of K and V


class TiledForward(Protocol):
    """q (..., seqlen_q, head_dim), k and v (..., seqlen_k, head_dim) -> o like q, lse (..., seqlen_q)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, hbm: Hbm) -> tuple[Tensor, Tensor]: ...


class TiledBackward(Protocol):
    """The gradients of q, k and v, from that of o."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, tiling: Tiling, hbm: Hbm
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def attention(
    algorithm: tuple[TiledForward, TiledBackward],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    block_m: int = 64,
    block_n: int = 64,
    hbm: Hbm | None = None,
) -> tuple[Tensor, Tensor]:
    """Differentiable attention by an algorithm: o like q, lse (batch, heads, seqlen_q).

    q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_k, head_dim). lse carries no gradient.
    """
    heads_k = k.shape[2]
    tiling = Tiling(
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        mask=AttentionMask(causal, k.shape[1] - q.shape[1]),
        block_m=block_m,
        block_n=block_n,
    )
    grouped_q = q.transpose(1, 2).unflatten(1, (heads_k, -1))
    shared = (*grouped_q.shape[:3], *k.shape[1::2])  # a head of K and V serves all heads of Q in its group
    grouped_k, grouped_v = (tensor.transpose(1, 2)[:, :, None].expand(shared) for tensor in (k, v))
    o, lse = _Attention.apply(grouped_q, grouped_k, grouped_v, algorithm, tiling, hbm or Hbm())
    return o.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, o and lse for the backward pass. It keeps neither S nor P."""

    @staticmethod
    def forward(ctx, q, k, v, algorithm, tiling, hbm):  # type: ignore[no-untyped-def]
        o, lse = algorithm[0](q, k, v, tiling, hbm)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.rest = algorithm[1], tiling, hbm
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, _):  # type: ignore[no-untyped-def]
        backward, tiling, hbm = ctx.rest
        return *backward(*ctx.saved_tensors, grad_o, tiling, hbm), None, None, None


def prepare(
    algorithm: tuple[TiledForward, TiledBackward], problem: Problem, config: KernelConfig, tensors: Tensors
) -> Prepared:
    """The forward pass on these tensors, with the traffic of its latest run."""
    latest = Hbm()

    def launch() -> None:
        nonlocal latest
        latest = Hbm()
        o, lse = attention(
            algorithm,
            tensors.q,
            tensors.k,
            tensors.v,
            softmax_scale=problem.softmax_scale,
            causal=problem.causal,
            block_m=config.block_m,
            block_n=config.block_n,
            hbm=latest,
        )
        tensors.o.copy_(o)
        if problem.lse:
            tensors.lse.copy_(lse)

    return Prepared(launch, lambda: traffic_facts(latest, problem))


def textbook_bytes(problem: Problem) -> int:
    """What crosses where S and P are whole in HBM: S is written, read for the softmax; P is written, read for P V."""
    return io_bytes(problem) + 4 * 2 * problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k


def io_bytes(problem: Problem) -> int:
    """Each head's Q, K, V and O, once."""
    rows = 2 * problem.seqlen_q + 2 * problem.seqlen_k
    return 2 * problem.batch * problem.num_heads * rows * problem.head_dim


def traffic_facts(hbm: Hbm, problem: Problem) -> dict[str, str]:
    """The counted traffic in words."""

    def words(counts: Counter[str]) -> str:
        return ", ".join(f"{name} {count / 2**20:.2f}" for name, count in counts.items())

    least = io_bytes(problem)
    return {
        "HBM to SRAM": f"{hbm.read.total() / 2**20:.2f} MiB: {words(hbm.read)}",
        "SRAM to HBM": f"{hbm.written.total() / 2**20:.2f} MiB: {words(hbm.written)}",
        "together": f"{hbm.total / least:.1f} times Q, K, V and O ({least / 2**20:.2f} MiB); "
        f"with S and P in HBM, {textbook_bytes(problem) / least:.1f} times",
    }


def toolkit() -> str:
    """torch compiles nothing here, and runs it."""
    return f"torch {torch.__version__}"
