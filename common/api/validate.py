"""Arguments of public functions, each as kernels take it; or a refusal that names the argument and what works."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashladder.common.api import gradients
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.operations.forward import ALL_KEYS

Window = tuple[int | None, int | None]  # keys to the left and to the right of a row's own, None: all
OPEN: Window = (None, None)
ALL = (-1, -1)  # the same, as flash-attn says it
BATCH, PACKED = "(batch, seqlen, heads, head_dim)", "(total, heads, head_dim)"
_SYMBOLS = (torch.SymInt, torch.SymFloat)  # of torch.compile, which must not ask for their values
MAX_SINK = 2.3e38  # in magnitude: log2(e) times more is near the end of fp32
_SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensor(name: str, value: object) -> torch.Tensor:
    """UnsupportedProblemError for what is no tensor, or one of tensors of several lengths."""
    if not isinstance(value, torch.Tensor):
        raise _refusal(name, value, "a torch.Tensor")
    if value.is_nested:
        raise UnsupportedProblemError(
            f"{name} is a nested tensor; packed_attention takes its values() and, as cu_seqlens, its offsets()"
        )
    return value


def tensors(layout: str = "", /, **values: object) -> tuple[torch.Tensor, ...]:
    """Several ones, in their order, of as many dimensions as a layout names."""
    found = tuple([tensor(name, value) for name, value in values.items()])
    count = layout.count(",") + 1
    for name, x in zip(values, found, strict=True) if layout else ():
        if x.dim() != count:
            raise misshapen(name, x, layout)
    return found


def inputs(layout: str, q: object, k: object, v: object) -> tuple[torch.Tensor, ...]:
    """Q, K and V, of such dimensions, that go together, as torch's own attention takes them under torch.autocast."""
    found = autocast(*tensors(layout, q=q, k=k, v=v))
    go_together(*found)
    return found


def floats(q: object, **others: object) -> tuple[Any, ...]:
    """Q, and tensors that may be left out, as torch's own attention takes them under torch.autocast."""
    there = {"q": q} | {name: value for name, value in others.items() if value is not None}
    cast = dict(zip(there, autocast(*tensors(**there)), strict=True))
    return tuple([cast.get(name) for name in ("q", *others)])


def go_together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """UnsupportedProblemError for shapes (..., heads, head_dim) that do not, also where they are empty."""
    if not (q.shape[-1] and v.shape[-1]):
        raise UnsupportedProblemError("head_dim=0: must be at least 1")
    wanted_k, wanted_v = (*q.shape[:-3], *k.shape[-3:-1], q.shape[-1]), (*k.shape[:-1], v.shape[-1])
    for name, x, wanted in (("k", k, wanted_k), ("v", v, wanted_v)):
        if differ(x.shape, wanted):
            raise UnsupportedProblemError(
                f"{name} is {tuple(x.shape)} {x.dtype}; with the other tensors it is {wanted} {q.dtype}"
            )
    if (q.shape[-2] == 0) != (k.shape[-2] == 0):
        raise UnsupportedProblemError(f"q has {q.shape[-2]} heads, k {k.shape[-2]}: both have some, or none has")


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Those of a call, of which the first are as they are unless one is of fp32: then, under torch.autocast, all but
    those of fp64 are of its type, as torch's own attention takes them.
    """
    device = tensors[0].device.type
    if not any(x.dtype == torch.float32 for x in tensors) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def misshapen(name: str, x: torch.Tensor, layout: str) -> UnsupportedProblemError:
    """What a tensor that has not the dimensions of a layout is refused with."""
    instead = "packed, it is" if layout == PACKED else "it should be"
    return UnsupportedProblemError(f"{name} has shape {tuple(x.shape)}; {instead} {layout}")


def surely(condition: Any) -> bool:
    """Whether it holds, as far as is known: torch.compile and torch.export learn some sizes only when a program runs.

    Operators look at those then, and refuse what is wrong.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes long to import

    return guard_or_false(condition)


