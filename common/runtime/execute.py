"""An artifact and a problem become an output: on the GPU or on the emulator, the one place where both are driven."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np
import torch

from flashladder.common.compiler.artifact import Artifact, PtxModule
from flashladder.common.console import duration, warn
from flashladder.common.emulator import tensor_map
from flashladder.common.errors import EmulatorError
from flashladder.common.paths import AS_NAMES
from flashladder.common.problem.inputs import Tensors, make_inputs
from flashladder.common.problem.problem import DETERMINISTIC, Problem
from flashladder.common.runtime.launch import KernelLaunch, Launcher

if TYPE_CHECKING:
    from flashladder.common.emulator import Report
    from flashladder.common.runtime.gpu import Launch

EMULATED_SMS = 2  # of a persistent grid: few, so that a CTA has more than one tile to do
LEAST_BUDGET = 200_000  # instructions of a warp, however small the problem
LONG_FLOPS = 8e9  # a problem from here on takes the emulator more than some seconds
MAP_ALIGNMENT = 64  # bytes, of tensor maps among the arguments
CHUNK = 64  # CTAs that the emulator runs together


def on_gpu(artifact: Artifact, problem: Problem, tensors: Tensors) -> Launch:
    """What launches the kernels on these tensors, on torch's current stream; DeviceError without a GPU."""
    from flashladder.common.runtime import gpu

    kernel = gpu.load(artifact)
    launcher, device = kernel.launcher, tensors.device
    with torch.cuda.device(device):
        launches = launcher.launches(problem, tensors, gpu.num_sms())
        lent = [
            (torch.zeros if workspace.zeroed else torch.empty)(num_bytes, dtype=torch.uint8, device=device)
            for workspace, num_bytes in zip(artifact.workspaces, launcher.workspace_bytes(problem), strict=True)
        ]
        return kernel.prepare(launches, lent)


def on_emulator(
    module: PtxModule,
    problem: Problem,
    tensors: Tensors,
    *,
    race: bool = True,
    lagging: Collection[int] = (),
    progress: Callable[..., None] | None = None,
    num_sms: int = EMULATED_SMS,
    before: str | None = None,
    kept: dict[str, np.ndarray] | None = None,
) -> Report:
    """Run the kernels' PTX on the CPU tensors, filling the outputs. EmulatorError where a kernel does wrong.

    `lagging` and `progress` are those of emulator.run; with the latter, how long a large problem without a mask will
    take is told before. A persistent grid is the one of a GPU with `num_sms`.
    The kernels see exactly the bytes between a buffer's guards; inputs are read-only, but for those that the operation
    updates, and neither outputs nor workspaces may be read before they are written, but for those that are zeroed.
    These must be zero again at the end.
    With `before` only the kernels before this entry run; `kept` is given the bytes of each workspace by its name.
    A kernel that may begin before the one before it has ended waits for that before it touches what this writes.
    Where a problem is `deterministic`, CTAs add floats to each other's in one order.
    """
    from flashladder.common import emulator

    if progress and problem.flops > LONG_FLOPS and not problem.causal:
        _announce(module, problem, race)
    memory = emulator.GlobalMemory()
    addresses: dict[str, int] = {}
    written = {"/".join(buffer.names): buffer for buffer in tensors.buffers if _is_written(buffer.names, problem)}
    for buffer in tensors.buffers:
        name = "/".join(buffer.names)
        is_input = not set(problem.outputs).issuperset(buffer.names)
        base = memory.add(
            name, buffer.data.view(torch.uint8).numpy(), readonly=name not in written, initialised=is_input
        )
        begin = base - buffer.data.data_ptr()
        addresses |= {name: begin + view.data_ptr() for name, view in buffer.views.items()}
    launcher = Launcher(module)
    lent = [
        memory.add(f"workspace {workspace.name}", np.zeros(num_bytes, np.uint8), initialised=workspace.zeroed)
        for workspace, num_bytes in zip(module.workspaces, launcher.workspace_bytes(problem), strict=True)
    ]
    pointers, ptx = np.array(lent, np.uint64).tobytes(), module.ptx.read_text(errors=AS_NAMES)
    reports: list[Report] = []
    earlier: dict[str, str] = {}  # what kernels that may still run write, and which of them does
    launches = launcher.launches(problem, tensors, num_sms, addresses)
    for launch in itertools.takewhile(lambda launch: launch.entry != before, launches):
        if not launch.is_dependent:
            earlier = {}
        memory.stored_to.clear()
        program = emulator.compile_ptx(ptx, launch.entry)
        report = emulator.run(
            program,
            _arguments(launch, pointers),
            launch.grid,
            launch.num_threads,
            launch.shared_bytes,
            memory,
            race=race,
            lagging=lagging,
            chunk=CHUNK,
            max_instructions=_budget(len(program.kernel.instructions), problem, module, math.prod(launch.grid)),
            prior=earlier,
            ordered_sums=getattr(problem, DETERMINISTIC, False),
            cluster=launch.cluster,
            progress=progress,
        )
        reports.append(report)
        earlier = dict.fromkeys(memory.stored_to, launch.entry) | earlier
    for name, buffer in written.items():
        buffer.data.view(torch.uint8).copy_(torch.from_numpy(memory.read(name)))
    if kept is not None:
        kept |= {workspace.name: memory.read(f"workspace {workspace.name}") for workspace in module.workspaces}
    for workspace in module.workspaces:
        if workspace.zeroed and memory.read(f"workspace {workspace.name}").any():
            raise EmulatorError(
                f"{module.version} leaves workspace {workspace.name} other than zero: "
                "the next run would begin with that"
            )
    return emulator.total(reports)


