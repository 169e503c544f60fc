"""An artifact and a problem become an output: on the GPU or on the emulator, the one place where both are driven."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from flashladder.common.build.artifact import Artifact
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import Problem, Tensors
from flashladder.common.run.launch import attention_params, grid

if TYPE_CHECKING:
    from flashladder.common.emulator import Report
    from flashladder.common.run.gpu import Launch

OUTPUTS = {"o", "lse"}


def on_gpu(artifact: Artifact, problem: Problem, tensors: Tensors) -> Launch:
    """What launches the kernel on these tensors, on torch's current stream; DeviceError without a GPU."""
    from flashladder.common.run import gpu

    params = _params(artifact, problem, tensors)
    kernel = gpu.load(artifact)
    with torch.cuda.device(tensors.q.device):
        return kernel.prepare(params, grid(artifact.launch, params))


def on_emulator(
    artifact: Artifact,
    problem: Problem,
    tensors: Tensors,
    *,
    race: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Run the kernel's PTX on the CPU tensors, filling the outputs. EmulatorError where the kernel does wrong.

    The kernel sees exactly the bytes between a buffer's guards; inputs are read-only, and outputs may not be read
    before they are written.
    """
    from flashladder.common import emulator

    memory = emulator.GlobalMemory()
    addresses: dict[str, int] = {}
    for buffer in tensors.buffers:
        writes = OUTPUTS.issuperset(buffer.names)
        name = "/".join(buffer.names)
        base = memory.add(name, buffer.data.view(torch.uint8).numpy(), readonly=not writes, initialised=not writes)
        addresses |= {name: base + offset for name, offset in buffer.offsets().items()}
    params = _params(artifact, problem, tensors, addresses)
    report = emulator.run(
        artifact.ptx.read_text(),
        params,
        grid(artifact.launch, params),
        artifact.launch.num_threads,
        artifact.launch.shared_bytes,
        memory,
        race=race,
        progress=progress,
    )
    for buffer in tensors.buffers:
        if OUTPUTS.issuperset(buffer.names):
            buffer.data.view(torch.uint8).copy_(torch.from_numpy(memory.read("/".join(buffer.names))))
    return report


def _params(artifact: Artifact, problem: Problem, tensors: Tensors, addresses: dict[str, int] | None = None) -> bytes:
    _check_row_stride(artifact, tensors)
    return attention_params(tensors.q, tensors.k, tensors.v, tensors.o, tensors.lse, problem.softmax_scale, addresses)


def _check_row_stride(artifact: Artifact, tensors: Tensors) -> None:
    """A kernel compiled for one row stride would be silently wrong on tensors with another."""
    if "row_stride" not in artifact.config.fields:
        return
    compiled = artifact.config.row_stride
    for name in ("q", "k", "v", "o"):
        if (stride := getattr(tensors, name).stride(1)) != compiled:
            raise UnsupportedProblemError(
                f"{name} has rows {stride} elements apart; {artifact.version} was compiled for row_stride={compiled}: "
                f"configure it with row_stride={stride}"
            )
