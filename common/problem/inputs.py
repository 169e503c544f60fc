"""The tensors of a problem: seeded inputs and poisoned outputs, in guarded memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashladder.common.problem.buffers import Buffer, View, poison
from flashladder.common.problem.problem import Problem

_CPU_DRAW_LIMIT = 2**25  # elements: larger inputs are drawn on the GPU they are for


@dataclass(frozen=True)
class Tensors:
    """Inputs and outputs of one problem, each an attribute: `tensors.q`. An output may be left out."""

    by_name: Mapping[str, torch.Tensor]
    problem: Problem
    buffers: tuple[Buffer, ...] = ()

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in (tensors := self.__dict__.get("by_name", {})):
            return tensors[name]
        raise AttributeError(f"the problem has no tensor {name}")

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The outputs by their names."""
        return {name: self.by_name[name] for name in self.problem.outputs if name in self.by_name}

    @property
    def device(self) -> torch.device:
        """Where the first input is."""
        return self.by_name[self.problem.inputs[0]].device

    def poison(self) -> None:
        """Fill the outputs with a NaN; to be called before each run that is verified."""
        for output in self.outputs.values():
            poison(output)


def make_inputs(problem: Problem, device: torch.device | str = "cpu") -> Tensors:
    """Inputs of the problem's family for its seed, in its layout, and poisoned outputs, all in guarded memory.

    One seed gives the same numbers in every layout and, up to 2^25 elements, on every device.
    """
    tensors = allocate(problem, device)
    large = sum(tensors.by_name[name].numel() for name in problem.inputs) > _CPU_DRAW_LIMIT
    draw(problem, tensors.by_name, device if large else "cpu")
    return tensors


def allocate(problem: Problem, device: torch.device | str = "cpu") -> Tensors:
    """The same with inputs that are still to be drawn."""
    together: dict[str, dict[str, View]] = {}
    for name, tensor in problem.tensors.items():
        if not tensor.optional:
            together.setdefault(tensor.within or name, {})[name] = tensor.view
    buffers = [Buffer(views, problem.tensors[name].dtype, device) for name, views in together.items()]
    views = {name: view for buffer in buffers for name, view in buffer.views.items()}
    tensors = Tensors(views, problem, tuple(buffers))
    tensors.poison()
    return tensors


def draw(problem: Problem, tensors: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
    """Fills the inputs among the tensors with those of the problem, whose numbers are drawn on the device."""
    problem.asked.draw(problem, tensors, torch.Generator(device=device).manual_seed(problem.seed))
