"""Decode attention: one query row a sequence, or a few, against a long cache of keys and values.

    q              (batch, seqlen_q, num_heads, head_dim), and o like it
    k_cache        (batch, seqlen_k, num_heads_k, head_dim), and v_cache: there is room for seqlen_k keys
    cache_seqlens  (batch), int32: how many of them a sequence has
    cache_leftpad  (batch), int32, with the option leftpad: how many of these, the first ones, are padding and not seen
    alibi_slopes   (batch, num_heads), fp32, with ALiBi
    lse            (batch, num_heads, seqlen_q), fp32

A paged cache is (num_pages, page_size, num_heads_k, head_dim). Keys i * page_size to (i + 1) * page_size of sequence b
are page block_table[b, i], int32. Under the causal rule the last row sees all keys, and each row before it one less;
windows and distances of ALiBi are aligned to the end alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import buffers
from flashladder.common.problem.buffers import View, contiguous, laid_out
from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.operations import forward
from flashladder.common.problem.operations.forward import SLOPES, Forward, attention, draw_slopes
from flashladder.common.problem.problem import BANDWIDTH, BOUNDS, DTYPES, Operation, Option, Problem

LENGTHS, LEFTPAD, TABLE = "cache_seqlens", "cache_leftpad", "block_table"
CACHES = ("k_cache", "v_cache")
NO_PAGE = -1  # in the table, behind the pages of a sequence
SPARE_PAGES = 3  # of no sequence, where a problem does not say how many pages there are
TILE_ROWS = 16  # of a CTA
FEW_KEYS = 128  # less is not worth a CTA
TARGET_CTAS = 132  # one an SM of an H100 or H200, which has room for two
MOST_SPLITS = 128
MOST_WAVES = 4
GOOD_FULLNESS = 0.95  # of the best: more splits than that takes cost more than they bring


class Decode(Forward):
    """Beyond a sequence's length the cache holds anything: NaN in drawn inputs."""

    name = "decode"
    inputs: ClassVar[tuple[str, ...]] = ("q", *CACHES, LENGTHS)
    fp32 = (*Forward.fp32, SLOPES)
    features: ClassVar[tuple[str, ...]] = (*BOUNDS, "seqlens_k")
    layouts = buffers.LAYOUTS
    options: ClassVar[tuple[Option, ...]] = (
        Option("paged", bool, "the cache consists of pages, which a block table finds", default=False),
        Option("page_size", int, "keys of a page", default=64),
        Option("num_pages", int, "pages of the cache; 0: what the sequences need, and some", minimum=0, default=0),
        Option("leftpad", bool, "a sequence's first keys are padding; a tensor says how many", default=False),
        Option("num_splits", int, "parts of the keys that are computed apart; 0: by the sizes", minimum=0, default=0),
    )
    sizes = ("num_splits", "num_parts", "target_parts")
    signed_together: ClassVar[tuple[tuple[str, ...], ...]] = (("q", "k_cache"), ("v_cache", "o"))
    unit = BANDWIDTH
    usual: ClassVar = {"batch": 8, "num_heads": 32, "num_heads_k": 8, "seqlen_q": 1, "seqlen_k": 8192}
    sampled: ClassVar = {"batch": 8, "num_heads": 32, "num_heads_k": 8, "seqlen_q": 1, "seqlen_k": 4096}
    small: ClassVar = {"batch": 2, "num_heads": 8, "num_heads_k": 2, "seqlen_q": 1, "seqlen_k": 512}
    counted = small

    def variant(self, problem: Problem) -> Operation:
        """Pages have a table, and padding and ALiBi a tensor each."""
        return _variant(bool(problem.paged), bool(problem.leftpad), problem.alibi)

    def implied(self, problem: Problem) -> dict[str, Any]:
        """The number of sequences, and room for the longest, from their lengths."""
        lengths = problem.seqlens_k
        if not lengths:
            return {}
        if min(lengths) < 0:
            raise UnsupportedProblemError(f"seqlens_k={lengths}: no sequence is shorter than 0")
        room = max(1, *lengths) if problem.seqlen_k is None else problem.seqlen_k
        if max(lengths) > room:
            raise UnsupportedProblemError(f"seqlens_k={lengths}: the cache has room for seqlen_k={room} keys")
        return {"batch": len(lengths), "seqlen_k": room}

    def check(self, problem: Problem) -> None:
        """There are pages for the sequences, where the problem says how long they are."""
        if problem.paged and problem.seqlens_k:
            _check_pages(problem)

    def of_length(self, seqlen: int, tokens: int) -> dict[str, Any]:
        """One row against so many keys."""
        return {"batch": max(1, tokens // seqlen), "seqlen_q": 1, "seqlen_k": seqlen}

    def argument(self, problem: Problem, name: str) -> Any:
        """What is 0 in a problem, as the sizes decide it."""
        decided = {
            "num_splits": num_splits,
            "num_parts": num_parts,
            "target_parts": target_parts,
            "num_pages": num_pages,
            "max_pages": max_pages,
        }
        return decided[name](problem) if name in decided else super().argument(problem, name)

    def flops(self, problem: Problem) -> float:
        """The sum over the sequences, as if none had padding."""
        return sum(forward.OPERATION.flops(_alone(problem, length)) for length in seqlens(problem) if length)

    def bytes_moved(self, problem: Problem) -> float:
        """K and V of the keys that some row may see. All else is small beside it."""
        p = problem
        most = p.seqlen_k if p.window_left is None else p.window_left + p.seqlen_q
        return 2.0 * sum(min(length, most) for length in seqlens(p)) * p.num_heads_k * (p.head_dim + p.head_dim_v)

    def views(self, problem: Problem) -> list[dict[str, View]]:
        """Each tensor in a buffer of its own."""
        p = problem
        rows = (num_pages(p), p.page_size) if p.paged else (p.batch, p.seqlen_k)
        shapes = {
            "q": (p.batch, p.seqlen_q, p.num_heads, p.head_dim),
            "k_cache": (*rows, p.num_heads_k, p.head_dim),
            "v_cache": (*rows, p.num_heads_k, p.head_dim_v),
            "o": (p.batch, p.seqlen_q, p.num_heads, p.head_dim_v),
        }
        apart = {LENGTHS: contiguous(p.batch), "lse": contiguous(p.batch, p.num_heads, p.seqlen_q)}
        if p.paged:
            apart[TABLE] = contiguous(p.batch, max_pages(p))
        if p.leftpad:
            apart[LEFTPAD] = contiguous(p.batch)
        if p.alibi:
            apart[SLOPES] = contiguous(p.batch, p.num_heads)
        return [{name: view} for name, view in ({n: laid_out(p.layout, s) for n, s in shapes.items()} | apart).items()]

    def dtype(self, problem: Problem, name: str) -> torch.dtype:
        """int32 of lengths and tables."""
        return torch.int32 if name in (LENGTHS, LEFTPAD, TABLE) else super().dtype(problem, name)

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Each sequence as its family designs it, in pages that lie in random order; NaN in padding."""
        p = problem
        for name in CACHES:
            tensors[name].fill_(math.nan)
        tensors[LENGTHS].copy_(torch.tensor(seqlens(p), dtype=torch.int32))
        if p.paged:
            self._draw_table(p, tensors[TABLE], generator)
        if p.alibi:
            draw_slopes(tensors[SLOPES], generator)
        padding = [0] * p.batch
        if p.leftpad:
            drawn = torch.rand(p.batch, generator=generator, device=generator.device)
            padding = [int(share * (length + 1)) for share, length in zip(drawn.tolist(), seqlens(p), strict=True)]
            tensors[LEFTPAD].copy_(torch.tensor(padding, dtype=torch.int32))
        for sequence, length in enumerate(seqlens(p)):
            shapes = ((1, max(1, length), p.num_heads_k, columns) for columns in (p.head_dim, p.head_dim_v))
            k, v = (torch.empty(shape, dtype=DTYPES[p.dtype], device=generator.device) for shape in shapes)
            q = torch.empty((1, *tensors["q"].shape[1:]), dtype=DTYPES[p.dtype], device=generator.device)
            FAMILIES[p.family].draw(q, k, v, p.softmax_scale, generator)
            tensors["q"][sequence].copy_(q[0])
            for name, keys in zip(CACHES, (k, v), strict=True):
                keys[:, : padding[sequence]] = math.nan
                for rows, place in self._places(p, tensors, name, sequence, length):
                    place.copy_(keys[0, rows])

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Each sequence as `attention` computes it, of the keys that there are behind its padding."""
        p, q = problem, tensors["q"]
        o = torch.zeros((p.batch, p.seqlen_q, p.num_heads, p.head_dim_v), dtype=dtype, device=q.device)
        lse = torch.full((p.batch, p.num_heads, p.seqlen_q), -math.inf, dtype=dtype, device=q.device)
        padding = tensors[LEFTPAD].tolist() if p.leftpad else [0] * p.batch
        for sequence, (length, begin) in enumerate(zip(tensors[LENGTHS].tolist(), padding, strict=True)):
            if length > begin:
                k, v = (
                    torch.cat([place for _, place in self._places(p, tensors, name, sequence, length)])[None, begin:]
                    for name in CACHES
                )
                one = slice(sequence, sequence + 1)
                parts = {"q": q[one], "k": k, "v": v} | ({SLOPES: tensors[SLOPES][one]} if p.alibi else {})
                o[one], lse[one] = attention(_alone(p, length - begin), parts, dtype)
        return {"o": o, "lse": lse}

    def _places(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, length: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Keys of a sequence that lie together, with their place in a cache."""
        yield slice(0, length), tensors[name][sequence, :length]

    def _draw_table(self, problem: Problem, table: torch.Tensor, generator: torch.Generator) -> None:
        raise NotImplementedError


class Paged(Decode):
    """One more input: block_table (batch, max_pages), int32."""

    inputs = (*Decode.inputs, TABLE)

    def _places(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, length: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        size = problem.page_size
        for page, number in enumerate(tensors[TABLE][sequence, : -(-length // size)].tolist()):
            rows = slice(page * size, min((page + 1) * size, length))
            yield rows, tensors[name][number, : rows.stop - rows.start]

    def _draw_table(self, problem: Problem, table: torch.Tensor, generator: torch.Generator) -> None:
        _check_pages(problem)
        pages = torch.randperm(num_pages(problem), generator=generator, device=generator.device).int().to(table.device)
        table.fill_(NO_PAGE)
        taken = 0
        for sequence, length in enumerate(seqlens(problem)):
            count = -(-length // problem.page_size)
            table[sequence, :count] = pages[taken : taken + count]
            taken += count


def seqlens(problem: Problem) -> tuple[int, ...]:
    """How many keys the sequences have: as many as there is room for, where a problem does not say."""
    return problem.seqlens_k or (problem.seqlen_k,) * problem.batch


def max_pages(problem: Problem) -> int:
    """The pages that a sequence may have."""
    return -(-problem.seqlen_k // int(problem.page_size))


def num_pages(problem: Problem) -> int:
    """All pages of the cache."""
    return int(problem.num_pages) or problem.batch * max_pages(problem) + SPARE_PAGES


def _check_pages(problem: Problem) -> None:
    needed = sum(-(-length // int(problem.page_size)) for length in seqlens(problem))
    if needed > num_pages(problem):
        raise UnsupportedProblemError(
            f"num_pages={problem.num_pages}: the sequences need {needed} pages of page_size={problem.page_size}"
        )


def num_splits(problem: Problem) -> int:
    """Into how many parts the keys are cut, so that there are CTAs for all SMs.

    The smallest number whose last wave of CTAs is nearly as full as that of any other. It follows from sizes alone, so
    that results do not depend on the card.
    """
    if problem.num_splits:
        return int(problem.num_splits)
    tiles = problem.batch * _tiles(problem)
    most = min(MOST_SPLITS, -(-problem.seqlen_k // FEW_KEYS), max(1, MOST_WAVES * TARGET_CTAS // tiles))
    waves = {splits: tiles * splits / TARGET_CTAS for splits in range(1, most + 1)}
    fullness = {splits: count / math.ceil(count) for splits, count in waves.items()}
    return next(splits for splits in fullness if fullness[splits] >= GOOD_FULLNESS * max(fullness.values()))


def target_parts(problem: Problem) -> int:
    """Into how many parts the keys of all sequences are to be cut, where a longer one has more; 0: num_splits each."""
    return 0 if problem.num_splits else max(1, TARGET_CTAS // _tiles(problem))


def num_parts(problem: Problem) -> int:
    """How many parts there may be at most: the last one of a sequence may be small."""
    return problem.batch * int(problem.num_splits) or problem.batch + target_parts(problem)


def _tiles(problem: Problem) -> int:
    """Of rows, for each sequence."""
    rows = problem.seqlen_q * problem.num_heads // problem.num_heads_k
    return problem.num_heads_k * -(-rows // TILE_ROWS)


def _alone(problem: Problem, length: int) -> Problem:
    """Of one sequence, all of whose keys lie together."""
    return dataclasses.replace(
        problem, operation=forward.OPERATION.name, options=(), batch=1, seqlen_k=length, seqlens_k=(), layout="bshd"
    )


@functools.cache
def _variant(paged: bool, leftpad: bool, alibi: bool) -> Operation:
    """The operation with these among its inputs."""
    plain = Paged if paged else Decode
    inputs = (*plain.inputs, *([LEFTPAD] if leftpad else []), *([SLOPES] if alibi else []))
    variant: type[Decode] = type(plain.__name__, (plain,), {"inputs": inputs})
    return variant()


OPERATION = Decode()
