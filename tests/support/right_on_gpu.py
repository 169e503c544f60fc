"""What a GPU test requires of a rung: that it is right on a problem, run after run."""

import pytest
import torch

from flashladder.common.compiler import build_one
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime.execute import on_gpu
from flashladder.common.runtime.gpu import device_arch


def require_right_on_a_gpu(rung, task, tensors=None, expected=None, runs=3, **overrides):
    if not rung.runs_on(device_arch()):
        pytest.skip(f"{rung.name} needs another GPU")
    tensors = tensors or make_inputs(task, "cuda")
    expected = expected or expect(task, tensors)
    launch = on_gpu(build_one(rung, rung.config_for(task, **overrides), device_arch()), task, tensors)
    for _ in range(runs):
        tensors.poison()
        launch()
        torch.cuda.synchronize()
        verify(expected, tensors.outputs, tensors.buffers).require(rung.name)
