"""transformers' models: `attn_implementation="ladder"`, through its AttentionInterface and AttentionMaskInterface.

What a mask is, says its shape; only what is written here makes those of the first four kinds:

None                  causal to the bottom right where the module is causal, and otherwise all keys
(batch, keys)         the same causal mask of these keys, those in front, and which of them are no padding; a query is
                      its own key. A batch of 0: none is padding, which nobody needs to read
(batch, keys, window) the same, and that a query sees so many keys at most, its own among them
(batch, 1, 1, keys)   which keys are no padding, for all queries alike
anything else         not for these kernels: transformers' "sdpa" takes it
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from flashladder.common.api import attention, general, op
from flashladder.common.api.fallback import autocast, foresee, say
from flashladder.common.api.packed import Padding, only_o, packed_attention, padding_of, without_padding
from flashladder.common.errors import FlashLadderError, ToolchainError, UnsupportedProblemError

NAME = "ladder"
_NOT_SDPAS = {"softcap": "a softcap", "s_aux": "attention sinks"}
_foreseen: set[tuple[object, ...]] = set()  # kinds of tensors in whose generation no kernel is new
_read = WeakTensorKeyDictionary()  # of masks that were made here: what they take out, by a batch and a seqlen_q


def register_with_transformers() -> None:
    """Makes `attn_implementation="ladder"` work in transformers' `from_pretrained` and `set_attn_implementation`.

    Models then run `attention`. Padding, to the left or the right, is taken out, and the batch runs as packed
    sequences; a query that is padding gives 0. On a GPU a first causal call also makes ready the kernels that its
    generation comes to, or that of a padded batch; one that was never compiled takes some seconds more. Where
    `attention` refuses, or a mask, a gradient or dropout is wanted that it does not have, transformers' "sdpa" runs,
    with one FallbackWarning for each kind of reason. Where a softcap or attention sinks are wanted,
    which "sdpa" has not, UnsupportedProblemError is raised instead.

    Raises ToolchainError without transformers, or for one whose masks are made in another way.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        raise ToolchainError("transformers is missing or too old: pip install -U transformers") from None
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        from transformers import __version__

        raise ToolchainError(f"transformers {__version__} makes masks in another way; 5.23 works")
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)  # without one of the same name, the mask would be None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q, k and v are (batch, heads, seqlen, head_dim); the output is (batch, seqlen_q, heads, head_dim)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    try:
        q, k, v = autocast(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
        _refuse(q, k, v, dropout, options)
        return _ours(q, k, v, attention_mask, causal, scaling, options), None
    except UnsupportedProblemError as error:
        if options.get("cu_seq_lens_q") is not None:
            raise UnsupportedProblemError(
                f'{error}; with cu_seq_lens_q, which "sdpa" does not read, only transformers\' flash-attn works'
            ) from None
        for name, what in _NOT_SDPAS.items():
            if options.get(name) is not None:
                raise UnsupportedProblemError(
                    f'{error}; with {what}, which "sdpa" has not, attn_implementation="eager" works'
                ) from None
        say('transformers\' "sdpa"', str(error))
    whole = _whole(attention_mask, query.shape[2], key.shape[2], causal, query.device)
    return sdpa_attention_forward(
        module, query, key, value, whole, dropout=dropout, scaling=scaling, is_causal=causal, **options
    )


def _refuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, options: dict[str, Any]) -> None:
    """What is known to be beyond `attention` from the outside."""
    if dropout:
        raise UnsupportedProblemError(f"dropout={dropout}: kernels drop nothing")
    for name in ("position_bias", "cache"):
        if options.get(name) is not None:
            raise UnsupportedProblemError(f"{name}: kernels take none")
    if options.get("output_attentions"):
        raise UnsupportedProblemError("output_attentions: kernels keep no probabilities")
    foresee(q, k, v)


