"""What a command tells a program: with --json it prints one Answer. docs/programs.md has its fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sources import own_line
from flashladder.common.emulator.errors import RaceError
from flashladder.common.emulator.parse.ptx import described_chains
from flashladder.common.errors import BuildError, CheatError, EmulatorError, VerificationError
from flashladder.common.measure.contest import Contest
from flashladder.common.measure.references import Configured
from flashladder.common.measure.statistics import Estimate, median_time
from flashladder.common.measure.timing import Measurement
from flashladder.common.predict.limits.diagnosis import MICROSECONDS, Diagnosis
from flashladder.common.predict.outlook import Outlook
from flashladder.common.problem.check import Check
from flashladder.common.problem.config import Value
from flashladder.common.report import accuracy
from flashladder.common.studies.single import Outcome

FaultKind = Literal["output", "race", "emulator", "cheat", "build", "accuracy", "refused"]
_KINDS: tuple[tuple[type[Exception], FaultKind], ...] = (  # the first that fits
    (RaceError, "race"),
    (EmulatorError, "emulator"),
    (CheatError, "cheat"),
    (VerificationError, "output"),
    (BuildError, "build"),
)


class Part(BaseModel):
    """A part of an answer: nothing that changes, no unknown field."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Place(Part):
    """A line of a kernel."""

    file: str = Field(description="its name, without the folder")
    line: int = Field(description="from 1")


class Fault(Part):
    """Something that is wrong."""

    kind: FaultKind = Field(
        description="output: not the exact answer, or written outside; race; emulator: another fault that the emulator "
        "names; cheat: a timed call did not do the work; build: not compiled, or it spills where it may not; "
        "accuracy: beyond a bar; refused: a problem, a configuration or a device that does not go"
    )
    message: str = Field(description="what a person is told")
    places: tuple[Place, ...] = Field(
        default=(), description="lines that it names: of a race both accesses, the later one first"
    )


class Time(Part):
    """How long a kernel takes."""

    value: float = Field(description="the median over rounds, or the prediction, which ranks kernels")
    low: float | None = Field(
        default=None,
        description="of the 95 % interval; predicted: of what kernels so predicted took on an H200, mostly longer",
    )
    high: float | None = Field(default=None, description="the other end")
    unit: Literal["us", "cycles"] = Field(description="us of a run; cycles of an SM for a pass through the main loop")
    basis: Literal["measured", "predicted"] = Field(description="timed, or by the cost model")
    gpu: str = Field(description="where, or for which GPU")
    problem: str = Field(default="", description="of which problem, where it is not the one that was run")


class Ratio(Part):
    """A kernel beside another one."""

    to: str = Field(description="the baseline")
    value: float = Field(description="the baseline's time / this one's: above 1 is faster")
    low: float = Field(description="of the 95 % interval")
    high: float = Field(description="the other end")
    verdict: Literal["faster", "slower", "tied", "unclear"] = Field(description="what noise allows to say")


class Limit(Part):
    """Something that takes time."""

    name: str = Field(description="of common/catalog/limiters.py")
    gain: float | None = Field(description="by how much it would be faster without: 0.1 is 10 %; null: without bound")
    places: tuple[Place, ...] = Field(description="the lines that cost most of it")
    ideas: tuple[str, ...] = Field(description="later rungs whose idea is against it")


class Errors(Part):
    """How exact a kernel is on one family of inputs."""

    family: str = Field(description="of inputs")
    dtype: str = Field(description="bf16 or fp16")
    keys: int = Field(description="how many")
    gradient: str | None = Field(default=None, description="dq, dk or dv, whose errors they are; null: O")
    rms: float = Field(description="of the errors")
    of_bar: float | None = Field(description="the largest error, as a part of what its bar allows")


class Goal(Part):
    """Of an exercise."""

    figure: str = Field(description="what has to become smaller")
    start: int = Field(description="its value at the start")
    bound: int = Field(description="the most that it may be")
    own: int | None = Field(description="that of the kernel; null where it did not run to its end")
    reached: bool = Field(description="own is at most bound")


class Kernel(Part):
    """What is known of one kernel on one problem."""

    name: str = Field(description="a rung by its number or name, a reference, or an official kernel")
    config: dict[str, Value] = Field(default={}, description="its compile-time parameters, all of them")
    problem: str = Field(default="", description="what was run")
    device: str = Field(default="", description="where it ran")
    right: bool | None = Field(
        None, description="its output was checked; null: it did not run, so time is a prediction"
    )
    max_error: float | None = Field(default=None, description="of the output that is nearest to its tolerance")
    tolerance: float | None = Field(default=None, description="of that output")
    unseeing: int | None = Field(
        default=None, description="run --mask: rows that see no key, over all heads and sequences"
    )
    registers: int | None = Field(default=None, description="of a thread")
    spill_bytes: int | None = Field(
        default=None, description="of local memory that a thread uses: 0 where nothing spills"
    )
    time: Time | None = Field(default=None, description="null where there is none")
    ratio: Ratio | None = Field(default=None, description="to a baseline of the same run")
    limits: tuple[Limit, ...] = Field(default=(), description="explain: the costliest first")
    errors: tuple[Errors, ...] = Field(default=(), description="accuracy: of each family")
    goal: Goal | None = Field(default=None, description="exercise")


class Answer(Part):
    """All that a command found."""

    schema_version: int = Field(default=1, description="grows when a field changes its meaning")
    command: str = Field(description="run, bench, explain, search, accuracy or exercise")
    right: bool = Field(description="nothing is wrong")
    reason: str = Field(description="the first line of the first fault; empty where nothing is wrong")
    faults: tuple[Fault, ...] = Field(description="all that is wrong")
    kernels: tuple[Kernel, ...] = Field(description="what was found; search: the best first")


