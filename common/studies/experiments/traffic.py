"""What FlashAttention moves between global memory and the SMs, and what the textbook keeps: bytes, by formula."""

from __future__ import annotations

from flashladder.common.problem.problem import Problem

ELEMENT = 2  # bytes of bf16 and fp16
LSE = 4  # bytes of a row's log-sum-exp


def fa1(seqlen: int, head_dim: int, block_n: int) -> tuple[int, int]:
    """Bytes that one head reads and writes with K and V in the outer loop (Dao et al. 2022, algorithm 1).

    For each block of keys Q is read, and O and lse are written; all but the first time they are read, too.
    """
    matrix, blocks = ELEMENT * seqlen * head_dim, seqlen // block_n
    state = matrix + LSE * seqlen
    return 2 * matrix + blocks * matrix + (blocks - 1) * state, blocks * state


def fa2(seqlen: int, head_dim: int, block_m: int) -> tuple[int, int]:
    """Bytes that one head reads and writes with Q in the outer loop (Dao 2023, algorithm 1)."""
    matrix = ELEMENT * seqlen * head_dim
    return matrix + seqlen // block_m * 2 * matrix, matrix + LSE * seqlen


def outputs(problem: Problem) -> int:
    """Bytes of O and lse: all that a kernel needs beyond Q, K and V."""
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    return rows * (ELEMENT * problem.head_dim + LSE)


def textbook(problem: Problem) -> int:
    """Bytes of O, S and P, each a whole 16-bit matrix."""
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    return ELEMENT * rows * (problem.head_dim + 2 * problem.seqlen_k)
