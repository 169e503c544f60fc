"""The instructions, one module a family; importing this package registers them all."""

from . import (
    bits,
    bulk,
    clusters,
    control,
    convert,
    floats,
    halves,
    integers,
    mbarriers,
    memory,
    mma,
    moves,
    sync,
    warpwide,
    wgmma,
)
from .registry import Op, lookup

__all__ = [
    "Op",
    "bits",
    "bulk",
    "clusters",
    "control",
    "convert",
    "floats",
    "halves",
    "integers",
    "lookup",
    "mbarriers",
    "memory",
    "mma",
    "moves",
    "sync",
    "warpwide",
    "wgmma",
]
