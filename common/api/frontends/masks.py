"""Masks of transformers' models as `attention` takes them: what transformers would draw, said in a shape.

What a mask is, says its shape; only what is written here makes those of the first eight kinds:

None                  causal to the bottom right where the module is causal, and otherwise all keys
(batch, keys)         the same causal mask of these keys, those in front, and which of them are no padding; a query is
                      its own key. A batch of 0: none is padding, which nobody needs to read
(batch, keys, window) the same, and that a query sees so many keys at most, its own among them. Of int32 it says of
                      which document a key is, 0 for padding: a query sees its own alone
(batch, 1, 1, keys)   which keys are no padding, for all queries alike
(..., keys, window)   the same, of five dimensions: a query sees so many to each side at most, its own among them
the same, on the CPU  of int32, which says of which document a key is: what torch.compile traces. Nobody knows what it
                      hides before the graph runs
(batch)               a few queries against a static cache: how many keys, those in front, the last one sees. Only the
                      GPU reads it, so that a CUDA graph may hold the step
(0, 0, 0, 0, 0, n)    an expression: written_masks.py knows it by the number n
anything else         not for these kernels: transformers' "sdpa" takes it
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from flashladder.common.api import validate
from flashladder.common.api.frontends import written_masks
from flashladder.common.errors import UnsupportedProblemError

_SEVERAL, _MOVED = "several", "moved"  # parts that hold others: all of them; one, of positions within documents
# Names that transformers.masking_utils has to have. It may lack others, of parts of masks: "sdpa" takes what has those.
NEEDS = (
    *("and_masks", "bidirectional_mask_function", "causal_mask_function"),
    *("padding_mask_function", "prepare_padding_mask", "sdpa_mask"),
)
FEW_QUERIES = 16  # of a step against a static cache, such as drafted tokens; more are a prompt
read = WeakTensorKeyDictionary()  # of masks that were made here: what they take out, by a batch and a seqlen_q


def keys_of(mask: torch.Tensor) -> torch.Tensor:
    """What a mask says of keys, (batch, keys)."""
    mask = mask[..., 0] if mask.dim() in (3, 5) else mask
    return mask[:, 0, 0] if mask.dim() == 4 else mask


def window_of(mask: torch.Tensor) -> validate.Window:
    """What a mask says of how far a query sees."""
    if mask.dim() not in (3, 5) or mask.shape[-1] >= mask.shape[-2]:
        return validate.OPEN
    return mask.shape[-1] - 1, (mask.shape[-1] - 1 if mask.dim() == 5 else None)


def make(*, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """The mask of a forward pass, which nobody writes to: what is read of it is kept as long as it is there."""
    if attention_mask is not None and _is_ours(attention_mask):
        return attention_mask  # generate() makes masks for static caches itself, and models are given them
    made = _made(attention_mask=attention_mask, **options)
    if made is not None and not torch.compiler.is_compiling():
        read[made] = {}
    return made


def _is_ours(mask: torch.Tensor) -> bool:
    """Whether it was made here; of what is torch.compile's, no more than its shape is known."""
    return mask.dim() in (1, 3) or not len(mask) or (not torch.compiler.is_compiling() and mask in read)


