"""Sizes of a decode problem that follow from others: lengths, pages, parts of the keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem

SPARE_PAGES = 3  # of no sequence, where a problem does not say how many pages there are
FEW_KEYS = 128  # less is not worth a CTA
TARGET_CTAS = 132  # one an SM of an H100 or H200, which has room for two
MOST_SPLITS = 128
MOST_WAVES = 4
GOOD_FULLNESS = 0.95  # of the best: more splits than that takes cost more than they bring


def seqlens(problem: Problem) -> tuple[int, ...]:
    """How many keys are in the cache: as many as there is room for, where a problem does not say."""
    return problem.seqlens_k or (problem.seqlen_k - seqlen_new(problem),) * problem.batch


def seqlens_q(problem: Problem) -> tuple[int, ...]:
    """How many rows each sequence has: as many, where a problem does not say."""
    if not problem.packed_q:
        return (problem.seqlen_q,) * problem.batch
    return problem.seqlens_q or (problem.seqlen_q // problem.batch,) * problem.batch


def packed_rows(problem: Problem) -> int:
    """The rows that share a head of K: those of all heads in its group."""
    return problem.num_heads // problem.num_heads_k * problem.seqlen_q


def seqlen_new(problem: Problem) -> int:
    """How many keys each sequence is to be given."""
    return int(problem.seqlen_new) if problem.new_keys else 0


def all_keys(problem: Problem) -> tuple[int, ...]:
    """How many keys the sequences have then."""
    return tuple(length + seqlen_new(problem) for length in seqlens(problem))


def rotary_dim(problem: Problem) -> int:
    """The columns that turn."""
    return int(problem.rotary_dim) or problem.head_dim


def rotary_positions(problem: Problem) -> int:
    """For which there are angles: each place in the cache, and perhaps more."""
    return max(int(problem.rotary_positions), problem.seqlen_k)


def max_pages(problem: Problem) -> int:
    """The pages that a sequence may have."""
    return -(-problem.seqlen_k // int(problem.page_size))


def num_pages(problem: Problem) -> int:
    """All pages of the cache."""
    return int(problem.num_pages) or problem.batch * max_pages(problem) + SPARE_PAGES


def num_splits(problem: Problem) -> int:
    """Into how many parts the keys are cut, so that there are CTAs for all SMs.

    The smallest number whose last wave of CTAs is nearly as full as that of any other. It follows from sizes alone, so
    that results do not depend on the card.
    """
    if problem.num_splits:
        return int(problem.num_splits)
    of_all = problem.batch * tiles(problem)
    most = min(MOST_SPLITS, -(-problem.seqlen_k // FEW_KEYS), max(1, MOST_WAVES * TARGET_CTAS // of_all))
    waves = {splits: of_all * splits / TARGET_CTAS for splits in range(1, most + 1)}
    fullness = {splits: count / math.ceil(count) for splits, count in waves.items()}
    return next(splits for splits in fullness if fullness[splits] >= GOOD_FULLNESS * max(fullness.values()))


def target_parts(problem: Problem) -> int:
    """Into how many parts the keys of all sequences are to be cut, where a longer one has more; 0: num_splits each.

    Of packed rows, parts of all their tiles, whose number the host does not know: for two CTAs an SM, or fewer where
    there is room for few keys.
    """
    if problem.num_splits:
        return 0
    if problem.packed_q:
        most = problem.batch * -(-problem.seqlen_k // (2 * FEW_KEYS))
        return min(most, max(1, 2 * TARGET_CTAS // problem.num_heads_k)) if most > problem.batch else 0
    return max(1, TARGET_CTAS // tiles(problem))


def num_parts(problem: Problem) -> int:
    """How many parts there may be at most: the last one of a sequence may be small."""
    return problem.batch * int(problem.num_splits) or problem.batch + target_parts(problem)


def tiles(problem: Problem) -> int:
    """How many tiles of rows a sequence has, over all heads of K."""
    asked: Any = problem.asked  # of decode or MLA, which have tiles of other sizes
    return max(1, asked.row_tiles(problem, asked.tile_rows) // problem.batch)