class Findings:
    """Gathers what an answer says."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.faults: list[Fault] = []

    def add(self, kernels: Iterable[Kernel], faults: Iterable[Fault] = ()) -> None:
        self.kernels += kernels
        self.faults += faults

    def fail(self, error: Exception) -> None:
        """A fault that ended the command."""
        self.faults.append(fault_of(error))

    def answer(self, command: str) -> Answer:
        reason = self.faults[0].message.partition("\n")[0] if self.faults else ""
        return Answer(
            command=command,
            right=not self.faults,
            reason=reason,
            faults=tuple(self.faults),
            kernels=tuple(self.kernels),
        )


def fault_of(error: Exception) -> Fault:
    """What an error says, and the lines of kernels that it names."""
    kinds: list[FaultKind] = [*(kind for known, kind in _KINDS if isinstance(error, known)), "refused"]
    places = (own_line(chain) for chain in described_chains(str(error)))
    return Fault(kind=kinds[0], message=str(error), places=tuple(Place(file=file, line=line) for file, line in places))


def faults_of(name: str, check: Check) -> list[Fault]:
    """What is wrong with an output."""
    return [Fault(kind="output", message=f"{name}: {fault}") for fault in check.faults]


def of_outcome(name: str, found: Outcome) -> Kernel:
    """Of `flashladder run`."""
    return _kernel(
        name,
        found.kernel,
        **_checked(found.problem.name, found.device, found.check),
        unseeing=found.unseeing,
        time=_predicted(found.predicted) if found.predicted else None,
        **(_timed(found.measurement, found.kernel.version, found.device) if found.measurement else {}),
    )


def of_contest(found: Contest, kernels: Mapping[str, Artifact | Configured], device: str) -> Iterator[Kernel]:
    """Of `flashladder bench`: our kernels, then the official ones. `kernels`: what was run, by its label."""
    measurement = found.measurement
    times = {name: _timed(measurement, name, device) for name in measurement.checks} if measurement else {}
    for name, check in found.checks.items():
        judged = _checked(found.problem.name, device, check)
        yield _kernel(name, kernels[name], **judged, **times.pop(name, {}))
    for name, timed in times.items():
        yield Kernel(name=name, problem=found.problem.name, device=device, right=True, **timed)


def of_diagnosis(found: Diagnosis) -> Kernel:
    """Of `flashladder explain`."""
    unit: Literal["us", "cycles"] = "us" if found.unit == MICROSECONDS else "cycles"
    basis: Literal["measured", "predicted"] = "measured" if found.is_measured else "predicted"
    low, high = found.experience or (None, None)
    interval: dict[str, Any] = {"low": low and found.time * low, "high": high and found.time * high}
    return _kernel(
        found.version.address,
        found.code.artifact,
        time=Time(value=found.time, **interval, unit=unit, basis=basis, gpu=found.gpu),
        limits=tuple(
            Limit(
                name=limit.name,
                gain=found.gain(limit) if limit.without > 0 else None,
                places=tuple(Place(file=place[0].rpartition("/")[2], line=place[1]) for place, _ in limit.lines),
                ideas=tuple(rung.address for rung in found.ideas(limit)),
            )
            for limit in found.limits
        ),
    )


def of_accuracy(rows: pd.DataFrame) -> Iterator[Kernel]:
    """Of `flashladder accuracy`: `rows` as accuracy.latest gives them."""
    judged = rows[rows["has"] == accuracy.ERRORS]
    for version, group in judged.groupby("version"):
        errors = [
            Errors(
                family=str(row.family),
                dtype=str(row.dtype),
                keys=int(row.seqlen_k),
                gradient=str(row.gradient) or None,
                rms=float(row.rms_error),
                of_bar=None if pd.isna(row.strain) else float(row.strain),
            )
            for row in group.itertuples()
        ]
        missed = bool((group["verdict"] == accuracy.MISSED).any())
        device = str(group["device"].iloc[-1])
        yield Kernel(name=accuracy.short(str(version)), device=device, right=not missed, errors=tuple(errors))


def _kernel(name: str, kernel: Artifact | Configured, **more: Any) -> Kernel:
    return Kernel(
        name=name, config=kernel.config.as_dict(), **(compiled(kernel) if isinstance(kernel, Artifact) else {}), **more
    )


def compiled(artifact: Artifact) -> dict[str, Any]:
    """What the compiler made of a rung."""
    return {"registers": artifact.registers, "spill_bytes": artifact.local_bytes}


def _checked(problem: str, device: str, check: Check) -> dict[str, Any]:
    error, tolerance = check.max_error, check.tolerance
    return {
        "problem": problem,
        "device": device,
        "right": check.passed,
        "tolerance": tolerance,
        "max_error": error if error < float("inf") else None,
    }


def _timed(measurement: Measurement, name: str, device: str) -> dict[str, Any]:
    """Its time, and its ratio where it is not the baseline."""
    time = median_time(measurement.times(name))
    found: dict[str, Any] = {"time": Time(**_interval(time), unit="us", basis="measured", gpu=device)}
    if name != measurement.baseline:
        ratio = _interval(measurement.ratio(name))
        found["ratio"] = Ratio(to=measurement.baseline, **ratio, verdict=measurement.verdict(name))
    return found


def _interval(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _predicted(found: Outlook) -> Time:
    low, high = found.interval_us or (None, None)
    where, of = found.gpu.title, found.problem.name
    return Time(value=found.time_us, low=low, high=high, unit="us", basis="predicted", gpu=where, problem=of)