def _made(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,  # as under a causal mask
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """In the kinds that this file knows, if it can be; see transformers' masking_utils.sdpa_mask."""
    from transformers.masking_utils import (
        and_masks,
        bidirectional_mask_function,
        causal_mask_function,
        padding_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )

    mask_function = causal_mask_function if mask_function is None else mask_function  # torch 2.11 traces no `or` of it
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    is_step = isinstance(q_offset, torch.Tensor) and q_length <= FEW_QUERIES and mask_function is causal_mask_function
    if is_step and not kv_offset and q_length < kv_length and _is_without_padding(attention_mask):
        return _seen_of(q_offset, q_length, batch_size)
    is_hidden = torch.compiler.is_compiling() and (padding is not None or not allow_is_causal_skip)
    if is_hidden and allow_is_bidirectional_skip is None and isinstance(q_offset, int) and not (q_offset or kv_offset):
        traced = _traced(mask_function, padding, (batch_size, q_length), local_size, device, **options)
        if q_length == kv_length and traced is not None:
            return traced
    known = (padding is None and isinstance(q_offset, int)) or not torch.compiler.is_compiling()
    known_skip = known and allow_is_causal_skip  # or else nobody asks for an offset, which waits for the GPU
    seen = int(q_offset) + q_length if known_skip else -1  # a static cache has room behind them
    if mask_function is causal_mask_function and known_skip and not kv_offset:
        real = None if padding is None else _unless_all(padding[:, :seen])
        if real is None and seen < kv_length:
            return torch.empty(0, seen, dtype=torch.bool, device=device)
        return real
    parts = _parts(mask_function)
    if seen == kv_offset + kv_length and local_size and _slides(parts, local_size, **options):
        real = None if padding is None else _unless_all(padding[:, kv_offset:seen])
        if kv_length <= local_size:
            return real  # nothing is out of the window
        if real is None:
            return torch.empty(0, kv_length, local_size, dtype=torch.bool, device=device)
        if _in_one_piece(real):  # or else distances would be others without the padding
            return real[:, :, None].expand(-1, -1, local_size)
    if parts and isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length:
        keys = torch.arange(kv_offset, kv_offset + kv_length, device=device)
        if (found := _documents(parts, keys)) is not None:
            documents, window = found
            real = documents if padding is None else documents * padding[:, kv_offset : kv_offset + kv_length]
            return real.int().expand(batch_size, -1)[:, :, None].expand(-1, -1, window)
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip and known:
        real = None if padding is None else _unless_all(padding[:, :kv_length])
        return None if real is None else real[:, None, None]
    if local_size and parts and parts.keys() <= {"all", "sides"} and _window_of(parts, "sides") == local_size:
        real = None if padding is None else _unless_all(padding[:, :kv_length])
        if kv_length <= local_size + 1:
            return None if real is None else real[:, None, None]
        if real is None:
            return torch.empty(0, 1, 1, kv_length, local_size + 1, dtype=torch.bool, device=device)
        if _in_one_piece(real):
            return real[:, None, None, :, None].expand(-1, 1, 1, -1, local_size + 1)
    plain = seen == kv_offset + kv_length and q_length in (1, kv_length)  # what None says here and in "sdpa" alike
    draw = partial(
        sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and plain,
        allow_is_bidirectional_skip=bool(allow_is_bidirectional_skip),
        device=device,
        local_size=local_size,
        **options,
    )
    is_of_few = q_length <= min(FEW_QUERIES, kv_length - 1)  # it is drawn sooner than written
    if torch.compiler.is_compiling() or is_of_few or _is_left_out(draw):
        return draw(mask_function=mask_function)
    shows = mask_function if padding is None else and_masks(mask_function, padding_mask_function(padding))
    places = written_masks.Places(q_length, kv_length, int(q_offset), kv_offset)
    is_causal = "causal" in parts and (_MOVED not in parts or "documents" in parts)
    later = partial(draw, mask_function=mask_function, q_offset=places.q_offset)  # a cache counts in place
    try:
        return written_masks.write(shows, places, torch.device(device), is_causal, later)
    except UnsupportedProblemError as error:
        drawn = later()
        written_masks.refusals[drawn] = str(error)
        return drawn


class _DrawnError(Exception):
    """A mask's function was asked."""


def _is_left_out(draw: Callable[..., Any]) -> bool:
    """Whether "sdpa" does without a mask."""

    def asked(*_: Any) -> Any:
        raise _DrawnError

    try:
        return draw(mask_function=asked) is None
    except _DrawnError:
        return False


def _traced(
    function: Callable[..., Any],
    padding: torch.Tensor | None,
    shape: tuple[int, int],
    local_size: int | None,
    device: torch.device | str,
    **options: Any,
) -> torch.Tensor | None:
    """Documents, on the CPU, of the causal mask of a whole sequence that torch.compile traces; None: it may be more.

    torch.compile lets a function's name be seen, and no parts. Without `use_vmap`, "and_mask" is a causal mask with
    transformers' own parts over it: packed sequences, and a window or chunks, of which its arguments tell. Then a query
    sees the key before it, unless it begins a document.
    """
    from transformers.masking_utils import causal_mask_function

    if options.get("use_vmap") or (local_size and not _slides({}, local_size, **options)):
        return None
    if function is causal_mask_function and padding is not None:
        documents = padding
    elif function.__name__ == "and_mask":
        at = torch.arange(shape[1], device=device)[None]
        batch = torch.arange(shape[0], device=device)[:, None]
        begins = ~function(batch, torch.zeros_like(at), at, (at - 1).clamp(min=0))
        documents = begins.cumsum(1) + 1
        documents = (documents if padding is None else documents * padding).expand(shape)
    else:
        return None
    documents = documents.to("cpu", torch.int32)
    if local_size is None or local_size >= shape[1]:
        return documents
    return documents[:, :, None].expand(-1, -1, local_size)


def _seen_of(q_offset: int | torch.Tensor, q_length: int, batch_size: int) -> torch.Tensor:
    """How many keys the last query of each sequence sees. A new tensor: the cache counts its keys in place."""
    return (torch.as_tensor(q_offset) + q_length).int().reshape(1).repeat(batch_size)


def _is_without_padding(attention_mask: torch.Tensor | None) -> bool:
    """Which waits for the GPU, but where nothing is said of padding; torch.compile cannot wait."""
    return attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all()))


def _unless_all(real: torch.Tensor) -> torch.Tensor | None:
    """None where nothing is padding, which waits for the GPU."""
    return None if real.all() else real


def _in_one_piece(real: torch.Tensor) -> bool:
    """Whether what is no padding is so, in each row."""
    return bool((pad(real, (1, 0)).diff(dim=1) & real).sum(1).le(1).all())