def _arguments(launch: KernelLaunch, pointers: bytes) -> bytes:
    """What a kernel is launched with, as it lies in its parameters: each at a multiple of its alignment."""
    maps = b"".join(tensor_map.encode(*dataclasses.astuple(each)) for each in launch.tensor_maps)
    packed = launch.params + pointers
    return packed + bytes(-len(packed) % MAP_ALIGNMENT) + maps if maps else packed


def _tiles(module: PtxModule, problem: Problem) -> int:
    """Of Q, in all: the CTAs of most kernels."""
    return problem.batch * problem.num_heads * -(-problem.seqlen_q // module.launch.block_m)


def _budget(instructions: int, problem: Problem, module: PtxModule, ctas: int) -> int:
    """More instructions than a warp can need: as if all of a kernel were executed for each key of each tile.

    The rungs need 3 % of that at most, those with tensor cores 1 %.
    """
    tiles_a_cta = -(-_tiles(module, problem) // ctas)
    return max(LEAST_BUDGET, instructions * max(problem.seqlen_q, problem.seqlen_k) * tiles_a_cta)


def _announce(module: PtxModule, problem: Problem, race: bool) -> None:
    """Tells how long the emulator will take."""
    spelled = duration(emulation_seconds(module, problem, race=race))
    warn(f"about {spelled} on the emulator, for {_tiles(module, problem):,} CTAs; fewer rows or heads take less")


def emulation_seconds(module: PtxModule, problem: Problem, *, race: bool) -> float:
    """How long the emulator takes for a problem without a mask, within a factor of about two: it runs four blocks.

    With a causal mask the CTAs of a chunk part ways. What that costs, a few blocks do not show.
    """
    tile, tiles, heads = module.launch, _tiles(module, problem), problem.num_heads
    rows = max(1, min(CHUNK, tiles) // heads)
    few, more = 1, 3  # blocks

    def spent(blocks: int) -> float:
        short = dataclasses.replace(
            problem, batch=1, seqlen_q=rows * tile.block_m, seqlen_k=blocks * tile.block_n, layout="bshd"
        )
        return on_emulator(module, short, make_inputs(short), race=race).elapsed

    shorter, longer = spent(few), spent(more)
    a_block = max(0.0, longer - shorter) / (more - few)
    return tiles / (rows * heads) * (shorter + a_block * (problem.seqlen_k / tile.block_n - few))


def _is_written(names: tuple[str, ...], problem: Problem) -> bool:
    return {*problem.outputs, *problem.updated}.issuperset(names)
