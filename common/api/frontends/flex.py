"""torch.nn.attention.flex_attention's names: masks and scores as functions, in a program that changes one import.

    from flashladder import create_block_mask, flex_attention

A function is traced into the text of an expression (flex_trace.py), at each call: nothing tells whether what it reads
has changed. The kernel is compiled once for a text, for all lengths; a mask has one text where there are as many rows
as keys, and one for all other lengths. A block mask that is made here lists no blocks, so that it takes no memory; the
lists of torch's own are read at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as torchs

from flashladder.common.api import attention, validate
from flashladder.common.api.frontends.flex_blocks import in_blocks
from flashladder.common.api.frontends.flex_trace import Traced, trace
from flashladder.common.api.frontends.flex_tree import POSITION, ROW
from flashladder.common.errors import UnsupportedProblemError

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BlockMask:
    """A mask for tensors of these sizes; None: any. `traced` has it as the text of an expression."""

    mask_mod: MaskMod
    batch: int | None
    num_heads: int | None
    seq_lengths: tuple[int, int]
    traced: Traced

    @property
    def expression(self) -> str:
        """As `attention` takes it for `mask`, with `traced.tensors`, of as many rows and keys as it was made for."""
        return self.traced.text


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str = "cuda",
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> BlockMask:
    """The mask of a function of (b, h, q_idx, kv_idx), tensors of one whole number: whether that row sees that key.

    Rows count from 0, as in torch, however many keys there are. The function is called now, once: what it reads stays
    as it is now, and so do views of tensors. Elements of tensors are read at each call where they lie, on `device`.
    BLOCK_SIZE and _compile change nothing here, as no blocks are listed. With as many keys as rows a row's number is
    its position: then a causal function, or one of a window, becomes a mask that `attention` asks for as a window.
    Raises UnsupportedProblemError, by the name of an operation, for what no expression says.
    """
    row = POSITION if Q_LEN == KV_LEN else ROW
    traced = trace("mask_mod", mask_mod, torch.device(device), False, "m", row)
    return BlockMask(mask_mod, B, H, (Q_LEN, KV_LEN), traced)


@torch.compiler.disable
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(score_mod(scale * Q K^T)) V over the keys that the block mask shows, as torch's function of this name.

    query is (batch, num_heads, seqlen_q, head_dim), key and value (batch, num_heads_k, seqlen_k, ...), bf16 or fp16. A
    score_mod is a function of (score, b, h, q_idx, kv_idx), traced at each call. A block mask is `create_block_mask`'s,
    or torch's own: of that the function and the lists of blocks are read, at each call. BlockMask.from_kv_blocks may do
    without a function. kernel_options are hints for torch's kernel, and change nothing here. With `return_lse` it
    returns (O, log-sum-exp). Both have gradients, also by the tensors that a score_mod reads.

    Raises UnsupportedProblemError for functions that no expression says, a block mask of other sizes, fewer heads of
    key without enable_gqa, and what `attention` refuses.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if validate.tensor(name, tensor).dim() != 4:
            raise UnsupportedProblemError(
                f"{name} has shape {tuple(tensor.shape)}; it is (batch, heads, seqlen, head_dim)"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise UnsupportedProblemError(
            f"query has {query.shape[1]} heads, key {key.shape[1]}: with enable_gqa=True heads of key are shared"
        )
    asked: dict[str, Any] = {"softmax_scale": scale, "return_lse": return_lse}
    tensors: dict[str, torch.Tensor] = {}
    if block_mask is not None:
        mask = _mask_of(block_mask, query, key)
        asked["mask"], tensors = mask.text, tensors | mask.tensors
    if score_mod is not None:
        score = trace("score_mod", score_mod, query.device, True, "t")
        asked["score"], tensors = score.text, tensors | score.tensors
    found = attention(*(x.transpose(1, 2) for x in (query, key, value)), **asked, tensors=tensors or None)
    if isinstance(found, tuple):
        o, lse = found
        return o.transpose(1, 2), lse
    return found.transpose(1, 2)


def _mask_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Traced:
    if not isinstance(block_mask, (BlockMask, torchs.BlockMask)):
        raise UnsupportedProblemError(
            f"block_mask is of type {type(block_mask).__name__}; create_block_mask makes one of a function"
        )
    batch, num_heads, seqlen_q, _ = query.shape
    if (seq_lengths := tuple(block_mask.seq_lengths)) != (seqlen_q, key.shape[2]):
        raise UnsupportedProblemError(
            f"block_mask is of {seq_lengths} rows and keys, query and key have {(seqlen_q, key.shape[2])}"
        )
    if not isinstance(block_mask, BlockMask):
        return in_blocks(block_mask, trace("mask_mod", block_mask.mask_mod, query.device, False, "m"), query)
    for name, wanted, size in (("B", block_mask.batch, batch), ("H", block_mask.num_heads, num_heads)):
        if wanted not in (None, 1, size):
            raise UnsupportedProblemError(f"block_mask is of {name}={wanted}, query has {size}")
    return block_mask.traced
