"""What public functions were given: arguments of the right types, or a refusal that names the argument and what works.

Ranges and shapes are not looked at here: those who use an argument do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.operations.forward import ALL_KEYS

_SYMBOLS = (torch.SymInt, torch.SymFloat)  # of torch.compile, which must not ask for their values


def tensors(**given: object) -> None:
    """UnsupportedProblemError for what is no tensor, or one of tensors of several lengths."""
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise _refusal(name, value, "a torch.Tensor")
        if value.is_nested:
            raise UnsupportedProblemError(
                f"{name} is a nested tensor; packed_attention takes its values() and, as cu_seqlens, its offsets()"
            )


def contiguous_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors as flash-attn takes them: copied where the last dimension is not contiguous."""
    return tuple(x if x.stride()[-1:] in ((1,), ()) else x.contiguous() for x in tensors)


def flags(**given: object) -> None:
    """UnsupportedProblemError for what is neither True nor False."""
    for name, value in given.items():
        if value is not True and value is not False:
            raise _refusal(name, value, "True or False")


def text(**given: object) -> None:
    """UnsupportedProblemError for what is no text."""
    for name, value in given.items():
        if not isinstance(value, str):
            raise _refusal(name, value, f'text, such as "{value}"' if type(value) is int else "text")


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


def whole(name: str, value: Any) -> int:
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
        raise _refusal(name, value, "a whole number") from None


def rows(name: str, value: Any) -> int:
    """A number of rows, as kernels count them: one beyond all that there can be is made that."""
    count = whole(name, value)
    if count < 0:
        raise UnsupportedProblemError(f"{name}={count}: must be at least 0")
    return min(count, ALL_KEYS)


def _refusal(name: str, value: object, wanted: str) -> UnsupportedProblemError:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
    shown = f"={value!r}" if isinstance(value, (str, int, float, bool, type(None))) else ""
    return UnsupportedProblemError(f"{name}{shown} is of type {module}{kind.__qualname__}; it should be {wanted}")
