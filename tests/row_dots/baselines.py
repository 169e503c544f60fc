"""What torch computes of it, eagerly: the official kernel."""

from typing import NamedTuple

import torch

from flashladder.common.measure.baselines import Baseline, CpuBaseline, by_name


class Dots(NamedTuple):
    dots: torch.Tensor


def _bind(module, problem, tensors):
    def run():
        return Dots(problem.asked.compute(problem, tensors.by_name, module.float32)["dots"])

    return run


_SAID = ("row_dots", "eager", "eager PyTorch", "torch", "torch", "pip install torch", _bind)
BASELINES = by_name(Baseline(*_SAID, head_dims_apart=((96, 64), (64, 32))))
ON_CPU = by_name(CpuBaseline(*_SAID))
