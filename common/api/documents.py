"""A batch whose rows and keys are of documents or padding, and the same without padding, packed."""

from __future__ import annotations

import ctypes
import dataclasses
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from flashladder.common.api import sequences
from flashladder.common.api.options import Options
from flashladder.common.errors import UnsupportedProblemError


class Real(NamedTuple):
    """Which rows of a padded tensor, (batch, seqlen, ...), are no padding, and where they go when they are packed."""

    places: tuple[torch.Tensor, torch.Tensor]  # the batch and the row of each
    cu_seqlens: torch.Tensor
    longest: int
    is_all: bool  # nothing is padding

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """(total, ...), of (batch, seqlen, ...)."""
        return x.flatten(0, 1) if self.is_all else x[self.places]

    def unpack(self, x: torch.Tensor, out: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """`out`, (batch, seqlen, ...), with the rows of x, (total, ...), in their places."""
        if self.is_all:
            return out.copy_(x.unflatten(0, out.shape[:2]))
        out.fill_(padding)[self.places] = x
        return out


class Padding(NamedTuple):
    """What is known of a padded batch without its tensors, so that many layers can share it."""

    rows: Real
    keys: Real
    first_keys: int | None  # where no row is padding, and all see the same keys, these from the first on: how many


def padding_of(rows: torch.Tensor, keys: torch.Tensor, device: torch.device | None = None) -> Padding:
    """Of masks that are true for what is no padding: (batch, seqlen_q), and (batch, seqlen_k). Waits for the GPU once.

    The masks should not be written to while the result is used. It is for tensors on their device, or on this one.
    """
    rises = keys[:, 1:] & ~keys[:, :-1]
    with torch.inference_mode(False):  # so that torch counts what is written to cu_seqlens
        lengths_q, lengths_k, risen = torch.stack([real.sum(1) for real in (rows, keys, rises)]).tolist()
        real_rows, real_keys = (
            _real(real, real.sum(1), lengths, device) for real, lengths in ((rows, lengths_q), (keys, lengths_k))
        )
    alike = real_rows.is_all and len(set(lengths_k)) == 1 and not any(risen)
    return Padding(real_rows, real_keys, (lengths_k[0] or None) if alike else None)


def documents_of(rows: torch.Tensor, keys: torch.Tensor, device: torch.device | None = None) -> Padding:
    """The same where each sequence is made of documents, whose rows see no key of another one.

    Both say of which document something is: whole numbers that do not fall along a sequence, 0 for padding; the rows'
    are the last of the keys'. Waits for the GPU.
    """
    with torch.inference_mode(False):
        first = torch.arange(len(keys), device=keys.device)[:, None] * (keys.max() + 1)  # of another sequence, another
        names, counts_k = (keys + first)[keys > 0].unique_consecutive(return_counts=True)
        own = (rows + first)[rows > 0]
        counts_q = torch.searchsorted(own, names, right=True) - torch.searchsorted(own, names)
        lengths_q, lengths_k = torch.stack((counts_q, counts_k)).tolist()
        real_rows, real_keys = (
            _real(of > 0, counts, lengths, device)
            for of, counts, lengths in ((rows, counts_q, lengths_q), (keys, counts_k, lengths_k))
        )
    return Padding(real_rows, real_keys, None)


def _real(real: torch.Tensor, counts: torch.Tensor, lengths: list[int], device: torch.device | None) -> Real:
    """Of which rows are real, and how many of each sequence: on their device, and as numbers."""
    total = sum(lengths)
    batches, places = real.nonzero_static(size=total).to(device).unbind(1)  # nonzero() would wait for the GPU
    cu_seqlens = pad(counts.cumsum(0), (1, 0)).to(device, torch.int32)
    sequences.remember(cu_seqlens, [0, *accumulate(lengths)])
    return Real((batches, places), cu_seqlens, max(lengths, default=0), total == real.numel())


def taken_out(options: Options, q: torch.Tensor) -> tuple[Padding | None, Options]:
    """What the documents of a call take out of q and k, if they take anything, and what is asked for without it."""
    documents = options.documents
    assert documents is not None
    options = dataclasses.replace(options, documents=None)
    if bool((documents == 1).all()):
        return None, options
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    documents = documents.contiguous()
    content = ctypes.string_at(documents.data_ptr(), documents.nbytes)
    padding = _found(content, tuple(documents.shape), q.shape[1], q.device, stream, options.window_left is not None)
    rows, keys = padding.rows, padding.keys
    return padding, dataclasses.replace(
        options,
        cu_seqlens_q=rows.cu_seqlens,
        cu_seqlens_k=keys.cu_seqlens,
        max_seqlen_q=rows.longest,
        max_seqlen_k=keys.longest,
    )


@lru_cache(4)  # by content: compiled graphs write to the memory of tensors unseen
def _found(
    content: bytes, shape: tuple[int, int], seqlen_q: int, device: torch.device, stream: int, has_window: bool
) -> Padding:
    """Of tensors on this device, on this stream."""
    keys = torch.frombuffer(bytearray(content), dtype=torch.int32).view(shape)
    rows = keys[:, shape[1] - seqlen_q :]
    if has_window and (pad(keys, (1, 0)).diff(dim=1).clamp(min=0).count_nonzero(1) > keys.amax(1)).any():
        raise UnsupportedProblemError(
            'padding amid a sequence, in a window, under torch.compile: attn_implementation="sdpa" works'
        )
    if keys.max() > 1:
        return documents_of(rows, keys, device)
    return padding_of(rows > 0, keys > 0, device)
