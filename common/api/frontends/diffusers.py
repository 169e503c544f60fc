"""diffusers' models: `set_attention_backend("ladder")`, through the registry of diffusers/models/attention_dispatch.py.

A backend's name is a member of an Enum there, which has no door for others: a member is added to it.
"""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import attention, validate
from flashladder.common.api.documents import padding_of
from flashladder.common.api.frontends.fallback import foresee, say
from flashladder.common.api.packed import without_padding
from flashladder.common.errors import ToolchainError, UnsupportedProblemError

NAME = "ladder"


def register_with_diffusers() -> None:
    """Makes diffusers' `model.set_attention_backend("ladder")` and `attention_backend("ladder")` work.

    Models then run `attention`. Keys that a mask hides for all queries alike are taken out, and the batch runs as
    packed sequences. Another mask is read element by element. Where `attention` refuses, or a mask or a gradient is
    wanted that it does not have, diffusers' "native" runs, with one FallbackWarning for each kind of reason.

    Raises ToolchainError without diffusers, or for one whose backends are kept in another way.
    """
    try:
        from diffusers import __version__
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise ToolchainError(f"diffusers is missing or too old ({error}): pip install -U diffusers") from None
    try:
        names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
        checks = [attention_dispatch._check_device, attention_dispatch._check_shape]
        registry.register(_member(names), constraints=checks)(_attend)
        attention_dispatch._native_attention  # noqa: B018 - which runs where ours does not
    except (AttributeError, TypeError) as error:
        raise ToolchainError(f"diffusers {__version__} keeps backends in another way ({error}); 0.42 works") from None


def _member(names: Any) -> Any:
    """Ours among the names of backends."""
    if NAME in names._value2member_map_:
        return names(NAME)
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    setattr(names, member._name_, member)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    return member


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """q, k, v and the output are (batch, seqlen, heads, head_dim); the log-sum-exp is (batch, heads, seqlen_q)."""
    from diffusers.models.attention_dispatch import _native_attention

    try:
        if _parallel_config is not None:
            raise UnsupportedProblemError("_parallel_config: contexts in parallel are not for this backend")
        if is_causal and query.shape[1] != key.shape[1]:
            raise UnsupportedProblemError("is_causal with seqlen_q != seqlen_k, which is to the upper left there")
        if query.shape[2] != key.shape[2] and not enable_gqa:
            raise UnsupportedProblemError("fewer heads of k and v without enable_gqa")
        q, k, v = validate.autocast(query, key, value)
        foresee(q, k, v)
        options: dict[str, Any] = {"causal": is_causal, "softmax_scale": scale, "dropout_p": dropout_p}
        if attn_mask is not None:
            if is_causal:
                raise UnsupportedProblemError("a mask with is_causal: kernels take one of the two")
            seen = _four_dimensional(attn_mask, q, k)
            if seen.shape[1:3] == (1, 1) and not (return_lse or torch.compiler.is_compiling()):
                rows = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
                keys = seen[:, 0, 0].expand(len(q), -1)
                return without_padding(q, k, v, padding_of(rows, keys), **options)
            options |= _by_elements(seen)
        return attention(q, k, v, return_lse=return_lse, **options)
    except UnsupportedProblemError as error:
        if return_lse:
            raise UnsupportedProblemError(f'{error}; with return_lse, which "native" has not, "flash" works') from None
        say('diffusers\' "native"', str(error))
    o: torch.Tensor = _native_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, _parallel_config=_parallel_config
    )
    return o


def _four_dimensional(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(batch or 1, heads or 1, rows or 1, keys), true where a row sees a key.

    UnsupportedProblemError for a mask that is none such.
    """
    batch, rows, heads, keys = *q.shape[:3], k.shape[1]
    if mask.dtype != torch.bool:
        raise UnsupportedProblemError(f"a mask of {mask.dtype}: kernels take bool")
    if mask.dim() == 2 and mask.shape[0] in (1, batch):
        mask = mask[:, None, None]  # diffusers' own: of keys
    while mask.dim() < 4:
        mask = mask[None]
    sizes = zip(mask.shape, (batch, heads, rows, keys), strict=False)
    if mask.dim() > 4 or any(size not in (1, full) for size, full in sizes):
        raise UnsupportedProblemError(
            f"a mask of {tuple(mask.shape)}, for {batch} sequences, {heads} heads, {rows} rows and {keys} keys"
        )
    return mask.expand(-1, -1, -1, keys)


def _by_elements(seen: torch.Tensor) -> dict[str, Any]:
    """As `attention` takes a mask of four dimensions."""
    places = ("b", "h", "q - (seqlen_k - seqlen_q)", "k")
    at = ", ".join(place if size > 1 else "0" for place, size in zip(places, seen.shape, strict=True))
    return {"mask": f"seen[{at}]", "tensors": {"seen": seen}}
