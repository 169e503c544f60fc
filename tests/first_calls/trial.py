"""A row's calls in a process that made none: the first against further ones, and against the exact answer."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from flashladder.common.runtime import fast_path, ready
from flashladder.tests.first_calls.poison import is_poisoned, poison
from flashladder.tests.first_calls.table import GPU, Row

LATER, BUILT = "C++ from the third call on", "C++ from the first call on, and the last one without"
ON_GPU = (LATER, BUILT)
ON_EMULATOR = ("the emulator",)
CALLS = {LATER: 4, BUILT: 4, ON_EMULATOR[0]: 2}  # in C++ one more than two is the first by a plan that is remembered
UNORDERED = "dq"  # whose sums are in any order, unless the call is deterministic


class Trial(NamedTuple):
    """A row, where it runs, and when C++ is there."""

    row: Row
    device: str
    way: str

    def __str__(self) -> str:
        return f"{self.row.name} ({self.way})"


@dataclass
class Watched:
    """fast_path.cpp, of which it is known whether it did what a call asked for."""

    extension: ModuleType
    did: bool = False

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.extension, name)

        def call(*given: Any) -> Any:
            made = function(*given)
            self.did |= name != "said" and made is not None and made is not False
            return made

        return call


class Call(NamedTuple):
    """What a call wrote, and how it was made."""

    found: dict[str, torch.Tensor]
    how: str


def faults_of(trial: Trial) -> list[str]:
    """What is wrong with the calls of a row, in words; nothing where all are right and alike."""
    row, device, way = trial
    problem, tensors = row.draw(device)
    prepare(way)
    calls = []
    for number in range(1, CALLS[way] + 1):
        _before(number, way)
        poison(device)
        assert is_poisoned(device)
        found = row.function(problem, tensors)
        if device == GPU:
            torch.cuda.synchronize()
        calls.append(Call({name: tensor.detach().clone() for name, tensor in found.items()}, _how()))
    faults = [f"C++ is not there: {fast_path.missing}"] if way == LATER and not fast_path.extension else []
    ordered = getattr(problem, "deterministic", True)
    for name in calls[0].found:
        if name != UNORDERED or ordered:
            faults += differences(name, calls)
    for name, (exact, tolerance) in row.expected(problem, tensors).items():
        if name in calls[0].found:
            faults += errors(name, calls, exact, tolerance)
    return faults


def prepare(way: str) -> None:
    """C++ is watched from when it is there; where it is to come later, no call asks for it."""
    made = fast_path.made
    fast_path.made = lambda: Watched(made())
    if way == LATER:
        fast_path.prepare = lambda: None


def _before(number: int, way: str) -> None:
    if way == LATER and number == CALLS[way] - 1:
        fast_path.load()
    if way == BUILT and number == CALLS[way]:
        fast_path.extension = None
    if fast_path.extension:
        fast_path.extension.did = False


def _how() -> str:
    """Which way a call went, and what stands ready by then."""
    by = "C++" if fast_path.extension and fast_path.extension.did else "Python"
    kernels = dict.fromkeys(f"{each.rung.name} {each.artifact.config.name}" for each in ready.by_kind.values())
    return f"by {by}; ready: {', '.join(kernels) or 'nothing'}"


def differences(name: str, calls: list[Call]) -> list[str]:
    """Calls whose output is not the first one's, bit for bit."""
    first, *further = calls
    faults = []
    for number, call in enumerate(further, 2):
        one, other = first.found[name], call.found[name]
        if (count := count_differing(one, other)) is None:
            faults.append(f"call {number}: {name} is {other.shape} {other.dtype}, of call 1 {one.shape} {one.dtype}")
        elif count:
            largest = float((one.double() - other.double()).abs().nan_to_num(torch.inf).max())
            faults.append(
                f"call {number} differs from call 1 in {count} of {one.numel()} elements of {name}, the largest "
                f"difference {largest:.3g}. Call 1 {first.how}. Call {number} {call.how}"
            )
    return faults


def count_differing(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """In how many elements they differ, bit for bit; None where they are not alike."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return None
    bits = (
        x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]) for x in (one, other)
    )
    return int(torch.ne(*bits).sum())


def errors(name: str, calls: list[Call], exact: torch.Tensor, tolerance: float) -> list[str]:
    """Calls whose output is further from the exact one than the rule allows."""
    faults = []
    for number, call in enumerate(calls, 1):
        given = call.found[name].to(exact.dtype)
        error = (given - exact).abs().masked_fill(given == exact, 0).nan_to_num(torch.inf)  # -inf on both sides is none
        if wrong := int((error > tolerance).sum()):
            faults.append(
                f"call {number} is wrong in {wrong} of {error.numel()} elements of {name}, the largest error "
                f"{float(error.max()):.3g}, tolerance {tolerance:.3g}. It went {call.how}"
            )
    return faults
