"""The lists of torch's own block masks, as tensors of truth values that an expression reads."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from flashladder.common.api import validate
from flashladder.common.api.frontends.flex_trace import Traced
from flashladder.common.api.frontends.flex_tree import ROW
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.expression import normal

_WHOLE = (torch.int32, torch.int64)


def in_blocks(block_mask: BlockMask, traced: Traced, query: torch.Tensor) -> Traced:
    """A mask_mod as torch's kernels take it: in listed blocks. Of those that are listed as full all is seen.

    UnsupportedProblemError for lists that are not for the query's sequences, heads, rows and device. What they hold is
    looked at on the CPU alone: on a GPU nobody waits for it.
    """
    block_q, block_k = _block_size(block_mask)
    blocks = tuple(-(-n // size) for n, size in zip(block_mask.seq_lengths, (block_q, block_k), strict=True))
    tensors = {"part_blocks": _listed(block_mask, "kv", query, *blocks)}
    if block_mask.full_kv_num_blocks is not None:
        tensors["full_blocks"] = _listed(block_mask, "full_kv", query, *blocks)

    def shown(name: str) -> str:
        b, h = (which if size > 1 else "0" for which, size in zip("bh", tensors[name].shape[:2], strict=True))
        return f"{name}[{b}, {h}, ({normal(ROW)}) / {block_q}, k / {block_k}]"

    each = [shown("part_blocks") + f" && ({traced.text})", *map(shown, list(tensors)[1:])]
    return Traced(" || ".join(each), traced.tensors | tensors)


def _block_size(block_mask: BlockMask) -> tuple[int, int]:
    match block_mask.BLOCK_SIZE:
        case (int() as block_q, int() as block_k) if min(block_q, block_k) > 0:
            return block_q, block_k
    raise UnsupportedProblemError(
        f"block_mask.BLOCK_SIZE is {block_mask.BLOCK_SIZE}; it should be two whole numbers above 0, of rows and of keys"
    )


def _listed(block_mask: BlockMask, which: str, query: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """Which blocks of keys each block of rows lists, (batch, num_heads, rows, keys), bool."""
    named = {f"{which}_{part}": getattr(block_mask, f"{which}_{part}") for part in ("num_blocks", "indices")}
    (of_count, count), (of_indices, indices) = named.items()
    _require(of_count, count, query, rows, "")
    _require(of_indices, indices, query, rows, ", blocks")
    if indices.shape[:3] != count.shape:
        raise UnsupportedProblemError(
            f"block_mask.{of_indices} is {tuple(indices.shape)}; with {of_count} of {tuple(count.shape)} it should be "
            "of that shape, and have one dimension more"
        )
    count, indices = count[..., :rows], indices[..., :rows, :].long()
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
    if query.device.type == "cpu":
        _require_within(of_count, count, indices.shape[-1])
        _require_within(of_indices, indices[is_listed], None)
    # One behind the last for what is not listed, or is no block.
    places = indices.where(is_listed & (indices >= 0), keys).clamp(max=keys)
    found = torch.zeros(*count.shape, keys + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(-1, places, True)[..., :keys]


def _require(name: str, value: object, query: torch.Tensor, rows: int, more: str) -> None:
    """That a list is for the query. `more` names what it has beside the blocks of rows."""
    found, sizes = validate.tensor(f"block_mask.{name}", value), query.shape[:2]
    of_rows = found.shape[:3]
    is_shaped = found.dim() == (4 if more else 3) and of_rows[2] >= rows
    if (
        not is_shaped
        or any(given not in (1, size) for given, size in zip(of_rows, sizes, strict=False))
        or found.dtype not in _WHOLE
        or found.device != query.device
    ):
        front = ", ".join("1" if size == 1 else f"1 or {size}" for size in sizes)
        raise UnsupportedProblemError(
            f"block_mask.{name} is {tuple(found.shape)} {found.dtype} on {found.device}; it should be of int32 or "
            f"int64, ({front}, {rows} or more{more}), on {query.device}"
        )


def _require_within(name: str, numbers: torch.Tensor, most: int | None) -> None:
    wrong = numbers < 0 if most is None else (numbers < 0) | (numbers > most)
    if wrong.any():
        wanted = "0 or more" if most is None else f"0 to {most}, the blocks of keys that its indices have room for"
        raise UnsupportedProblemError(f"block_mask.{name} has {int(numbers[wrong][0])}; it should have {wanted}")
