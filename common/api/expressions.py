"""A mask and a score that are expressions, as calls give them: validated, with what they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashladder.common.api import gradients, validate
from flashladder.common.api.options import Modified, Options
from flashladder.common.errors import ExpressionError, UnsupportedProblemError
from flashladder.common.expression import Declared, Mods, bounds
from flashladder.common.expression.band import Band
from flashladder.common.expression.evaluate import TORCH_DTYPES
from flashladder.common.expression.tree import SIZES
from flashladder.common.problem import modified
from flashladder.common.problem.operations.forward import row_slices
from flashladder.common.runtime.launch import PROBLEMS_KEPT

MOST_LETTERS = 4000  # of an expression, as a call gives it: room for any that a person writes
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Named = Mapping[str, torch.Tensor]


def added(options: Options, mask: Any, score: Any, tensors: Named | None, q: torch.Tensor, k: torch.Tensor) -> Modified:
    """What is asked for, with the expressions of a call on q and k, and the tensors that they read.

    ExpressionError for text that is none, UnsupportedProblemError for tensors that kernels do not take.
    """
    gradients.refuse_vmap("attention with a mask or a score by an expression")
    if not isinstance(tensors, (Mapping, type(None))):
        raise UnsupportedProblemError(f"tensors is of type {type(tensors).__name__}; it should be a dict, by names")
    named = {name: _readable(name, tensor, q.device) for name, tensor in (tensors or {}).items()}
    texts = _text("mask", mask), _text("score", score)
    declared = tuple((name, _NAMES[x.dtype], x.dim()) for name, x in named.items())
    asked, names = _asked(*texts, declared)
    read = tuple(named[name].contiguous() for name in names)
    return Modified(**_values(options), mods=asked, read=read)


def options_with(
    options: Options, mask: Any, score: Any, tensors: Named | None, q: torch.Tensor, k: torch.Tensor
) -> Options:
    """What `added` gives, but a mask that is a window alone becomes one: kernels of windows evaluate nothing."""
    found = added(options, mask, score, tensors, q, k)
    if (apart := _window_apart(found.mods)) is None:
        return found
    seen, mods = apart
    left, right = bound(options).within(seen)
    values = {**_values(options), "causal": right == 0, "window_left": left, "window_right": right or None}
    return Modified(**values, mods=mods, read=found.read) if mods else Options(**values)


def _values(options: Options) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


@torch.compiler.assume_constant_result
def _window_apart(asked: str) -> tuple[Band, str] | None:
    return Mods.parse(asked).window_apart


def _text(name: str, value: Any) -> str:
    """An expression; none is empty."""
    if value is None:
        return ""
    if not (found := validate.text(name, value)).strip():
        raise ExpressionError(f"{name} is empty; leave it out")
    if len(found) > MOST_LETTERS:
        raise ExpressionError(f"{name} has {len(found):,} letters; an expression has at most {MOST_LETTERS:,}")
    return found


@torch.compiler.assume_constant_result
def _asked(*given: Any) -> tuple[str, tuple[str, ...]]:
    """What `Modified` has, and the names of the tensors that are read, in their order."""
    mods = _mods(*given)
    return mods.asked, tuple(tensor.name for tensor in mods.tensors)


@lru_cache(PROBLEMS_KEPT)
def _mods(mask: str, score: str, declared: tuple[tuple[str, str, int], ...]) -> Mods:
    return Mods.of(mask, score, (Declared(*each) for each in declared))


class Sizes(NamedTuple):
    """Of sequences that are all alike: these, by their numbers."""

    first: int
    last: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int


def bound(options: Options) -> Band:
    """What a causal mask and a window show."""
    return Band(options.window_left, 0 if options.causal else options.window_right)


def check(options: Modified, q: torch.Tensor, k: torch.Tensor) -> None:
    """ExpressionError for an index that leaves its tensor: each, where tensors can be looked at, else one that sizes
    alone tell. Packed sequences were validated before.
    """
    read, shown = options.read, bound(options)
    can_look = all(map(validate.can_look_at, read))
    with torch.device("cpu"):  # whichever is torch's default
        for sizes in _sequences(options, q, k) if read else ():
            if can_look:
                _check_each(Mods.parse(options.mods), read, sizes, shown)
            else:
                _check_sizes(options.mods, tuple(tuple(x.shape) for x in read), sizes, shown)


def _sequences(options: Options, q: torch.Tensor, k: torch.Tensor) -> Iterator[Sizes]:
    """Those that have rows and keys; of packed ones as far as the host knows of them."""
    starts = options.cu_seqlens_q, options.cu_seqlens_k
    heads = q.shape[2]
    if starts[0] is None or starts[1] is None:
        lengths = [(0, q.shape[0] - 1, q.shape[1], k.shape[1])] if q.numel() and k.numel() else []
    else:
        known = [x for x in starts if x is not None and validate.can_look_at(x)]
        both = zip(*(x.diff().tolist() for x in known), strict=True)
        lengths = [(number, number, *each) for number, each in enumerate(both) if all(each)]
    yield from (Sizes(first, last, heads, *each) for first, last, *each in lengths)


@lru_cache(PROBLEMS_KEPT)
def _check_sizes(spelled: str, shapes: tuple[tuple[int, ...], ...], sizes: Sizes, shown: Band) -> None:
    mods = Mods.parse(spelled)
    far = sizes.seqlen_q + sizes.seqlen_k
    left, right = (far if each is None else each for each in shown)
    q, k = bounds.edges(sizes.seqlen_k - sizes.seqlen_q, sizes.seqlen_k, left, right)
    if not len(q):
        return
    sequences, heads = torch.arange(sizes.first, sizes.last + 1), torch.arange(sizes.num_heads)
    places = {"b": sequences[:, None, None], "h": heads[:, None], "q": q, "k": k}
    places |= {name: torch.tensor(getattr(sizes, name)) for name in SIZES}
    extents = {tensor.name: shape for tensor, shape in zip(mods.tensors, shapes, strict=True)}
    for what, tree in mods.trees.items():
        bounds.check(what, mods.sources[what], tree, places, extents)


def _check_each(mods: Mods, read: tuple[torch.Tensor, ...], sizes: Sizes, shown: Band) -> None:
    """By evaluating all."""
    named = {tensor.name: x for tensor, x in zip(mods.tensors, read, strict=True)}
    lengths, key = (sizes.seqlen_q, sizes.seqlen_k), torch.arange(sizes.seqlen_k)
    for rows in row_slices(sizes.seqlen_q, sizes.num_heads * sizes.seqlen_k):
        own = torch.arange(rows.start, rows.stop)[:, None] + sizes.seqlen_k - sizes.seqlen_q
        seen = torch.ones(own.shape[0], sizes.seqlen_k, dtype=torch.bool)
        if shown.left is not None:
            seen &= key >= own - shown.left
        if shown.right is not None:
            seen &= key <= own + shown.right
        for sequence in range(sizes.first, sizes.last + 1):
            scores = torch.zeros(sizes.num_heads, own.shape[0], sizes.seqlen_k)
            modified.modified(mods, named, scores, sequence, rows.start, lengths, seen)


def _readable(name: Any, tensor: Any, device: torch.device) -> torch.Tensor:
    """UnsupportedProblemError for what is no tensor of this device by a name, or has a derivative of forward mode."""
    if not isinstance(name, str):
        raise UnsupportedProblemError(f"tensors has {name!r} for a name, of type {type(name).__name__}; give text")
    found = validate.tensor(f"tensors[{name!r}]", tensor)
    if found.device != device:
        raise UnsupportedProblemError(f"tensors[{name!r}] is on {found.device}, q on {device}; kernels take one device")
    if found.dtype not in _NAMES:
        known = ", ".join(map(str, _NAMES))
        raise UnsupportedProblemError(f"tensors[{name!r}] is {found.dtype}; expressions read {known}")
    if not found.numel():
        raise UnsupportedProblemError(f"tensors[{name!r}] has shape {tuple(found.shape)}, and no element to read")
    gradients.refuse_forward_mode(found, what=f"tensors[{name!r}]")
    return found
