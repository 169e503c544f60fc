"""Multi-head latent attention, decode: all heads share one row of the cache a key, whose first columns are V too.

    q              (batch, seqlen_q, num_heads, head_dim), the part that is absorbed and the part that is rotated
    k_cache        (batch, seqlen_k, num_heads_k, head_dim): the latent and the rotated part of each key
    v_cache        the first head_dim_v columns of the same memory: the latent
    cache_seqlens  (batch), int32: how many keys a sequence has
    o              (batch, seqlen_q, num_heads, head_dim_v)
    lse            (batch, num_heads, seqlen_q), fp32; +inf of a row that sees no key, as FlashMLA's

A paged cache is (num_pages, page_size, num_heads_k, head_dim), with the block table of the ladder for decode.
DeepSeek-V2 and -V3 have head_dim 576, head_dim_v 512 and one head of K (arXiv:2405.04434, section 2.1).

With fp8_rows a row of the cache has 656 bytes, as common/problem/latent_rows.py says, in uint8.

With sparse, a sequence has one row of Q, and its keys are rows of all pages, in any order, as a list says; there is no
block table. So seqlen_k is how long lists are.

    indices        (batch, seqlen_k), int32: of a row of page p, p * page_size + row; any other number, -1, is none
    cache_seqlens  how many of these count
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import latent_rows
from flashladder.common.problem.buffers import Tensor, contiguous, laid_out
from flashladder.common.problem.caches import TABLE
from flashladder.common.problem.config import listing
from flashladder.common.problem.decode_sizes import TARGET_CTAS, seqlens, tiles
from flashladder.common.problem.families import NORMAL
from flashladder.common.problem.operations.decode import CACHES, LENGTHS, ROW_BYTES, Decode
from flashladder.common.problem.options import Option
from flashladder.common.problem.problem import LSE, Problem, largest

HEAD_DIM, HEAD_DIM_V = 576, 512
DESIGNED_COLUMNS = HEAD_DIM - HEAD_DIM_V  # of K alone, through which families of inputs design scores
INDICES = "indices"
NO_ROW = -1
MOST_WORK = 0.9  # of the SMs: to cut sequences for the others costs more than it brings
KNOWN = ("paged", "page_size", "num_pages", "num_splits", "fp8_rows", "sparse")  # options, of decode or its own
_SIZES: dict[str, Any] = {"num_heads_k": 1, "seqlen_q": 1, "head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM_V}


class _Latent(Decode):
    """What MLA has beside decode: one tensor is both caches."""

    name = "mla"
    features: ClassVar[tuple[str, ...]] = ("causal", "seqlens_k")
    options: ClassVar[tuple[Option, ...]] = (
        *(replace(option, default=True) if option.name == "paged" else option for option in Decode.options),
        Option("fp8_rows", bool, "rows of the cache have 656 bytes: 8-bit floats, scales, and bf16", default=False),
        Option("sparse", bool, "a list says where the keys of a row of Q lie", default=False),
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
        if problem.fp8_rows and (problem.head_dim, problem.head_dim_v, problem.dtype) != (HEAD_DIM, HEAD_DIM_V, "bf16"):
            raise UnsupportedProblemError(
                f"fp8_rows=true takes head_dim={HEAD_DIM}, head_dim_v={HEAD_DIM_V} and dtype=bf16, not "
                f"{problem.head_dim}, {problem.head_dim_v} and {problem.dtype}"
            )
        one_row = problem.seqlen_q == problem.num_heads_k == 1
        if problem.sparse and (problem.causal or not (problem.paged and one_row)):
            raise UnsupportedProblemError(
                "sparse=true takes paged=true, causal=false, num_heads_k=1 and seqlen_q=1: each row has its own list"
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

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """As for decode, then in 8 bits, and with a list of the keys in random order, a few of which are none."""
        p = problem
        if not (p.fp8_rows or p.sparse):
            super().draw(p, tensors, generator)
            return
        dense, drawn = _dense(p), dict(tensors)
        cache = tensors[CACHES[0]]
        if p.fp8_rows:
            drawn[CACHES[0]] = cache.new_empty((*cache.shape[:-1], p.head_dim), dtype=torch.bfloat16)
            drawn[CACHES[1]] = drawn[CACHES[0]][..., : p.head_dim_v]
        drawn.setdefault(TABLE, cache.new_empty(dense.tensors[TABLE].shape, dtype=torch.int32) if p.paged else cache)
        super().draw(dense, drawn, generator)
        if p.fp8_rows:
            cache.copy_(latent_rows.to_bytes(*drawn[CACHES[0]].split((HEAD_DIM_V, HEAD_DIM - HEAD_DIM_V), -1)))
        for sequence, length in enumerate(seqlens(p) if p.sparse else ()):
            keys = torch.randperm(length, generator=generator, device=generator.device)
            pages = drawn[TABLE][sequence].to(keys.device)
            rows = pages[keys // p.page_size] * p.page_size + keys % p.page_size
            rows[keys % 8 == 7] = NO_ROW
            tensors[INDICES][sequence].fill_(2**31 - 1)[:length].copy_(rows)

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """As for decode, but for the log-sum-exp of a row that sees no key."""
        p, dense, given = problem, _dense(problem), dict(tensors)
        if p.fp8_rows:
            given[CACHES[0]] = latent_rows.to_numbers(tensors[CACHES[0]], dtype)
            given[CACHES[1]] = given[CACHES[0]][..., : p.head_dim_v]
        if p.sparse:
            given |= _listed(p, given)
            dense = replace(dense, seqlens_k=(), options=tuple((dict(dense.options) | {"page_size": 1}).items()))
        computed = super().compute(dense, given, dtype)
        computed["lse"].masked_fill_(computed["lse"] == -math.inf, self.lse_without_keys)
        return computed

    def tolerance(self, problem: Problem, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> float:
        """Rows in 8 bits may be rounded to 16 bits: the log-sum-exp then is as far off as 16-bit torch's may be."""
        allowed = super().tolerance(problem, name, exact, rounded)
        return max(allowed, 2 * largest(rounded - exact)) if problem.fp8_rows and name == LSE else allowed

    def bytes_moved(self, problem: Problem) -> float:
        """The cache once, and Q and O, which are as large where it is short."""
        p = problem
        rows = p.batch * p.seqlen_q * p.num_heads
        row_bytes = latent_rows.ROW_BYTES if p.fp8_rows else 2 * p.head_dim
        return float(sum(seqlens(p)) * p.num_heads_k * row_bytes + 2 * rows * (p.head_dim + p.head_dim_v))

    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """V lies in K."""
        p, found = problem, super().tensors(problem)
        if p.fp8_rows:
            for name, columns in zip(CACHES, (latent_rows.ROW_BYTES, HEAD_DIM_V), strict=True):
                pages, rows, heads, _ = found[name].shape
                view = laid_out(p.layout, (pages, rows, heads, columns), ROW_BYTES)
                found[name] = replace(found[name], view=view, dtype=torch.uint8)
        if p.sparse:  # in the place of the table
            indices = Tensor(contiguous(p.batch, p.seqlen_k), torch.int32)
            found = {
                INDICES if name == TABLE else name: indices if name == TABLE else each for name, each in found.items()
            }
        k, v = (found[name] for name in CACHES)
        return found | {CACHES[1]: replace(k, view=replace(k.view, shape=v.shape), within=CACHES[0])}


OPERATION = _Latent()


def _dense(problem: Problem) -> Problem:
    """The problem of the same sizes whose cache has 16 bits, and whose keys a block table finds."""
    return replace(problem, options=tuple((dict(problem.options) | {"fp8_rows": False, "sparse": False}).items()))


def _listed(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The cache as pages of one row, with a block table and lengths, of the rows that lists name."""
    rows = {name: tensors[name].flatten(0, 1)[:, None] for name in CACHES}
    count = len(rows[CACHES[0]])
    table, lengths = torch.zeros_like(tensors[INDICES]), torch.zeros_like(tensors[LENGTHS])
    for sequence, (listed, length) in enumerate(zip(tensors[INDICES], tensors[LENGTHS].tolist(), strict=True)):
        seen = listed[:length]
        seen = seen[(seen >= 0) & (seen < count)]
        table[sequence, : len(seen)], lengths[sequence] = seen, len(seen)
    return {**rows, TABLE: table, LENGTHS: lengths}
