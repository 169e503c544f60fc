"""Multi-head latent attention, decode: all heads share one row of the cache a key, whose first columns are V too.

    q              (batch, seqlen_q, num_heads, head_dim), the part that is absorbed and the part that is rotated
    k_cache        (batch, seqlen_k, num_heads_k, head_dim): the latent and the rotated part of each key
    v_cache        the first head_dim_v columns of the same memory: the latent
    cache_seqlens  (batch), int32: how many keys a sequence has
    o              (batch, seqlen_q, num_heads, head_dim_v)
    lse            (batch, num_heads, seqlen_q), fp32; +inf of a row that sees no key, as FlashMLA's

A paged cache is (num_pages, page_size, num_heads_k, head_dim), with the block table of the ladder for decode.
DeepSeek-V2 and -V3 have head_dim 576, head_dim_v 512 and one head of K (arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.buffers import Tensor
from flashladder.common.problem.config import listing
from flashladder.common.problem.decode_sizes import TARGET_CTAS, seqlens, tiles
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.operations.decode import CACHES, Decode
from flashladder.common.problem.problem import Option, Problem

HEAD_DIM, HEAD_DIM_V = 576, 512
DESIGNED_COLUMNS = HEAD_DIM - HEAD_DIM_V  # of K alone, through which families of inputs design scores
MOST_WORK = 0.9  # of the SMs: to cut sequences for the others costs more than it brings
KNOWN = ("paged", "page_size", "num_pages", "num_splits")  # options of decode that there are for MLA, too
_SIZES: dict[str, Any] = {"num_heads_k": 1, "seqlen_q": 1, "head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM_V}


class _Latent(Decode):
    """What MLA has beside decode: one tensor is both caches."""

    name = "mla"
    features: ClassVar[tuple[str, ...]] = ("causal", "seqlens_k")
    options: ClassVar[tuple[Option, ...]] = tuple(
        replace(option, default=True) if option.name == "paged" else option for option in Decode.options
    )
    signed_together: ClassVar[tuple[tuple[str, ...], ...]] = (("q", *CACHES, "o"),)  # V is K, so O follows
    tile_rows: ClassVar[int] = 64  # of a warpgroup's product
    lse_without_keys = math.inf
    usual: ClassVar = {**_SIZES, "batch": 128, "num_heads": 128, "seqlen_k": 4096}
    sampled: ClassVar = {**_SIZES, "batch": 128, "num_heads": 128, "seqlen_k": 1024}
    small: ClassVar = {**_SIZES, "batch": 2, "num_heads": 16, "seqlen_k": 192}

    def argument(self, problem: Problem, name: str) -> Any:
        """As for decode; but where a part a sequence is nearly one a CTA, there are no more."""
        p = problem
        if name == "target_parts" and not p.num_splits and MOST_WORK * TARGET_CTAS <= p.batch * tiles(p) <= TARGET_CTAS:
            return p.batch
        return super().argument(problem, name)

    def check(self, problem: Problem) -> None:
        """V is a part of K, and a design needs the other one."""
        if foreign := [name for name in problem.set_options if name not in KNOWN]:
            raise UnsupportedProblemError(f"the operation mla knows no {listing(foreign)}")
        super().check(problem)
        if problem.head_dim_v > problem.head_dim:
            raise UnsupportedProblemError(
                f"head_dim_v={problem.head_dim_v}: V is the first columns of K, which has head_dim={problem.head_dim}"
            )
        if problem.family != NORMAL and problem.head_dim - problem.head_dim_v < DESIGNED_COLUMNS:
            raise UnsupportedProblemError(
                f"family={problem.family}: its scores take {DESIGNED_COLUMNS} columns that are K's alone, more than "
                f"head_dim={problem.head_dim} has beside head_dim_v={problem.head_dim_v}"
            )

    def _design(
        self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
    ) -> None:
        """Scores of a design come from the columns that are K's alone; Q is zero at those that are V's too."""
        if problem.family != NORMAL:
            q.zero_()
            q, k = (x[..., problem.head_dim_v :] for x in (q, k))
        super()._design(problem, q, k, v, generator)

    def of_rows(self, rows: int, heads: int) -> dict[str, Any]:
        """A cache in one piece, so that each sequence may be of another family."""
        return {**_SIZES, **super().of_rows(rows, heads), "options": {"paged": False}}

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """As for decode, but for the log-sum-exp of a row that sees no key."""
        computed = super().compute(problem, tensors, dtype)
        computed["lse"].masked_fill_(computed["lse"] == -math.inf, self.lse_without_keys)
        return computed

    def bytes_moved(self, problem: Problem) -> float:
        """The cache once, and Q and O, which are as large where it is short."""
        p = problem
        rows = p.batch * p.seqlen_q * p.num_heads
        return 2.0 * (sum(seqlens(p)) * p.num_heads_k * p.head_dim + rows * (p.head_dim + p.head_dim_v))

    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """V lies in K."""
        found = super().tensors(problem)
        k, v = (found[name] for name in CACHES)
        return found | {CACHES[1]: replace(k, view=replace(k.view, shape=v.shape), within=CACHES[0])}


OPERATION = _Latent()
