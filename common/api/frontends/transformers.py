"""transformers' models: `attn_implementation="ladder"`, through its AttentionInterface and AttentionMaskInterface."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import Any

import torch

from flashladder.common.api import attention, kvcache, operator, validate
from flashladder.common.api.documents import Padding, documents_of, padding_of
from flashladder.common.api.frontends import masks, written_masks
from flashladder.common.api.frontends.fallback import foresee, say
from flashladder.common.api.frontends.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashladder.common.api.packed import attention_in_documents, only_o, packed_attention, without_padding
from flashladder.common.errors import FlashLadderError, ToolchainError, UnsupportedProblemError
from flashladder.common.packages import OLDEST
from flashladder.common.problem.head_dims import CACHED_HEAD_DIMS
from flashladder.common.runtime import ready

NAME = "ladder"
FLASH = "flash_ladder_3"  # in which transformers looks for "flash", and for the 3 of flash-attn's functions of pages
_NOT_SDPAS = {"softcap": "a softcap", "s_aux": "attention sinks"}
_FLASHS_NEEDS = ("_lazy_imports", "_pad_input", "_unpad_input", "_flash_with_kvcache_fn")
_foreseen: set[tuple[object, ...]] = set()  # kinds of tensors in whose generation no kernel is new


def register_with_transformers() -> None:
    """Makes `attn_implementation="ladder"` work in transformers' `from_pretrained` and `set_attn_implementation`.

    Models then run `attention`. Padding, to the left or the right, is taken out, and the batch runs as packed
    sequences; a query that is padding gives 0. Other masks that are functions of positions, such as image spans, become
    expressions. On a GPU a first causal call also makes ready the kernels that its generation comes to, or that of a
    padded batch; one that was never compiled takes some seconds more. Where `attention` refuses, or a mask or a
    gradient is wanted that it does not have, transformers' "sdpa" runs, with one FallbackWarning for each kind of
    reason. Where a softcap or attention sinks are wanted, which "sdpa" has not, UnsupportedProblemError is raised
    instead.

    For continuous batching (`generate_batch`) the name is "flash_ladder_3": transformers then calls our functions where
    it would call flash-attn's, with their arguments by name. Nothing else runs instead.

    Raises ToolchainError without transformers, or for one whose masks, or flash-attn's functions, come in another way.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils
        from transformers import modeling_flash_attention_utils as flash
        from transformers.integrations.flash_attention import flash_attention_forward
    except ImportError:
        raise ToolchainError("transformers is missing or too old: pip install -U transformers") from None
    lacks = [name for name in masks.NEEDS if not hasattr(masking_utils, name)]
    lacks += [name for name in _FLASHS_NEEDS if not hasattr(flash, name)]
    if lacks or "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ToolchainError(
            f"transformers {__version__} makes masks or calls flash-attn in another way; "
            f"{OLDEST['transformers']} or later works"
        )
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, masks.make)  # without one of the same name, the mask would be None
    AttentionInterface.register(FLASH, flash_attention_forward)
    AttentionMaskInterface.register(FLASH, masking_utils.flash_attention_mask)
    if not isinstance(flash._lazy_imports, _Functions):
        flash._lazy_imports = _Functions(flash)