def differ(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes surely are not the same."""
    if not torch.compiler.is_compiling():
        return tuple(shape) != tuple(other)
    if len(shape) != len(other):
        return True
    for a, b in zip(shape, other, strict=True):  # noqa: SIM110 - not every torch traces a generator here
        if surely(a != b):
            return True
    return False


def like(
    name: str, value: object, fits: Callable[[torch.Size], bool], dtype: torch.dtype, device: torch.device, wanted: str
) -> torch.Tensor:
    """A tensor of this dtype on this device, whose shape `fits`: it is as `wanted` says."""
    found = tensor(name, value)
    if not fits(found.shape) or (found.dtype, found.device) != (dtype, device):
        raise UnsupportedProblemError(
            f"{name} is {tuple(found.shape)} {found.dtype} on {found.device}; {wanted} {dtype} on {device}"
        )
    return found


def shaped(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same of one shape."""
    return like(name, value, lambda given: not differ(given, shape), dtype, device, f"it should be {shape}")


def flag(name: str, value: object) -> bool:
    """UnsupportedProblemError for what is neither True nor False."""
    if value is not True and value is not False:
        raise _refusal(name, value, "True or False")
    return value


def text(name: str, value: object) -> str:
    """UnsupportedProblemError for what is no text."""
    if not isinstance(value, str):
        raise _refusal(name, value, f'text, such as "{value}"' if type(value) is int else "text")
    return value


def number(name: str, value: Any) -> float:
    """A number of Python, NumPy or torch as a float, True as 1.0, as torch takes it; UnsupportedProblemError for
    anything else.
    """
    if type(value) is float:
        return value
    if isinstance(value, _SYMBOLS):
        return torch.sym_float(value)
    try:
        value_of = value.item() if hasattr(value, "item") else value  # of which text and complex numbers are no floats
        return float(value_of if isinstance(value_of, int) else value_of.__float__())
    except OverflowError:
        raise UnsupportedProblemError(f"{name} is larger than a floating-point number can be") from None
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise _refusal(name, value, "a number") from None


def scale(softmax_scale: Any) -> float | None:
    """None stands for the default."""
    return None if softmax_scale is None else number("softmax_scale", softmax_scale)


def softcap(value: Any) -> float:
    """As flash-attn has it: none is 0 here, and 0 or less there."""
    found = number("softcap", value)
    return 0.0 if found <= 0 else found


def probability(name: str, value: Any) -> float:
    """A number in [0, 1)."""
    if not 0 <= (found := number(name, value)) < 1:
        raise UnsupportedProblemError(f"{name}={value}: must be at least 0 and less than 1")
    return found


def whole(name: str, value: Any, wanted: str = "a whole number") -> int:
    """A whole number of Python, NumPy or torch as an int; UnsupportedProblemError for anything else, and for True and
    False.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise _refusal(name, value, wanted) from None


def rows(name: str, value: Any) -> int:
    """A number of rows, as kernels count them: one beyond all that there can be is made that."""
    count = whole(name, value)
    if surely(count < 0):
        raise UnsupportedProblemError(f"{name}={count}: must be at least 0")
    return min(count, ALL_KEYS)


def pair(name: str, value: Any, everything: int | None) -> tuple[Any, Any]:
    """(left, right) of a window, where `everything` stands for all keys; UnsupportedProblemError for what is none.

    A tensor is read, which waits for the GPU that it may be on.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        if not isinstance(value, (tuple, list)):
            raise ValueError
        left, right = (each if each is everything else whole(name, each) for each in value)
    except (ValueError, UnsupportedProblemError):
        raise UnsupportedProblemError(
            f"{name}={value!r}: it should be (left, right), each a number of keys, or {everything} for all"
        ) from None
    return left, right


def is_same(value: object, usual: object) -> bool:
    """Whether it is the tuple of most calls, which come often. torch 2.11 does not trace that: False under compile."""
    return not torch.compiler.is_compiling() and value is usual


def window(value: Window, causal: bool = False) -> Window:
    """A window as kernels take it: under a causal mask nobody sees a key to the right. UnsupportedProblemError for what
    is none.
    """
    if is_same(value, OPEN):
        return OPEN
    left, right = (None if each is None else rows("window", each) for each in pair("window", value, None))
    return left, None if causal else right


def mask(causal: bool, window_size: tuple[int, int] | torch.Tensor, seqlen_k: int) -> tuple[bool, Window]:
    """`causal` and the window of what flash-attn is asked for, whose bounds are none from seqlen_k on.

    None to the right is causal.
    """
    if is_same(window_size, ALL):
        return causal, OPEN
    bounds = pair("window_size", window_size, -1)
    left, right = (None if surely(bound < 0) or surely(bound >= seqlen_k) else bound for bound in bounds)
    is_causal = causal or (right is not None and surely(right == 0))
    return (True, (left, None)) if is_causal else (False, (left, right))


def slopes(alibi_slopes: object, device: torch.device, batch: int, heads: int) -> torch.Tensor:
    """ALiBi's slopes as kernels take them, one for each head of each of `batch` sequences of q, contiguous.

    UnsupportedProblemError for what are no slopes of such a q, on this device.
    """
    found = tensor("alibi_slopes", alibi_slopes)
    shape = tuple(found.shape)
    if (differ(shape, (heads,)) and differ(shape, (batch, heads))) or found.dtype != torch.float32:
        raise UnsupportedProblemError(
            f"alibi_slopes is {shape} {found.dtype}; with q it is ({heads},) or ({batch}, {heads}) torch.float32"
        )
    _require_one_device("alibi_slopes", found, device)
    gradients.refuse(found, what="alibi_slopes")
    return found.expand(batch, heads).contiguous()


def sinks(value: object, device: torch.device, heads: int, name: str = "sinks") -> torch.Tensor:
    """Attention sinks as kernels take them, one for each head of q, in fp32, contiguous.

    UnsupportedProblemError for what are no sinks of such a q, on this device.
    """
    found = tensor(name, value)
    if (shape := tuple(found.shape)) != (heads,) or found.dtype not in _SINK_DTYPES:
        raise UnsupportedProblemError(
            f"{name} is {shape} {found.dtype}; with q it is ({heads},) torch.float32, torch.bfloat16 or torch.float16"
        )
    _require_one_device(name, found, device)
    gradients.refuse_forward_mode(found, what=name)
    wide = found.float()
    if can_look_at(found) and (beyond := wide[wide.isfinite() & (wide.abs() > MAX_SINK)]).numel():
        raise UnsupportedProblemError(
            f"{name} has {beyond[0]:.2g}: kernels hold them in fp32 by powers of 2, which takes up to {MAX_SINK:.2g}"
        )
    return wide.contiguous()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it lies somewhere: while torch compiles, tensors do not, and those of other classes may not."""
    return not (tensor.is_meta or torch.compiler.is_compiling()) and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def can_look_at(tensor: torch.Tensor) -> bool:
    """Whether its values can be read without waiting for a GPU."""
    return has_memory(tensor) and not tensor.is_cuda


def _require_one_device(name: str, found: torch.Tensor, device: torch.device) -> None:
    if found.device != device:
        raise UnsupportedProblemError(f"{name} on {found.device}, q on {device}; kernels take one device")


def _refusal(name: str, value: object, wanted: str) -> UnsupportedProblemError:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
    shown = f"={value!r}" if isinstance(value, (str, int, float, bool, type(None))) else ""
    return UnsupportedProblemError(f"{name}{shown} is of type {module}{kind.__qualname__}; it should be {wanted}")
