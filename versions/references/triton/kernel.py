"""FlashAttention-2's forward pass in Triton: the tiles and the loop are ours, lanes and shared memory the compiler's.

A GPU runs it compiled, in the configuration that is quickest for the shape. Without one it runs in Triton's
interpreter, on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from flashladder.common.errors import DeviceError
from flashladder.common.measure.references import Prepared, room_for_lse
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
LOG2_E = 1.4426950408889634
TILES = [
    triton.Config({"block_m": block_m, "block_n": block_n}, num_warps=num_warps, num_stages=num_stages)
    for block_m, block_n, num_warps in ((64, 64, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
    for num_stages in (2, 3, 4)
]
OPERANDS = {"bf16": tl.float32 if INTERPRETED else tl.bfloat16, "fp16": tl.float16}  # numpy multiplies no bf16
INTERPRETED_TILE = {"block_m": 64, "block_n": 64}


@triton.jit
def attend(
    q, k, v, o, row_sum, row_max, rows, first_key, last_key, k_row, v_row, scale_log2, seqlen_q, seqlen_k,
    head_dim: tl.constexpr, block_n: tl.constexpr, causal: tl.constexpr, operand: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles of some keys; with `masked`, those that a row does not see count nothing."""
    cols = tl.arange(0, head_dim)
    for begin in range(first_key, last_key, block_n):
        keys = begin + tl.arange(0, block_n)
        here = keys[:, None] < seqlen_k
        at = keys[:, None].to(tl.int64)
        if masked:
            tile_k = tl.load(k + at * k_row + cols[None, :], mask=here, other=0.0)
        else:
            tile_k = tl.load(k + at * k_row + cols[None, :])

        # S = scale * Q K^T, in log2 units
        s = tl.dot(q.to(operand), tl.trans(tile_k).to(operand)) * scale_log2
        if masked:
            seen = keys[None, :] < seqlen_k
            if causal:
                seen = seen & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
            s = tl.where(seen, s, float("-inf"))

        # P = 2^(S - maximum); O and the sum follow the new maximum
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        o = o * rescale[:, None]
        row_max = new_max

        # O += P V
        if masked:
            tile_v = tl.load(v + at * v_row + cols[None, :], mask=here, other=0.0)
        else:
            tile_v = tl.load(v + at * v_row + cols[None, :])
        o = tl.dot(p.to(operand), tile_v.to(operand), o)
    return o, row_sum, row_max


@triton.jit
def attention_forward(
    q, k, v, o, lse, scale_log2, num_heads, heads_per_k, seqlen_q, seqlen_k,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    head_dim: tl.constexpr, causal: tl.constexpr, operand: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """One program computes block_m rows of one head's output."""
    first_row = tl.program_id(0) * block_m
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    head_k = head // heads_per_k
    rows = first_row + tl.arange(0, block_m)
    cols = tl.arange(0, head_dim)
    at = rows[:, None].to(tl.int64)
    here = rows[:, None] < seqlen_q
    k += batch * k_batch + head_k * k_head
    v += batch * v_batch + head_k * v_head

    tile_q = tl.load(q + batch * q_batch + head * q_head + at * q_row + cols[None, :], mask=here, other=0.0)
    tile_o = tl.zeros([block_m, head_dim], tl.float32)
    row_sum = tl.zeros([block_m], tl.float32)
    row_max = tl.full([block_m], -3.0e38, tl.float32)  # finite, so that it can be subtracted from itself

    # First the keys that every row sees, in whole tiles; then those of which a row may miss some.
    last_key = seqlen_k
    all_see = seqlen_k
    if causal:
        last_key = tl.minimum(seqlen_k, first_row + block_m + seqlen_k - seqlen_q)
        all_see = tl.maximum(0, tl.minimum(seqlen_k, first_row + 1 + seqlen_k - seqlen_q))
    whole = all_see // block_n * block_n
    tile_o, row_sum, row_max = attend(
        tile_q, k, v, tile_o, row_sum, row_max, rows, 0, whole, k_row, v_row, scale_log2, seqlen_q, seqlen_k,
        head_dim, block_n, causal, operand, False,
    )  # fmt: skip
    tile_o, row_sum, row_max = attend(
        tile_q, k, v, tile_o, row_sum, row_max, rows, whole, last_key, k_row, v_row, scale_log2, seqlen_q, seqlen_k,
        head_dim, block_n, causal, operand, True,
    )  # fmt: skip

    # A row that sees no key has summed nothing: its output is 0, its logarithm minus infinity.
    divisor = tl.where(row_sum > 0, row_sum, 1.0)
    tile_o = (tile_o / divisor[:, None]).to(o.dtype.element_ty)
    tl.store(o + batch * o_batch + head * o_head + at * o_row + cols[None, :], tile_o, mask=here)
    logarithm = tl.where(row_sum > 0, (row_max + tl.log2(divisor)) / 1.4426950408889634, float("-inf"))
    tl.store(lse + tl.program_id(1).to(tl.int64) * seqlen_q + rows, logarithm, mask=rows < seqlen_q)


KERNEL = (
    attention_forward
    if INTERPRETED
    else triton.autotune(TILES, key=["num_heads", "seqlen_q", "seqlen_k", "head_dim", "causal"])(attention_forward)
)


def widened(o: torch.Tensor) -> torch.Tensor:
    """An output in fp32, for torch to round: the interpreter's casts to bf16 cut off."""
    return torch.empty_strided(o.shape, o.stride(), dtype=torch.float32, device=o.device).fill_(torch.nan)


def prepare(problem: Problem, config: KernelConfig, tensors: Tensors) -> Prepared:
    """Binds to the tensors. The first launch for a shape compiles, and on a GPU times every tile."""
    q, k, v, o, lse = tensors.q, tensors.k, tensors.v, tensors.o, room_for_lse(problem, tensors)
    if not (q.is_cuda or INTERPRETED):
        raise DeviceError("where there is a GPU, Triton interprets only with TRITON_INTERPRET=1 in the environment")
    out = widened(o) if INTERPRETED else o
    strides = [tensor.stride(axis) for tensor in (q, k, v, out) for axis in range(3)]
    shape = problem.num_heads, problem.num_heads // problem.num_heads_k, problem.seqlen_q, problem.seqlen_k
    constants = {"head_dim": problem.head_dim, "causal": problem.causal, "operand": OPERANDS[problem.dtype]}
    constants |= INTERPRETED_TILE if INTERPRETED else {}

    def grid(meta: Mapping[str, int]) -> tuple[int, int]:
        return triton.cdiv(problem.seqlen_q, meta["block_m"]), problem.batch * problem.num_heads

    def launch() -> None:
        KERNEL[grid](q, k, v, out, lse, problem.softmax_scale * LOG2_E, *shape, *strides, **constants)
        if INTERPRETED:
            o.copy_(out)

    return Prepared(launch, lambda: {"tile": "interpreted" if INTERPRETED else str(KERNEL.best_config)})


def toolkit() -> str:
    """Triton, and how it runs."""
    return f"triton {triton.__version__}{', interpreted' if INTERPRETED else ''}"
