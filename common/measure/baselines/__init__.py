"""Other people's kernels behind one interface, to measure against.

A baseline runs on the same tensors as our kernels. What is not installed is named with the line that installs it. Those
of an operation are in a file of its name, or in baselines.py beside the rungs of its ladder: BASELINES, the official
one first, and ON_CPU where a library has one for the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from flashladder.common import plugins
from flashladder.common.errors import ConfigError, DeviceError, first_line, unknown
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem

_FILE = "baselines.py"
_BUILT_IN = Path(__file__).parent
_BOUNDS = {  # what not all take
    "window": "no sliding window",
    "softcap": "no softcap",
    "alibi": "no ALiBi",
    "sinks": "no sinks",
    "dropout_p": "no dropout",
    "mods": "no expressions",
}


RunOnce = Callable[[], Any]  # runs the kernel once, and gives a named tuple of the operation's outputs


def _takes_anything(_: Problem) -> str | None:
    return None


@dataclass(frozen=True)
class Baseline:
    """A library's kernel."""

    operation: str
    name: str
    title: str
    module: str  # what is imported
    package: str  # whose version is quoted
    install: str
    bind: Callable[[Any, Problem, Tensors], RunOnce]  # with the imported module
    refuses: Callable[[Problem], str | None] = _takes_anything  # the reason, to be read after the title
    arches: tuple[int, ...] = (8, 9, 10, 12)  # major compute capabilities
    bounds: tuple[str, ...] = ()  # which of `_BOUNDS` it is asked for
    max_head_dim: int = 256
    head_dims_apart: tuple[tuple[int, int], ...] = ()  # pairs of head_dim and another head_dim_v that it takes
    compiles: bool = False  # a kernel at the first call of each kind, which takes seconds

    def missing(self) -> str | None:
        """Why it cannot be used here, with the line that mends it; None when it can."""
        if self.module == "torch" and torch.version.cuda is None:
            return f"torch {torch.__version__} is a build without CUDA: {self.install}"
        try:
            self._import()
        except Exception as error:  # a foreign package may fail in any way
            return f"{self.module} cannot be imported ({first_line(error)}): {self.install}"
        return None

    @property
    def version(self) -> str:
        """The package's version, as its metadata has it; or the module's, where kernels were taken out of a wheel."""
        if self.package == "cudnn":
            return str(torch.backends.cudnn.version())
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return str(getattr(sys.modules.get(self.module), "__version__", "unknown"))

    def refusal(self, problem: Problem) -> str | None:
        """Why it does not take the problem on the current device; None when it does."""
        major, minor = torch.cuda.get_device_capability()
        reason = self._does_not_take(problem)
        if major not in self.arches:
            reason = f"has no kernel for sm_{major}{minor}"
        elif problem.head_dim > self.max_head_dim or problem.head_dim % 8:
            reason = f"takes no head_dim of {problem.head_dim}"
        elif (apart := (problem.head_dim, problem.head_dim_v)) not in self.head_dims_apart and len(set(apart)) > 1:
            reason = f"takes no head_dim_v of {problem.head_dim_v} with a head_dim of {problem.head_dim}"
        return f"{self.title} {reason}" if reason else None

    def _does_not_take(self, problem: Problem) -> str | None:
        if problem.operation != self.operation:
            return f"computes the operation {self.operation}, not {problem.operation}"
        if lacking := [no for name, no in _BOUNDS.items() if getattr(problem, name) and name not in self.bounds]:
            return f"is asked for {' and '.join(lacking)} here"
        return self.refuses(problem)

    def prepare(self, problem: Problem, tensors: Tensors) -> RunOnce:
        """What runs the kernel on these tensors. Raises DeviceError where it is missing or refuses."""
        if reason := self.missing() or self.refusal(problem):
            raise DeviceError(f"baseline {self.name}: {reason}")
        return self.bind(self._import(), problem, tensors)

    def _import(self) -> Any:
        return import_module(self.module)


class CpuBaseline(Baseline):
    """What torch computes on the CPU."""

    def missing(self) -> str | None:
        return None

    def refusal(self, problem: Problem) -> str | None:
        reason = self._does_not_take(problem)
        return f"{self.title} {reason}" if reason else None


def by_name(*baselines: Baseline) -> dict[str, Baseline]:
    """As a file of baselines keeps them: the first one is official."""
    return {baseline.name: baseline for baseline in baselines}


def of(operation: str, on_gpu: bool = True) -> Mapping[str, Baseline]:
    """Those of an operation by their names, the official one first; none where nobody has one."""
    module = plugins.named(operation, _BUILT_IN, _FILE)
    found: Mapping[str, Baseline] = getattr(module, "BASELINES" if on_gpu else "ON_CPU", {})
    return found


def find(name: str, operation: str, on_gpu: bool = True) -> Baseline:
    """The baseline of this name; ConfigError lists those there are."""
    among = of(operation, on_gpu)
    if name not in among:
        raise unknown("baseline", name, among)
    return among[name]


def official(operation: str) -> Baseline:
    """The kernel that an operation is measured against; ConfigError where nobody has one."""
    if not (found := of(operation)):
        raise ConfigError(
            f"there is no official kernel for the operation {operation}, only for {', '.join(measured())}"
        )
    return next(iter(found.values()))


def measured() -> list[str]:
    """The operations that somebody else has kernels for."""
    return [name for name in plugins.names(_BUILT_IN, _FILE) if of(name)]


def titles() -> dict[str, str]:
    """Every baseline's title by its name, which logs have; of several operations' the first one's."""
    found: dict[str, str] = {}
    for operation in measured():
        for baseline in (*of(operation).values(), *of(operation, on_gpu=False).values()):
            found.setdefault(baseline.name, baseline.title)
    return found
