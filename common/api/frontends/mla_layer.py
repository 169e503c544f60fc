"""DeepSeek's layers of transformers, decoded in their latents: one row of 576 columns a token, for all heads.

A layer of multi-head latent attention caches latents, and expands all of them into keys and values of each head at
every step. Its projections can be absorbed instead, W^UK into q and W^UV behind O (versions/references/py_mla). Then
`flash_mla_with_kvcache`'s kernels attend to the latents as they lie.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from torch.nn.functional import pad

from flashladder.common.api import gradients, mla, validate
from flashladder.common.api.frontends import masks
from flashladder.common.api.frontends import transformers as ladder
from flashladder.common.api.validate import can_look_at
from flashladder.common.errors import ToolchainError, UnsupportedProblemError
from flashladder.common.problem.problem import DTYPES
from flashladder.common.runtime.outputs import new_o

try:
    from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
    from transformers.cache_utils import StaticLayer
    from transformers.masking_utils import causal_mask_function, sdpa_mask
except ImportError:
    raise ToolchainError("transformers is missing or too old: pip install -U transformers") from None

NAME = "ladder-latents"
LAYERS = ("DeepseekV2Attention", "DeepseekV3Attention")
LATENT, ROTATED = mla.HEAD_DIM_V, mla.HEAD_DIM - mla.HEAD_DIM_V
PAGE = 64  # keys, and the room behind a sequence, in which its last page ends
GROWTH = 256  # keys: a growing cache is another problem each time it has so many more


def absorb(model: Any) -> Any:
    """Has transformers' DeepSeek-V2 or -V3 decode in its latents, and returns it.

    A step of one token then absorbs the projections, as FlashMLA's users do; all else runs on `attention`, as under
    attn_implementation="ladder". That goes for prompts, gradients, models of 32 bits, and masks that are more than
    padding. Padding may be to the left. Amid a sequence it is refused; on a GPU, which nobody waits for, O is NaN then.
    Nothing is copied of the weights. Any cache will do, but each step copies all of one that is not a `LatentCache`.

    Raises UnsupportedProblemError for a model without such layers, or of other sizes than 512 columns of latents and 64
    that are rotated; and where W^UK and W^UV are not the weight of a plain Linear.
    """
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ in LAYERS]
    if not layers:
        raise UnsupportedProblemError(
            f"{type(model).__name__} has no layer whose latents kernels take: {' or '.join(LAYERS)}"
        )
    for layer in layers:
        _check(layer)
    ladder.register_with_transformers()
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    for layer in layers:
        layer.expand_kv = types.MethodType(_kept, layer)
    model.set_attn_implementation(NAME)
    return model


class LatentCache(StaticCache):
    """transformers' static cache whose rows are those that kernels read: latent and rotated part side by side.

    Raises UnsupportedProblemError for models of other sizes than `absorb` takes, and for more keys than there is room
    for; on a GPU, which nobody waits for, an index out of bounds ends those.
    """

    def __init__(self, config: Any, max_cache_len: int) -> None:
        _check_sizes(config.get_text_config(decoder=True))
        if validate.whole("max_cache_len", max_cache_len) < 1:
            raise UnsupportedProblemError(f"max_cache_len={max_cache_len}: must be at least 1")
        super().__init__(config, max_cache_len)
        self.layers = [_Rows(max_cache_len) for _ in range(len(self))]


class _Rows(StaticLayer):
    """`keys` are the rows, (batch, 1, room + PAGE, 576), `values` have no columns."""

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len + PAGE)
        self.room = max_cache_len

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat((latent, rotated), -1)
        if not self.is_initialized:
            self.lazy_initialization(rows, rows[..., :0])
        self._check(rows)
        at = self.cumulative_length + torch.arange(rows.shape[2], device=rows.device)
        self.cumulative_length.add_(rows.shape[2])
        self.keys.index_copy_(2, at + PAGE * (at >= self.room), rows)  # beyond the room is beyond the memory
        return self.keys, self.values

    def _check(self, rows: torch.Tensor) -> None:
        """UnsupportedProblemError for rows that have no place here."""
        if len(rows) != len(self.keys):
            raise UnsupportedProblemError(f"the LatentCache is of {len(self.keys)} sequences, these are {len(rows)}")
        if can_look_at(rows) and (keys := int(self.cumulative_length) + rows.shape[2]) > self.room:
            raise UnsupportedProblemError(f"{keys} keys: the LatentCache has room for max_cache_len={self.room}")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.room, 0

    def get_max_length(self) -> int:
        return self.room


def _check(layer: Any) -> None:
    """UnsupportedProblemError for a layer that cannot be absorbed."""
    if not hasattr(type(layer), "expand_kv"):
        raise UnsupportedProblemError(f"{type(layer).__name__} has no expand_kv; that of transformers 5.23 has")
    _check_sizes(layer)
    _up(layer)


def _check_sizes(of: Any) -> None:
    """UnsupportedProblemError for a layer, or a model's config, of other sizes than kernels take."""
    latent, rotated = (getattr(of, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if (latent, rotated) != (LATENT, ROTATED):
        raise UnsupportedProblemError(
            f"kv_lora_rank={latent} and qk_rope_head_dim={rotated}; kernels take {LATENT} and {ROTATED}: "
            'attn_implementation="ladder" expands others'
        )


def _up(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """W^UK, (heads, columns, 512), and W^UV."""
    linear = layer.kv_b_proj
    if type(linear) is not torch.nn.Linear or linear.weight.is_meta:
        raise UnsupportedProblemError(
            f"kv_b_proj is of type {type(linear).__name__}; a plain Linear that lies in memory can be absorbed"
        )
    of_heads = linear.weight.view(-1, layer.qk_nope_head_dim + layer.v_head_dim, LATENT)
    return of_heads[:, : layer.qk_nope_head_dim], of_heads[:, layer.qk_nope_head_dim :]


def _kept(layer: Any, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of expand_kv: the latents themselves, for `_attend`."""
    if layer.config._attn_implementation != NAME:
        return type(layer).expand_kv(layer, *_apart(latent, rotated))
    return latent, rotated


def _apart(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache gives, as transformers' own does."""
    return latent[:, :, :-PAGE].split((LATENT, ROTATED), -1) if _are_rows(latent) else (latent, rotated)


def _are_rows(latent: torch.Tensor) -> bool:
    """Whether they are those of a LatentCache."""
    return latent.shape[-1] == LATENT + ROTATED


def _mask(*, q_length: int, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """Of a step, which keys are no padding, (batch, 1, 1, keys), for which nobody waits; None: all are seen."""
    is_causal = options.get("mask_function", causal_mask_function) is causal_mask_function
    if q_length > 1 or not is_causal:
        return masks.make(q_length=q_length, attention_mask=attention_mask, **options)
    seen = options["q_offset"]
    if attention_mask is None and isinstance(seen, int) and seen + 1 == options["kv_length"]:
        return None
    return sdpa_mask(q_length=1, attention_mask=attention_mask, **options | {"allow_is_causal_skip": False})


def _attend(
    module: Any,
    query: torch.Tensor,
    latent: torch.Tensor,
    rotated: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """query is (batch, heads, seqlen_q, columns); the output is (batch, seqlen_q, heads, columns of V)."""
    is_alike = query.dtype == latent.dtype and query.dtype in DTYPES.values()
    is_step = query.shape[2] == 1 and is_alike and not dropout and not gradients.wanted(query, latent)
    if is_step and _is_padding(attention_mask) and not options.get("output_attentions"):
        return _step(module, query[:, :, 0], latent, rotated, attention_mask, scaling), None
    latent, rotated = _apart(latent, rotated)
    if attention_mask is not None and attention_mask.dim() == 2:
        latent, rotated = (x[:, :, : attention_mask.shape[1]] for x in (latent, rotated))  # behind them there is room
    key, value = type(module).expand_kv(module, latent, rotated)
    return ladder._attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)


def _is_padding(mask: torch.Tensor | None) -> bool:
    """Whether a step's mask says no more than which keys are padding."""
    return mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1:3] == (1, 1))


def _step(
    module: Any,
    query: torch.Tensor,
    latent: torch.Tensor,
    rotated: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """O of a row of each head: q (W^UK c) = (q W^UK) c, and P (C W^UV^T) = (P C) W^UV^T."""
    batch, keys = len(latent), _apart(latent, rotated)[0].shape[2]
    real = latent.new_ones(batch, keys, dtype=torch.bool) if mask is None else mask[:, 0, 0].expand(batch, -1)
    first, lengths, is_torn = _seen(real)
    up_k, up_v = _up(module)
    plain, turned = query.split((up_k.shape[1], ROTATED), -1)
    q = torch.cat((torch.bmm(plain.transpose(0, 1), up_k).transpose(0, 1), turned), -1)
    rows = latent[:, 0] if _are_rows(latent) else _rows(latent, rotated)
    o = attend_rows(q[:, None], rows, first, lengths, scaling)
    o = torch.bmm(o[:, 0].transpose(0, 1), up_v.mT).transpose(0, 1)[:, None]
    return o.masked_fill(is_torn[:, None, None, None], math.nan)


def _seen(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of which keys are no padding: the first, how many there are, and whether padding lies amid them: (batch) each."""
    begins = real & ~pad(real[:, :-1], (1, 0))
    is_torn = begins.sum(1) > 1
    if can_look_at(real) and is_torn.any():
        raise UnsupportedProblemError("attention_mask: padding amid a sequence; in latents it may be to the left")
    return begins.int().argmax(1).int(), real.sum(1, dtype=torch.int32), is_torn


def _rows(latent: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """Those of a growing cache, copied side by side, with room behind them: (batch, room + PAGE, 576)."""
    keys = latent.shape[2]
    rows = latent.new_empty(len(latent), -(-keys // GROWTH) * GROWTH + PAGE, LATENT + ROTATED)
    rows[:, :keys, :LATENT] = latent[:, 0]
    rows[:, :keys, LATENT:] = rotated[:, 0]
    return rows


@torch.library.custom_op("flashladder::attend_rows", mutates_args=())
def attend_rows(
    q: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, lengths: torch.Tensor, softmax_scale: float | None
) -> torch.Tensor:
    """O of q, (batch, 1, heads, 576), over `lengths` rows of each sequence from its `first` on.

    rows is (batch, room + PAGE, 576). A page begins at each of them, so that one begins where a sequence does.
    """
    batch, room = rows.shape[0], rows.shape[1] - PAGE
    pages = rows.flatten(0, 1).unfold(0, PAGE, 1).mT[:, :, None]
    table = first[:, None] + torch.arange(0, room, PAGE, dtype=torch.int32, device=rows.device)
    table += torch.arange(batch, dtype=torch.int32, device=rows.device)[:, None] * rows.shape[1]
    table.clamp_(max=len(pages) - 1)
    return mla.compute(q, pages, table, lengths, mla.HEAD_DIM_V, softmax_scale, causal=False, sparse=False)[0]


@attend_rows.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return new_o(q, mla.HEAD_DIM_V)
