"""Whether an export still stands: its winners, its kernels, and on its GPU what was gained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flashladder.common.catalog import Card
from flashladder.common.errors import DeviceError
from flashladder.common.measure.timing import TimingSettings
from flashladder.common.problem.config import gpu_names
from flashladder.common.runtime import target
from flashladder.tuner.adopt import export, gains
from flashladder.tuner.adopt.demand import Demand, chooser, refusal
from flashladder.tuner.adopt.gains import Gain


@dataclass(frozen=True)
class Standing:
    """What was found; without a GPU no gains were measured."""

    on_gpu: bool
    gains: tuple[Gain, ...]
    timed: int  # problems that were to be timed
    left_out: tuple[str, ...]
    faults: tuple[str, ...]  # that are against it, in sentences


def examine(folder: Path) -> Standing:
    """Measures an export again, on a GPU like that of the export. DeviceError on another one."""
    guard, demand = export.load_guard(folder), Demand.load(folder / export.PROBLEMS)
    place = target.resolve("auto", guard.gpu if guard.gpu in gpu_names() else None)
    choose = chooser(Card(guard.arch, replace(place.gpu, name=guard.gpu)), guard.version, folder)
    demand = demand.only(partial(refusal, choose))
    wrong = export.faults(folder, guard, demand, place.gpu)
    if not place.on_gpu:
        return Standing(False, (), 0, (), tuple(wrong))
    if place.gpu.name != guard.gpu:
        raise DeviceError(f"the GPU here is {place.gpu.name}; {folder} was measured on {guard.gpu}")
    alike = demand.alike(place.gpu)[: gains.TIMED]
    now, left_out = gains.measure(alike, choose, place, folder.absolute(), TimingSettings("hot"))
    faults = (*wrong, *export.regressions(guard, now))
    return Standing(True, tuple(now), len(alike), tuple(left_out), faults)
