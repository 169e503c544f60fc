"""An artifact and a problem become an output: on the GPU or on the emulator, the one place where both are driven."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from flashladder.common.build.artifact import Artifact
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import Problem, Tensors
from flashladder.common.run.launch import pack, steps, workspace_bytes

if TYPE_CHECKING:
    from flashladder.common.emulator import Report
    from flashladder.common.run.gpu import Launch

EMULATED_SMS = 2  # of a persistent grid: few, so that a CTA has more than one tile to do


def on_gpu(artifact: Artifact, problem: Problem, tensors: Tensors) -> Launch:
    """What launches the kernels on these tensors, on torch's current stream; DeviceError without a GPU."""
    from flashladder.common.run import gpu

    params = _params(artifact, problem, tensors)
    kernel = gpu.load(artifact)
    with torch.cuda.device(tensors.device):
        lent = [
            torch.empty(workspace_bytes(artifact, problem, workspace), dtype=torch.uint8, device=tensors.device)
            for workspace in artifact.workspaces
        ]
        return kernel.prepare(params, steps(artifact, problem, params, gpu.num_sms()), lent)


def on_emulator(
    artifact: Artifact,
    problem: Problem,
    tensors: Tensors,
    *,
    race: bool = True,
    progress: Callable[[int, int], None] | None = None,
    max_instructions: int | None = None,
) -> Report:
    """Run the kernels' PTX on the CPU tensors, filling the outputs. EmulatorError where a kernel does wrong.

    `max_instructions` is of one warp, against endless loops; by default the emulator's own bound.

    The kernels see exactly the bytes between a buffer's guards; inputs are read-only, and neither outputs nor
    workspaces may be read before they are written, but for those that are zeroed.
    """
    from flashladder.common import emulator

    memory = emulator.GlobalMemory()
    addresses: dict[str, int] = {}
    written = {"/".join(buffer.names): buffer for buffer in tensors.buffers if _is_written(buffer.names, problem)}
    for buffer in tensors.buffers:
        name = "/".join(buffer.names)
        is_input = name not in written
        base = memory.add(name, buffer.data.view(torch.uint8).numpy(), readonly=is_input, initialised=is_input)
        addresses |= {name: base + offset for name, offset in buffer.offsets().items()}
    params = _params(artifact, problem, tensors, addresses)
    lent = [
        memory.add(
            f"workspace {workspace.name}",
            np.zeros(workspace_bytes(artifact, problem, workspace), np.uint8),
            initialised=workspace.zeroed,
        )
        for workspace in artifact.workspaces
    ]
    arguments, ptx = params + np.array(lent, np.uint64).tobytes(), artifact.ptx.read_text()
    reports = [
        emulator.run(
            ptx,
            arguments,
            step.grid,
            step.num_threads,
            step.shared_bytes,
            memory,
            step.entry,
            race=race,
            progress=progress,
            max_instructions=max_instructions or emulator.MAX_INSTRUCTIONS,
        )
        for step in steps(artifact, problem, params, EMULATED_SMS)
    ]
    for name, buffer in written.items():
        buffer.data.view(torch.uint8).copy_(torch.from_numpy(memory.read(name)))
    return emulator.total(reports)


def _is_written(names: tuple[str, ...], problem: Problem) -> bool:
    return set(problem.asked.outputs).issuperset(names)


def _params(artifact: Artifact, problem: Problem, tensors: Tensors, addresses: dict[str, int] | None = None) -> bytes:
    _check_row_stride(artifact, problem, tensors)
    return pack(problem, tensors, addresses)


def _check_row_stride(artifact: Artifact, problem: Problem, tensors: Tensors) -> None:
    """A kernel compiled for one row stride would be silently wrong on tensors with another."""
    if "row_stride" not in artifact.config.fields:
        return
    compiled = artifact.config.row_stride
    for name, shape in problem.asked.shapes(problem).items():
        if len(shape) == 4 and (stride := tensors.by_name[name].stride(1)) != compiled:
            raise UnsupportedProblemError(
                f"{name} has rows {stride} elements apart; {artifact.version} was compiled for row_stride={compiled}: "
                f"configure it with row_stride={stride}"
            )