def _ours(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Of (batch, seqlen, heads, head_dim)."""
    scores: dict[str, Any] = {"softmax_scale": scale, "softcap": options.get("softcap") or 0.0}
    scores["sinks"] = options.get("s_aux")
    if options.get("cu_seq_lens_q") is not None:
        if len(q) > 1:
            raise UnsupportedProblemError(f"cu_seq_lens_q in a batch of {len(q)}; packed sequences are one row")
        if mask is not None and mask.dim() == 3 and not len(mask):
            scores["window"] = mask.shape[2] - 1, None
        elif mask is not None:
            raise UnsupportedProblemError("cu_seq_lens_q with a mask that hides more than a window")
        sequences = (options[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
        return only_o(packed_attention(q[0], k[0], v[0], *sequences, causal=causal, **scores))[None]
    if mask is not None:
        if len(mask) and torch.compiler.is_compiling():
            raise UnsupportedProblemError("a mask under torch.compile, where nobody knows what it hides")
        if mask.dtype != torch.bool or (mask.dim() == 4 and mask.shape[1:3] != (1, 1)):
            raise UnsupportedProblemError("a mask that is more than causal, padding and a window: kernels take none")
        if mask.dim() < 4:
            causal = True
            k, v = (tensor[:, : mask.shape[1]] for tensor in (k, v))
        if mask.dim() == 3:
            scores["window"] = mask.shape[2] - 1, None
        causal = causal and (mask.dim() < 4 or q.shape[1] == 1)  # one row sees all keys in either kernel
    if mask is None or not len(mask):
        o = only_o(attention(q, k, v, causal=causal, **scores))
    else:
        o = without_padding(q, k, v, _padding(mask, *q.shape[:2]), causal=causal, **scores)
    if causal and not torch.compiler.is_compiling() and op.is_gpu(q):
        _foresee_tokens(q, k, scores)
    return o


def _foresee_tokens(q: torch.Tensor, k: torch.Tensor, scores: dict[str, Any]) -> None:
    """Has made ready, once, what this generation comes to, or one of a padded batch: no kernel compiles amid them.

    What cannot be made ready is not needed yet.
    """
    window, softcap = scores.get("window", general.OPEN), scores["softcap"]
    lse = scores["sinks"] is not None
    kind = q.dtype, q.device, q.shape[2:], k.shape[2], window == general.OPEN, softcap > 0, lse
    if kind in _foreseen:
        return
    _foreseen.add(kind)
    for bounds, packed in itertools.product(dict.fromkeys((general.OPEN, window)), (False, True)):
        with contextlib.suppress(FlashLadderError):
            general.make_ready(q, k, bounds, softcap, packed, lse)


def _padding(mask: torch.Tensor, batch: int, seqlen_q: int) -> Padding:
    """What a mask takes out of a batch. Layers share one mask, which is read for the first of them."""
    kept = _read.get(mask, {})
    if (found := kept.get((batch, seqlen_q))) is None:
        keys = (mask[:, 0, 0] if mask.dim() == 4 else mask[:, :, 0] if mask.dim() == 3 else mask).expand(batch, -1)
        rows = keys.new_ones(batch, seqlen_q) if mask.dim() == 4 else keys[:, keys.shape[1] - seqlen_q :]
        found = kept[batch, seqlen_q] = padding_of(rows, keys)
    return found


def _mask(*, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """The mask of a forward pass, which nobody writes to: what is read of it is kept as long as it is there."""
    if attention_mask is not None and _is_ours(attention_mask):
        return attention_mask  # generate() makes masks for static caches itself, and models are given them
    made = _made(attention_mask=attention_mask, **options)
    if made is not None and not torch.compiler.is_compiling():
        _read[made] = {}
    return made


def _is_ours(mask: torch.Tensor) -> bool:
    """Whether it was made here; of what is torch.compile's, no more than its shape is known."""
    return mask.dim() == 3 or not len(mask) or (not torch.compiler.is_compiling() and mask in _read)


def _made(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """In the kinds that this file knows, if it can be; see transformers' masking_utils.sdpa_mask."""
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )

    mask_function = mask_function or causal_mask_function
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    known = (padding is None and isinstance(q_offset, int)) or not torch.compiler.is_compiling()
    known_skip = known and allow_is_causal_skip  # or else nobody asks for an offset, which waits for the GPU
    seen = int(q_offset) + q_length if known_skip else -1  # a static cache has room behind them
    if mask_function is causal_mask_function and known_skip and not kv_offset:
        real = None if padding is None else _unless_all(padding[:, :seen])
        if real is None and seen < kv_length:
            return torch.empty(0, seen, dtype=torch.bool, device=device)
        return real
    if seen == kv_offset + kv_length and local_size and _slides(mask_function, local_size):
        real = None if padding is None else _unless_all(padding[:, kv_offset:seen])
        if kv_length <= local_size:
            return real  # nothing is out of the window
        if real is None:
            return torch.empty(0, kv_length, local_size, dtype=torch.bool, device=device)
        if _in_one_piece(real):  # or else distances would be others without the padding
            return real[:, :, None].expand(-1, -1, local_size)
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip and known:
        real = None if padding is None else _unless_all(padding[:, :kv_length])
        return None if real is None else real[:, None, None]
    plain = seen == kv_offset + kv_length and q_length in (1, kv_length)  # what None says here and in "sdpa" alike
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and plain,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        device=device,
        local_size=local_size,
        **options,
    )


def _unless_all(real: torch.Tensor) -> torch.Tensor | None:
    """None where nothing is padding, which waits for the GPU."""
    return None if real.all() else real


def _in_one_piece(real: torch.Tensor) -> bool:
    """Whether what is no padding is so, in each row."""
    return bool((pad(real, (1, 0)).diff(dim=1) & real).sum(1).le(1).all())


def _slides(mask_function: Callable[..., Any], local_size: int) -> bool:
    """Whether it is transformers' sliding window under a causal mask, and nothing else."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    if torch.compiler.is_compiling():
        return False

    def made_of(function: Any) -> Any:
        if isinstance(function, tuple):
            return tuple(map(made_of, function))
        cells = getattr(function, "__closure__", None)
        return (function.__code__, *(made_of(cell.cell_contents) for cell in cells)) if cells else function

    return bool(made_of(mask_function) == made_of(sliding_window_causal_mask_function(local_size)))


def _whole(
    mask: torch.Tensor | None, seqlen_q: int, seqlen_k: int, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """The same mask as "sdpa" takes it, whose own causal mask is to the upper left."""
    if (mask is None and not (causal and 1 < seqlen_q < seqlen_k)) or (mask is not None and mask.dim() == 4):
        return mask
    keys = seqlen_k if mask is None else mask.shape[1]
    real = None if mask is None or not len(mask) else mask[:, :, 0] if mask.dim() == 3 else mask
    own = torch.arange(seqlen_q, device=device)[:, None] + keys - seqlen_q
    key = torch.arange(seqlen_k, device=device)
    seen = (key <= own) & (key > own - (mask.shape[2] if mask is not None and mask.dim() == 3 else seqlen_k))
    return seen[None, None] if real is None else seen & pad(real, (0, seqlen_k - keys))[:, None, None]