class _Functions:
    """transformers' table of flash-attn's functions, which has no door for others, and ours under our name."""

    def __init__(self, flash: Any) -> None:
        self.others, self.padding = flash._lazy_imports, (flash._pad_input, flash._unpad_input)

    def __call__(self, implementation: str | None, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        if implementation != FLASH:
            found: tuple[Any, ...] = self.others(implementation, *arguments, **options)
            return found
        return flash_attn_func, flash_attn_varlen_func, kvcache.flash_attn_with_kvcache, *self.padding


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
        q, k, v = validate.autocast(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
        _refuse(q, k, v, options)
        return _ours(q, k, v, attention_mask, causal, scaling, dropout, options), None
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
    whole = masks.whole(attention_mask, query.shape[2], key.shape[2], causal, query.device)
    return sdpa_attention_forward(
        module, query, key, value, whole, dropout=dropout, scaling=scaling, is_causal=causal, **options
    )


def _refuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> None:
    """What is known to be beyond `attention` from the outside."""
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
    dropout: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """Of (batch, seqlen, heads, head_dim)."""
    scores: dict[str, Any] = {"softmax_scale": scale, "softcap": options.get("softcap") or 0.0, "dropout_p": dropout}
    scores["sinks"] = options.get("s_aux")
    if options.get("cu_seq_lens_q") is not None:
        if len(q) > 1:
            raise UnsupportedProblemError(f"cu_seq_lens_q in a batch of {len(q)}; packed sequences are one row")
        if mask is not None and (mask.dim() != 3 or (len(mask) and mask.dtype != torch.int32)):
            raise UnsupportedProblemError("cu_seq_lens_q with a mask that hides more than a window")
        if mask is not None:
            scores["window"] = masks.window_of(mask)
        sequences = (options[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
        return only_o(packed_attention(q[0], k[0], v[0], *sequences, causal=causal, **scores))[None]
    if mask is not None and mask.dim() == written_masks.DIMENSIONS:
        return only_o(attention(q, k, v, **written_masks.written(mask).options, **scores))
    if mask is not None and mask.dim() == 1:
        return _step(q, k, v, mask, scores)
    if mask is not None:
        is_traced = torch.compiler.is_compiling() and mask.dtype == torch.int32
        if len(mask) and torch.compiler.is_compiling() and not is_traced:
            raise UnsupportedProblemError("a mask under torch.compile, where nobody knows what it hides")
        if mask.dtype not in (torch.bool, torch.int32) or (mask.dim() == 4 and mask.shape[1:3] != (1, 1)):
            unknown = "a mask that is more than causal, padding and a window: kernels take none"
            raise UnsupportedProblemError(written_masks.refusals.get(mask, unknown))
        if mask.dim() < 4:
            causal = True
            k, v = (tensor[:, : mask.shape[1]] for tensor in (k, v))
        scores["window"] = masks.window_of(mask)
        causal = causal and (mask.dim() < 4 or q.shape[1] == 1)  # one row sees all keys in either kernel
    if mask is None or not len(mask):
        o = only_o(attention(q, k, v, causal=causal, **scores))
    elif is_traced:
        o = attention_in_documents(q, k, v, masks.keys_of(mask), **scores)
    else:
        o = without_padding(q, k, v, _padding(mask, *q.shape[:2]), causal=causal, **scores)
    if causal and not torch.compiler.is_compiling() and ready.is_gpu(q.device):
        _foresee_tokens(q, k, v, scores)
    return o


def _step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scores: dict[str, Any]
) -> torch.Tensor:
    """A few queries of each sequence, against the first `lengths` keys of its place in a static cache."""
    has_kernel = k.shape[3] == v.shape[3] and k.shape[3] in CACHED_HEAD_DIMS
    if has_kernel and scores["sinks"] is None and not scores["dropout_p"]:
        asked = {name: scores[name] for name in ("softmax_scale", "softcap")}
        return only_o(kvcache.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **asked))
    if torch.compiler.is_compiling():
        raise UnsupportedProblemError("a step under torch.compile that no decode kernel takes: it needs a length")
    seen = int(lengths[0])  # waits for the GPU; they are all the same
    return only_o(attention(q, k[:, :seen], v[:, :seen], causal=True, **scores))


def _foresee_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: dict[str, Any]) -> None:
    """Has made ready, once, what this generation comes to, or one of a padded batch: no kernel compiles amid them.

    What cannot be made ready is not needed yet.
    """
    window, softcap = scores.get("window", validate.OPEN), scores["softcap"]
    sinks = scores["sinks"] is not None
    kind = q.dtype, q.device, q.shape[2:], k.shape[2], v.shape[3], window == validate.OPEN, softcap > 0, sinks
    if kind in _foreseen:
        return
    _foreseen.add(kind)
    if window == validate.OPEN:  # a step against a static cache
        with contextlib.suppress(FlashLadderError):
            kvcache.make_ready(q, k, v, softcap)
    for bounds, packed in itertools.product(dict.fromkeys((validate.OPEN, window)), (False, True)):
        with contextlib.suppress(FlashLadderError):
            operator.make_ready(q, k, v, bounds, softcap, packed, sinks)


def _padding(mask: torch.Tensor, batch: int, seqlen_q: int) -> Padding:
    """What a mask takes out of a batch. Layers share one mask, which is read for the first of them."""
    kept = masks.read.get(mask, {})
    if (found := kept.get((batch, seqlen_q))) is None:
        keys = masks.keys_of(mask).expand(batch, -1)
        last = keys[:, keys.shape[1] - seqlen_q :]
        if mask.dtype == torch.int32:
            found = documents_of(last, keys)
        else:
            found = padding_of(keys.new_ones(batch, seqlen_q) if mask.dim() == 4 else last, keys)
        kept[batch, seqlen_q] = found
    return found
