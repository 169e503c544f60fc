"""Keys of new tokens, written to pages by slots alone, as engines write them before they call attention."""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import caches, gradients, operator, validate
from flashladder.common.api.caches import Cache, Scale
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.problem import DTYPES, Problem

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_descale: Scale = None,
    v_descale: Scale = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
) -> None:
    """Writes keys and values of tokens, (tokens, heads_k, head_dim), to slots of pages, in place, by one kernel.

    k_cache and v_cache are (num_pages, page_size, heads_k, head_dim), of the type of k or torch.float8_e4m3fn, and have
    strides that are multiples of 16 bytes. slot_mapping is (tokens,), int64: slot i is row i % page_size of page i //
    page_size. A token whose slot is none, such as -1, is not written. No two tokens have one slot.

    Numbers are rounded to 8-bit floats by k_descale and v_descale, as flash_attn_with_kvcache has them: (1, heads_k),
    of heads; (1,), or a number, of the whole cache; (num_pages, 1, heads_k, 1), of pages; None: 1. With rotary_cos and
    rotary_sin, (positions, columns / 2), keys are first turned by their `positions`, (tokens,), int64; one beyond the
    last turns as that one. After a first call a CUDA graph may capture it. On a GPU it needs Hopper.

    Raises UnsupportedProblemError for tensors that do not go together, and for caches that share memory with each other
    or with what is written.
    """
    k, v, rotary_cos, rotary_sin = validate.floats(k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    k_cache, v_cache, slot_mapping = validate.tensors(k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    (k, v), tokens = validate.tensors(validate.PACKED, k=k, v=v), k.shape[0]
    gradients.refuse(k, v, k_cache, v_cache)
    fp8 = FP8 if k_cache.dtype == FP8 else None
    table = k_cache.new_empty((1, 1), dtype=torch.int32)  # of one sequence, whose heads all tokens share
    cache = caches.scaled(caches.cache_of(k[None, :1], k_cache, v_cache, table, None, fp8), k_descale, v_descale)
    for name, new in (("k", k), ("v", v)):
        validate.shaped(name, new, (tokens, *k_cache.shape[2:]), k.dtype, k.device)
    numbers = {"slot_mapping": slot_mapping}
    if (rotary_cos is None) != (positions is None) or (rotary_cos is None) != (rotary_sin is None):
        raise UnsupportedProblemError("rotary_cos, rotary_sin and positions are given together, or none of them")
    if positions is not None:
        numbers["positions"] = positions
    for name, found in numbers.items():
        validate.shaped(name, found, (tokens,), torch.int64, k.device)
    interleaved = validate.flag("rotary_interleaved", rotary_interleaved)
    _append(k, v, *cache[:2], *cache[3:], slot_mapping, rotary_cos, rotary_sin, positions, interleaved)


@torch.library.custom_op("flashladder::reshape_and_cache", mutates_args=("k_cache", "v_cache"))
def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
) -> None:
    if k.dtype not in _NAMES:
        raise UnsupportedProblemError(f"k is {k.dtype}; kernels take {listing(_NAMES)}")
    num_pages, page_size, heads, head_dim = k_cache.shape
    options: dict[str, Any] = {"num_pages": max(1, num_pages), "page_size": max(1, page_size)}
    options |= caches.scales_of(k_descale)
    if rotary_cos is not None:
        count, pairs = rotary_cos.shape
        options |= {
            "rotary": True,
            "rotary_dim": 2 * pairs,
            "rotary_positions": count,
            "rotary_interleaved": interleaved,
        }
    sizes: dict[str, Any] = {"batch": max(1, k.shape[0]), "num_heads": max(1, heads), "head_dim": head_dim}
    problem = Problem(operation="append", dtype=_NAMES[k.dtype], seqlen_q=1, **sizes, options=tuple(options.items()))
    tensors: dict[str, torch.Tensor | None] = {"k_new": k[:, None], "v_new": v[:, None]}
    tensors |= {"k_cache": k_cache, "v_cache": v_cache}
    tensors |= {"slot_mapping": slot_mapping, "k_descale": k_descale, "v_descale": v_descale}
    tensors |= {"positions": positions, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    caches.check_apart(Cache(k_cache, v_cache, None), tensors)
    operator.launch(problem, tensors)


@_append.register_fake
def _(*_: Any) -> None:
    return None