def _slides(parts: dict[str, Any], local_size: int, *, config: Any = None, use_vmap: bool = False, **_: Any) -> bool:
    """Whether it is transformers' sliding window under a causal mask, and nothing else.

    torch.compile does not let a function's parts be seen. Then the maker's arguments tell, where None may stand for the
    mask: with a local size, and nothing laid over it (use_vmap), it is the config's window or its chunks.
    """
    if not torch.compiler.is_compiling():
        return parts.keys() == {"causal", "window"} and _window_of(parts) == local_size
    chunk = getattr(config, "attention_chunk_size", None)
    return not use_vmap and chunk is None and getattr(config, "sliding_window", None) == local_size


@cache
def _known() -> dict[CodeType, str]:
    """The parts of masks that are known here, by their code in this version of transformers."""
    from transformers import masking_utils

    causal, every, nothing = (
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        torch.empty(0),
    )
    makers: dict[str, tuple[Any, ...]] = {
        "window": ("sliding_window_overlay", 1),
        "sides": ("sliding_window_bidirectional_overlay", 1),
        "chunks": ("chunked_overlay", 1, nothing),
        "documents": ("packed_sequence_mask_function", nothing),
        _SEVERAL: ("and_masks", causal),
        _MOVED: ("remap_positions_for_packed_sequence", causal, nothing),  # 5.17 has none
    }
    made = {
        getattr(masking_utils, maker)(*arguments).__code__: name
        for name, (maker, *arguments) in makers.items()
        if hasattr(masking_utils, maker)
    }
    return {causal.__code__: "causal", every.__code__: "all", **made}


def _parts(function: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """The parts of a mask that shows what all of them show: by name, each with what it was made of.

    Nothing where torch.compile does not let them be seen. What is not known here is "unknown", and so is a part that is
    there twice.
    """
    if torch.compiler.is_compiling():
        return {}
    name = _known().get(getattr(function, "__code__", None), "unknown")  # type: ignore[arg-type]
    made_of = _captured(function)
    if name == _MOVED:
        return _parts(made_of["mask_function"]) | {_MOVED: made_of}
    if name != _SEVERAL:
        return {name: made_of}
    parts: dict[str, dict[str, Any]] = {}
    for several in map(_parts, made_of["mask_functions"]):
        parts |= {"unknown": {}} if parts.keys() & several.keys() else several
    return parts


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function took from where it was made."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _window_of(parts: dict[str, Any], name: str = "window") -> int | None:
    return parts.get(name, {}).get("sliding_window")


def _documents(parts: dict[str, Any], keys: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Of which document each of these keys is, (batch or 1, keys), from 1 on, and how many keys a query sees at most.

    They are transformers' packed sequences under a causal mask or a window, or chunks of a sequence; None: neither.
    """
    if parts.keys() == {"causal", "chunks"}:
        chunks = (keys - parts["chunks"]["left_padding"][:, None]) // parts["chunks"]["chunk_size"] + 1
        return chunks.clamp(min=0), len(keys)  # those to the left of the first are padding
    if {"causal", "documents"} <= parts.keys() <= {"causal", "documents", "window", _MOVED}:
        # Positions within a document are consecutive, so that moving them changes no distance
        return parts["documents"]["packed_sequence_mask"] + 1, min(_window_of(parts) or len(keys), len(keys))
    return None


def whole(
    mask: torch.Tensor | None, seqlen_q: int, seqlen_k: int, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """The same mask as "sdpa" takes it, whose own causal mask is to the upper left."""
    if (mask is None and not (causal and 1 < seqlen_q < seqlen_k)) or (mask is not None and mask.dim() == 4):
        return mask
    if mask is not None and mask.dim() == written_masks.DIMENSIONS:
        return written_masks.written(mask).draw().to(device)
    if mask is None:
        return _bounds(seqlen_q, seqlen_k, 0, (None, 0), device)[None, None]
    if mask.dim() == 1:
        first = (mask - seqlen_q + 1)[:, None, None, None]  # the keys that the first query sees
        return torch.arange(seqlen_k, device=device) < first + torch.arange(seqlen_q, device=device)[:, None]
    left, right = window_of(mask)
    keys = mask.shape[3] if mask.dim() == 5 else mask.shape[1]
    seen = _bounds(seqlen_q, seqlen_k, seqlen_k - keys, (left, right if mask.dim() == 5 else 0), device)
    if not len(mask):
        return seen[None, None]
    mask = mask.to(device)
    real = pad(keys_of(mask), (0, seqlen_k - keys))[:, None, None]
    own = real[..., keys - seqlen_q : keys].mT
    return seen & ((real == own) & (real > 0) if mask.dtype == torch.int32 else real)


def _bounds(seqlen_q: int, seqlen_k: int, behind: int, window: validate.Window, device: torch.device) -> torch.Tensor:
    """Which keys are within a window of a query's own, which are the last ones but for those `behind`."""
    own = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - behind - seqlen_q
    key = torch.arange(seqlen_k, device=device)
    left, right = (seqlen_k if bound is None else bound for bound in window)
    return (key >= own - left) & (key <= own + right)
