"""What each experiment runs: which kernels, in which configurations, on which problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.errors import ConfigError, unknown
from flashladder.common.measure.entrants import Entrant

FA1 = "FlashAttention-1"
FA2 = "FlashAttention-2"
BLOCKS = ("block_m", "block_n", "num_warps")


@dataclass(frozen=True)
class Experiment:
    """A sweep. On a GPU its problems have 16 heads, and a batch by which batch x seqlen = 16384; emulated ones, one."""

    name: str
    title: str
    text: str  # what its picture shows
    entrants: Callable[[Sequence[Version]], list[Entrant]]  # of the chosen rungs
    rungs: tuple[str, ...]  # chosen unless the user chooses others
    lengths: tuple[int, ...] = ()  # none: it is for the emulator alone
    emulated_lengths: tuple[int, ...] = (256,)
    dtypes: tuple[str, ...] = ("bf16",)
    baselines: tuple[str, ...] = ("fa2",)
    memory: bool = False  # whether memory is measured too


def _own(rungs: Sequence[Version]) -> list[Entrant]:
    """Each rung in its default configuration."""
    return [Entrant(version.address, version, {}) for version in rungs]


def _blocks(rungs: Sequence[Version]) -> list[Entrant]:
    """Each rung with every tile and number of warps that it takes, the other fields at their defaults."""
    entrants = []
    for version in rungs:
        swept = [name for name in BLOCKS if name in version.choices]
        for values in itertools.product(*(version.choices[name].values for name in swept)):
            chosen = dict(zip(swept, values, strict=True))
            try:
                version.config(**chosen)
            except ConfigError:
                continue  # a combination that breaks a rule
            label = ",".join(f"{name}={value}" for name, value in chosen.items())
            entrants.append(Entrant(f"{version.address}@{label}", version, chosen))
    return entrants


def _orders(_: Sequence[Version]) -> list[Entrant]:
    """Both orders of the loops, in tiles of the same size."""
    return [Entrant(FA1, catalog.find("experiments/fa1_order"), {}), Entrant(FA2, catalog.find("01"), {})]


_ALL = (
    Experiment(
        "blocks",
        "Block sizes",
        "One rung in every tile and number of warps: larger tiles move less and need more registers.",
        _blocks,
        rungs=("16",),
        lengths=(4096,),
    ),
    Experiment(
        "dtypes",
        "Types",
        "bf16 and fp16: rate, and largest error against the exact answer.",
        _own,
        rungs=("01", "02", "07", "16"),
        lengths=(4096,),
        dtypes=("bf16", "fp16"),
    ),
    Experiment(
        "seqlens",
        "Sequence lengths",
        "Time, and memory beyond Q, K and V: what a kernel needs grows with S, what the textbook needs with S².",
        _own,
        rungs=("16",),
        lengths=(512, 1024, 2048, 4096, 8192, 16384),
        emulated_lengths=(128, 256, 512, 1024),
        baselines=("fa2", "math"),
        memory=True,
    ),
    Experiment(
        "loop_order",
        "FlashAttention-1 and FlashAttention-2",
        "Bytes between global memory and the SMs in the two orders of the loops: counted (points), by formula (lines).",
        _orders,
        rungs=(),
        emulated_lengths=(128, 256, 512, 1024),
    ),
)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}


def find(name: str) -> Experiment:
    """The experiment of this name; ConfigError lists those there are."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]
