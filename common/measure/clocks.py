"""The clocks by which kernels are timed. Code of a reference runs in this process, and could replace them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flashladder.common.errors import CheatError

_CLOCKS: tuple[tuple[Any, str], ...] = (
    (time, "perf_counter"),
    *((torch.cuda, name) for name in ("synchronize", "_sleep", "Event")),
    *((torch.cuda.Event, name) for name in ("record", "query", "synchronize", "elapsed_time")),
)


@contextmanager
def kept(name: str) -> Iterator[None]:
    """What runs within leaves the clocks as they are; otherwise they are put back, and CheatError names who ran."""
    before = [getattr(owner, clock) for owner, clock in _CLOCKS]
    yield
    if replaced := [place for place, was in zip(_CLOCKS, before, strict=True) if getattr(*place) is not was]:
        for (owner, clock), was in zip(_CLOCKS, before, strict=True):
            setattr(owner, clock, was)
        listed = ", ".join(f"{owner.__name__}.{clock}" for owner, clock in replaced)
        raise CheatError(f"{name} replaced {listed}, by which it is timed")
