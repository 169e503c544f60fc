"""The ladder in one run: every rung and the field beside it, on one card, in the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from flashladder.common import catalog
from flashladder.common.catalog import Version, winners
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.console import warn
from flashladder.common.errors import ConfigError, DeviceError, ToolchainError
from flashladder.common.measure import baselines, contest
from flashladder.common.measure.entrants import Entrant, ReferenceEntrant, parse
from flashladder.common.measure.references import Configured
from flashladder.common.measure.timing import TimingSettings
from flashladder.common.problem.config import Value
from flashladder.common.problem.problem import Problem, operation_named
from flashladder.common.records import records
from flashladder.common.records.ladder_runs import FIELD, FIXED, OWN, Run
from flashladder.common.records.run_files import RunLog
from flashladder.common.records.schemas import round_times

if TYPE_CHECKING:
    import pandas as pd

Kernels: TypeAlias = "dict[str, Artifact | Configured]"  # of a problem, by label: '02 own', '02 fixed', 'triton'
Key: TypeAlias = "tuple[str, str, str]"  # version, kind, code

TILE = {"block_m", "block_n", "num_warps"}  # a rung without these fields has no fixed configuration
SLOW = "00"  # takes 25 times as long as the others


def problems(dtypes: Iterable[str], lengths: Iterable[int], tokens: int, operation: str) -> Iterator[Problem]:
    """The shapes: so many tokens in each, in batches of a length."""
    kind = operation_named(operation)
    for dtype in dtypes:
        for seqlen in lengths:
            sizes = {**kind.usual, **kind.of_length(seqlen, tokens)}
            yield Problem(**sizes, dtype=dtype, operation=operation)


def entrants(
    versions: Iterable[Version], fixed: Mapping[str, Value], arch: str, gpu: str | None = None
) -> Iterator[Entrant]:
    """Each rung that the GPU can run, in its own configuration and, where it takes it, in the fixed one."""
    for version in versions:
        try:
            version.check_arch(arch)
        except ConfigError as error:
            warn(f"left out: {error}")
            continue
        yield Entrant(f"{version.address} {OWN}", version, {}, tuned_for=gpu)
        values = {name: value for name, value in fixed.items() if name in version.choices}
        if values.keys() >= TILE and _takes(version, values):
            yield Entrant(f"{version.address} {FIXED}", version, values)


def _takes(version: Version, values: dict[str, Value]) -> bool:
    try:
        version.config(**values)
    except ConfigError:
        return False
    return True


def beside(names: Iterable[str], operation: str) -> tuple[list[baselines.Baseline], list[ReferenceEntrant]]:
    """The official kernels, first the one that ratios refer to, and this project's references; what cannot run here is
    left out with a word. ConfigError for another name."""
    official, references = [baselines.official(operation)], []
    for name in dict.fromkeys(names):
        if name in baselines.of(operation):
            official.append(baselines.find(name, operation))
            continue
        try:
            entrant = parse(name, {})
        except (DeviceError, ToolchainError) as error:
            warn(f"left out: {error}")
            continue
        if not isinstance(entrant, ReferenceEntrant):
            raise ConfigError(f"{name} is a rung: it takes part in its place on the ladder, not beside it")
        references.append(entrant)
    return list(dict.fromkeys(official)), references


def without_slow(field: Mapping[Problem, Kernels]) -> dict[Problem, Kernels]:
    """The field with rung 00 at the shortest length alone, unless it is all there is: a launch of it takes as long as
    a round of the others."""
    shortest = min((problem.seqlen_q for problem in field), default=0)
    found = {}
    for problem, kernels in field.items():
        fast = {label: kernel for label, kernel in kernels.items() if not label.startswith(f"{SLOW} ")}
        found[problem] = kernels if problem.seqlen_q == shortest or not fast else fast
    return found


def missing(field: Mapping[Problem, Kernels], run: Run) -> dict[Problem, Kernels] | None:
    """What of the field a run that was interrupted has not timed yet.

    None where it cannot be taken up: another kind of card, commit or driver, other kernels, heat, or rounds that were
    not kept. The lengths that are missing may be of another card: ratios and steps are of one length's rounds.
    """
    place = records.of_place(on_gpu=True)
    last = run.rows.iloc[-1]
    is_same_place = all((last[name] or None) == place[name] for name in ("commit", "torch", "driver", "device"))
    if not run.keeps_rounds or run.is_hot or not is_same_place:
        return None
    timed = {problem: _timed(run.rows, problem) for problem in field}
    wanted = {problem: {_key(*item) for item in kernels.items()} for problem, kernels in field.items()}
    if any(timed[problem] - wanted[problem] for problem in field):
        return None
    return {problem: kernels for problem, kernels in field.items() if timed[problem] != wanted[problem]}


def _timed(rows: pd.DataFrame, problem: Problem) -> set[Key]:
    """The kernels of a run's rows of a problem; other people's, which have no code, are not among them."""
    same = [rows[name] == getattr(problem, name) for name in ("dtype", "batch", "num_heads", "seqlen_q", "seqlen_k")]
    found = rows[np.logical_and.reduce(same) & (rows["code"] != "")]
    return set(found[["version", "kind", "code"]].itertuples(index=False, name=None))


def _key(label: str, kernel: Artifact | Configured) -> Key:
    return kernel.version, _kind(label), _code(kernel)


@dataclass(frozen=True)
class LadderTimer:
    """Times the shapes of one run."""

    log: RunLog
    run: str
    official: Sequence[baselines.Baseline]
    settings: TimingSettings
    gpu: str | None  # whose winners are the rungs' own configurations
    folder: Path | None = None  # of the samples; by default that of this repository's results

    def measure(self, problem: Problem, kernels: Kernels) -> contest.Contest:
        """Time one shape and log it. Entries that are the same machine code are timed once, and have a row each.

        DeviceError without the kernel that ratios refer to.
        """
        first: dict[str, str] = {}
        for label, kernel in kernels.items():
            first.setdefault(_code(kernel), label)
        result = contest.hold(
            problem, {label: kernels[label] for label in first.values()}, self.official, self.settings
        )
        if reason := result.absent.get(self.official[0].name):
            raise DeviceError(f"there is nothing to compare with: {reason}")
        found = records.of_contest(result, self.run, kernels)
        others = [baseline.name for baseline in self.official[1:] if baseline.name in found]
        rows = [found[name] | _rounds(result, name) | {"kind": FIELD} for name in others]
        for label, kernel in kernels.items():
            name = first[_code(kernel)]
            row = found[name] | records.of_kernel(kernel) | _rounds(result, name)
            rows.append(row | {"kind": _kind(label), "chosen_by": self._chosen_by(label, kernel, problem)})
        self.log.append(rows)
        if result.measurement:
            records.samples(self.run, self.folder).append(records.of_samples(result.measurement, self.run, problem))
        return result

    def _chosen_by(self, label: str, kernel: Artifact | Configured, problem: Problem) -> str | None:
        """Where a rung's own configuration is from."""
        if _kind(label) != OWN:
            return None
        winner = winners.config(catalog.find(label.split()[0]), self.gpu, problem) if self.gpu else None
        return "tuner" if winner == kernel.config else "default"


def _rounds(result: contest.Contest, name: str) -> records.Row:
    """The times of a contender's rounds, where it was timed."""
    if result.measurement is None or name not in result.measurement.checks:
        return {}
    return {"round_us": round_times(result.measurement.times(name))}


def _code(kernel: Artifact | Configured) -> str:
    return kernel.code if isinstance(kernel, Artifact) else kernel.key


def _kind(label: str) -> str:
    return label.partition(" ")[2] or FIELD
