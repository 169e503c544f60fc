"""Runs the references: implementations beside the ladder, each a Python module versions/references/NAME/kernel.py.

The module has two functions: `prepare(problem, config, tensors) -> Prepared`, whose launch computes the outputs from
the inputs on the device that they are on, and `toolkit()`, what compiles it, in words.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from flashladder.common import plugins
from flashladder.common.catalog import Reference
from flashladder.common.errors import DeviceError, ToolchainError
from flashladder.common.problem.config import KernelConfig, listing
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import LSE, Problem
from flashladder.common.runtime.gpu import require_gpu


def _no_facts() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Prepared:
    """A computation that is ready to run, any number of times; and what is to be told of it once it has run."""

    launch: Callable[[], None]
    facts: Callable[[], Mapping[str, str]] = _no_facts

    def __call__(self) -> None:
        self.launch()


def room_for_lse(problem: Problem, tensors: Tensors) -> torch.Tensor:
    """Where a kernel that always writes the log-sum-exp puts it: the output, or what nobody reads where it is left out.

    (batch, num_heads, seqlen_q), fp32.
    """
    if LSE in tensors.outputs:
        return tensors.lse
    return torch.empty(problem.tensors[LSE].shape, dtype=torch.float32, device=tensors.device)


@dataclass(frozen=True)
class Configured:
    """A reference and its configuration: what an artifact is to a rung."""

    reference: Reference
    config: KernelConfig

    @property
    def version(self) -> str:
        """The reference's name, in the place of a rung's."""
        return self.reference.name

    @property
    def key(self) -> str:
        """A digest of its source."""
        return hashlib.sha256(self.reference.kernel.read_bytes()).hexdigest()[:24]

    @property
    def toolkit(self) -> str:
        """What compiled it, and the release."""
        words: str = load(self.reference).toolkit()
        return words

    def prepare(self, problem: Problem, tensors: Tensors) -> Prepared:
        """Binds it to tensors."""
        prepared: Prepared = load(self.reference).prepare(problem, self.config, tensors)
        return prepared


def missing(reference: Reference) -> str | None:
    """Which package it lacks here, with the line that installs it; None when it has all."""
    for module, install in reference.requires.items():
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: {install}"
    return None


def load(reference: Reference) -> ModuleType:
    """Its module."""
    return plugins.load(reference.kernel)


def device_for(reference: Reference, wanted: str) -> str:
    """The torch device of `--device`: auto is a GPU where there is one.

    Raises DeviceError where it cannot run there, ToolchainError where it lacks a package.
    """
    if wanted == "auto":
        has_gpu = "gpu" in reference.devices and (torch.cuda.is_available() or "cpu" not in reference.devices)
        wanted = "gpu" if has_gpu else "cpu"
    if wanted not in reference.devices:
        raise DeviceError(f"{reference.name} runs on {listing(reference.devices)}, not on {wanted}")
    if reason := missing(reference):
        raise ToolchainError(f"{reference.name} cannot run: {reason}")
    if wanted == "gpu":
        require_gpu()
    return {"gpu": "cuda", "cpu": "cpu"}[wanted]
