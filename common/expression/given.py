"""Tensors that expressions read, as a command line gives them: NAME=FILE.npy, NAME=0.5, NAME=arange:64:int64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from flashladder.common.errors import ConfigError, instead
from flashladder.common.expression.evaluate import TORCH_DTYPES
from flashladder.common.expression.tree import Declared

FORMS = "NAME=FILE.npy, NAME=NUMBER, or NAME=zeros|ones|arange|random:SIZES[:DTYPE], as image=arange:64:int32"
_MOST = 2**28  # elements of a tensor that is made here


def tensors(words: Sequence[str], seed: int = 0) -> dict[str, torch.Tensor]:
    """By their names, on the CPU; random ones are drawn by the seed. ConfigError for what is none of FORMS."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for word in words:
        name, _, given = word.partition("=")
        if not (name and given):
            raise ConfigError(f"{word} is no tensor: {FORMS}")
        if name in found:
            raise ConfigError(f"{name} is given twice")
        found[name] = _tensor(word, given, generator)
    return found


def declared(found: Mapping[str, torch.Tensor]) -> list[Declared]:
    """Tensors as far as a kernel is compiled for them. ConfigError for a dtype that expressions do not read."""
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    for name, tensor in found.items():
        if tensor.dtype not in names:
            raise ConfigError(f"{name} is {tensor.dtype}; expressions read {', '.join(names.values())}")
    return [Declared(name, names[tensor.dtype], tensor.dim()) for name, tensor in found.items()]


def _tensor(word: str, given: str, generator: torch.Generator) -> torch.Tensor:
    if given.endswith(".npy"):
        return _read(word, given)
    kind, *rest = given.split(":")
    if not rest:
        return _number(word, given)
    if kind not in _MAKE:
        raise ConfigError(f"{word}: no {kind}{instead(kind, _MAKE)}")
    sizes, dtype, *more = *rest, *([] if len(rest) > 1 else ["int32" if kind == "arange" else "fp32"])
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"{word}: no dtype {dtype}{instead(dtype, TORCH_DTYPES)}")
    shape = [int(size) if size.isdecimal() else 0 for size in sizes.split(",")]
    if more or not 0 < math.prod(shape) <= _MOST:
        raise ConfigError(f"{word}: SIZES are whole numbers, 1 or more, between commas, of {_MOST:,} elements in all")
    made = _MAKE[kind](shape, generator)
    wanted = TORCH_DTYPES[dtype]
    return (made if wanted.is_floating_point else made.abs().long()).to(wanted)


def _read(word: str, path: str) -> torch.Tensor:
    """What numpy saved, of whichever byte order; never a pickle."""
    try:
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
    except (ValueError, TypeError, EOFError) as error:
        raise ConfigError(f"{word}: numpy and torch read no tensor there: {error}") from None


def _number(word: str, text: str) -> torch.Tensor:
    """A tensor without dimensions: int64, or fp32 where there is a point."""
    for kind, dtype in ((int, torch.int64), (float, torch.float32)):
        try:
            return torch.tensor(kind(text), dtype=dtype)
        except (ValueError, RuntimeError):  # torch's, of a number beyond 64 bits
            continue
    raise ConfigError(f"{word} is no tensor: {FORMS}")


def _arange(shape: Sequence[int], _: torch.Generator) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def _random(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Standard normal: magnitudes of these, cut to whole numbers, are few, and many are alike."""
    return torch.randn(tuple(shape), generator=generator)


_MAKE: dict[str, Callable[[Sequence[int], torch.Generator], torch.Tensor]] = {
    "zeros": lambda shape, _: torch.zeros(tuple(shape)),
    "ones": lambda shape, _: torch.ones(tuple(shape)),
    "arange": _arange,
    "random": _random,
}
