"""The folder of what a program adopted: FLASHLADDER_ADOPTED names it, and its winners and kernels go before others.

problems.json     what the program asks for (demand.py)
guard.json        the gains that were measured, and where
tuned/GPU.yaml    winners, as configs/tuned has them
kernels/          their kernels, for a machine without a compiler
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashladder.common.catalog import Card, choice, winners
from flashladder.common.compiler import prebuilt
from flashladder.common.compiler.compile import BuildRequest
from flashladder.common.errors import ConfigError, ResultsError, UnsupportedProblemError
from flashladder.common.problem.config import GpuDescription
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.runtime.target import Target
from flashladder.tuner.adopt.demand import Demand, read_json, write_json
from flashladder.tuner.adopt.gains import Gain

PROBLEMS, GUARD, TUNED = "problems.json", "guard.json", "tuned"
FORMAT = 1
BAND = 0.02  # of a ratio: what another day on the same card may take of it


@dataclass(frozen=True)
class Guard:
    """The gains that were measured, and where."""

    version: str  # as `attention` takes it
    gpu: str
    arch: str
    place: Mapping[str, Any]  # records.of_place
    gains: tuple[Gain, ...]


def folder_for(path: Path) -> Path:
    """The folder, which is made where it is not there; ConfigError where something else is in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        strange = {each.name for each in path.iterdir()} - {PROBLEMS, GUARD, TUNED, prebuilt.KERNELS}
    except OSError as error:
        raise ResultsError(f"cannot make the folder {path}: {error.strerror or error}") from error
    if strange:
        raise ConfigError(f"{path} holds {', '.join(sorted(strange))}, which is no export: name a new folder")
    return path.absolute()


def save(folder: Path, version: str, place: Target, demand: Demand, gains: Sequence[Gain]) -> int:
    """Adds to a folder with winners their kernels and the guard; how many kernels."""
    wanted = kernels(folder, version, place.arch, place.gpu, demand.calls)
    prebuilt.compile_into(folder / prebuilt.KERNELS, wanted)
    save_guard(folder, version, place, gains)
    return len(wanted)


def save_guard(folder: Path, version: str, place: Target, gains: Sequence[Gain]) -> None:
    """Writes what was measured, here and now."""
    content = {
        "format": FORMAT,
        "version": version,
        "gpu": place.gpu.name,
        "arch": place.arch,
        "place": records.of_place(on_gpu=place.on_gpu),
        "gains": [gain.as_json() for gain in gains],
    }
    write_json(folder / GUARD, content)


def load_guard(folder: Path) -> Guard:
    """What was saved; ResultsError where it is missing or damaged."""
    content = read_json(folder / GUARD)
    try:
        if content["format"] != FORMAT:
            raise ResultsError(f"{folder / GUARD} has format {content['format']}, this program reads {FORMAT}")
        gains = tuple(Gain.of_json(each) for each in content["gains"])
        names = {name: str(content[name]) for name in ("version", "gpu", "arch")}
        return Guard(**names, place=dict(content["place"]), gains=gains)
    except (KeyError, TypeError, ValueError, UnsupportedProblemError) as error:
        raise ResultsError(f"{folder / GUARD} is damaged: {type(error).__name__} {error}. Adopt again") from None


def kernels(
    folder: Path, version: str, arch: str, gpu: GpuDescription, problems: Iterable[Problem]
) -> list[BuildRequest]:
    """What `attention` makes ready for the problems with a folder's winners, with the log-sum-exp and without."""
    of_each_length = [each for problem in problems for each in winners.of_each_length(problem)]
    asked = [replace(problem, lse=lse) for problem in of_each_length for lse in (False, True)]
    chosen = (choice(each, Card(arch, gpu), version, folder) for each in asked)
    return list(dict.fromkeys(BuildRequest(*each, arch, lines=False) for each in chosen))


def faults(folder: Path, guard: Guard, demand: Demand, gpu: GpuDescription) -> list[str]:
    """What is wrong with an export, as far as it shows without a GPU, in sentences."""
    wrong = []
    for winner in winners.of_gpu(guard.gpu, folder):
        try:
            winners.standing(winner)
        except ConfigError as error:
            wrong.append(f"the winner of {winner.version} for {winner.kind} does not stand any more: {error}")
    wanted = kernels(folder, guard.version, guard.arch, gpu, demand.calls)
    if missing := prebuilt.missing(folder / prebuilt.KERNELS, wanted):
        wrong.append(f"{len(missing)} of {len(wanted)} kernels are damaged, or of other sources: adopt again")
    return wrong


def regressions(then: Guard, now: Sequence[Gain]) -> list[str]:
    """What is slower than it was, beyond both intervals and BAND, in sentences."""
    by_problem = {gain.problem: gain for gain in now}
    wrong = []
    for was in then.gains:
        gain = by_problem.get(was.problem)
        if gain is None or gain.baseline != was.baseline:
            wrong.append(f"{was.problem.name}: it was {was.ratio} to {was.baseline}, which could not be timed now")
            continue
        compared = [("the rung's default", was.to_default, gain.to_default)]
        if was.has_official:
            compared.insert(0, (was.baseline, was.ratio, gain.ratio))
        for other, before, after in compared:
            if after.high < (1 - BAND) * before.low:
                wrong.append(f"{was.problem.name}: to {other} it was {before}, and is {after}")
    return wrong
