"""cu_seqlens: where in a tensor each of some packed sequences begins, and the last one ends."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from flashladder.common.api import validate
from flashladder.common.errors import UnsupportedProblemError

_read = WeakTensorKeyDictionary()  # what was read, and which writing to the tensor it follows
_valid = WeakTensorKeyDictionary()  # what was found right last, and which writing that follows: (end, ...)


def validate_starts(name: str, cu_seqlens: object, device: torch.device) -> torch.Tensor:
    """UnsupportedProblemError for what is no cu_seqlens, as far as it shows without reading it."""
    found = validate.tensor(name, cu_seqlens)
    if found.dim() != 1 or validate.surely(found.shape[0] == 0) or found.dtype != torch.int32:
        raise UnsupportedProblemError(
            f"{name} is {tuple(found.shape)} {found.dtype}; it should be (sequences + 1,) torch.int32"
        )
    if found.device != device:
        raise UnsupportedProblemError(f"{name} is on {found.device}, q on {device}; they should be on one device")
    return found


def validate_bounds(of: str, cu_seqlens: torch.Tensor, total: int, max_seqlen: int) -> int:
    """Where the last sequence ends. UnsupportedProblemError for sequences that are not within the tensor.

    On a GPU a tensor is read once, however many layers of a model it goes through: reading waits for the GPU. Writing
    that torch does not count, as by a CUDA graph or generated code, is not seen then, and while a graph is captured
    nothing can be read. What kernels find later cannot lead them out of the tensors.
    """
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return total
    known = None if cu_seqlens.is_inference() else (total, max_seqlen, cu_seqlens._version)
    end, valid = _valid.get(cu_seqlens, (0, None))
    if known and valid == known:
        return int(end)
    name, found = f"cu_seqlens_{of}", bounds(cu_seqlens)
    if found[0] != 0:
        raise UnsupportedProblemError(f"{name} begins with {found[0]}; it should begin with 0")
    for index, (first, behind) in enumerate(itertools.pairwise(found)):
        if behind < first:
            raise UnsupportedProblemError(
                f"{name}[{index + 1}] is {behind}, after {first}; each should be at least the one before"
            )
        if behind - first > max_seqlen:
            raise UnsupportedProblemError(
                f"max_seqlen_{of} is {max_seqlen}; sequence {index} of {name} has {behind - first} rows"
            )
    if found[-1] > total:
        raise UnsupportedProblemError(f"{name} ends with {found[-1]}; {of} has {total} rows")
    if known and cu_seqlens.is_cuda:
        _valid[cu_seqlens] = found[-1], known
    return found[-1]


def used_first(starts: torch.Tensor, used: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `used` rows of each sequence, one behind the other, then the others: their numbers among `total` rows,
    (total,), int64; and where each sequence begins then, (sequences + 1), int32. Nothing is read on the host."""
    kept = torch.minimum(used, starts.diff()).clamp(min=0)
    row = torch.arange(total, dtype=torch.int32, device=starts.device)
    sequence = torch.bucketize(row, starts[1:], right=True).clamp(max=kept.shape[0] - 1)
    place = row - starts[sequence]
    order = torch.argsort(((place < 0) | (place >= kept[sequence])).byte(), stable=True)
    return order, pad(kept.cumsum(0, dtype=torch.int32), (1, 0))


def remember(cu_seqlens: torch.Tensor, bounds: list[int]) -> None:
    """That a tensor has these elements, so that nobody reads it; one that torch counts the writing to."""
    _read[cu_seqlens] = cu_seqlens._version, bounds


def bounds(cu_seqlens: torch.Tensor) -> list[int]:
    """Its elements, which are read once: that waits for the GPU. UnsupportedProblemError while a graph is captured."""
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblemError("a CUDA graph captures no more packed sequences than a launch takes")
    if cu_seqlens.is_inference():  # torch counts no writing to it
        return list(cu_seqlens.tolist())
    version, found = _read.get(cu_seqlens, (None, []))
    if version != cu_seqlens._version:
        found = cu_seqlens.tolist()
        if cu_seqlens.is_cuda:
            remember(cu_seqlens, found)
    return list(found)


def of_equal_lengths(
    q: object, out: object, cu_seqlens_q: object, max_seqlen_q: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views (batch, max_seqlen_q, heads, head_dim) of packed rows of q, and of O if that is given.

    Each sequence has max_seqlen_q rows: none has more, and together they have as many. UnsupportedProblemError for
    others, which shows without reading cu_seqlens_q.
    """
    if cu_seqlens_q is None or max_seqlen_q is None:
        lacking = "cu_seqlens_q" if cu_seqlens_q is None else "max_seqlen_q"
        raise UnsupportedProblemError(f"{lacking} is left out: packed rows of q take cu_seqlens_q and max_seqlen_q")
    (rows,) = validate.tensors(validate.PACKED, q=q)
    starts, longest = (
        validate_starts("cu_seqlens_q", cu_seqlens_q, rows.device),
        validate.rows("max_seqlen_q", max_seqlen_q),
    )
    batch = starts.shape[0] - 1
    if validate.surely(rows.shape[0] != batch * longest):
        raise UnsupportedProblemError(
            f"q has {rows.shape[0]} rows of {batch} sequences, max_seqlen_q={longest}: here each has so many; "
            "flash_attn_varlen_func takes sequences of different numbers of rows"
        )
    if validate.can_look_at(starts):
        validate_bounds("q", starts, rows.shape[0], longest)
    shape = batch, longest, *rows.shape[1:]
    if out is None:
        return rows.view(shape), None
    (o,) = validate.tensors(validate.PACKED, out=out)
    if o.shape != rows.shape:
        raise UnsupportedProblemError(f"out is {tuple(o.shape)}; O is {tuple(rows.shape)}, as q")
    return rows.view(shape), o.view(shape)


def flat(outputs: Any) -> Any:
    """O of sequences of equal lengths, packed, or it and the log-sum-exp, (heads, total_q)."""
    if isinstance(outputs, torch.Tensor):
        return outputs.flatten(0, 1)
    o, lse = outputs
    return o.flatten(0, 1), lse.transpose(0, 1).flatten(1)
