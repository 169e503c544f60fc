"""The limits of a kernel without a GPU: its main loop is simulated as it is, and once more without each of them.

The simulation is that of cost.py, with more passes and with what other instructions cost beside mmas. It ranks; its
times are too short by about a seventh (docs/cost-model.md says how it was held against a GPU). Conflicts of banks are
the emulator's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from flashladder.common.catalog import LIMITERS, Version
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sass import Code, SassInstruction, occupancy, read, throughput
from flashladder.common.compiler.sass.instruction import Position
from flashladder.common.compiler.sources import own_line
from flashladder.common.emulator import Report
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.predict.agreement import conflict_factor, on_lsu_path
from flashladder.common.predict.limits.diagnosis import CYCLES, Diagnosis, Limit, by_line, ranked, shares
from flashladder.common.predict.limits.kinds import TENSOR, limit_of
from flashladder.common.predict.subcore import BESIDE_MMA, Step, cycles, on_a_sub_core
from flashladder.common.problem.config import GpuDescription
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import BANDWIDTH, Problem, operation_named
from flashladder.common.runtime.execute import on_emulator

PASSES = 12  # of the simulation: with subcore.PASSES, how the warps begin still shows
MEASURED_ARCH = "sm_90"  # of BESIDE_MMA


def predict(version: Version, artifact: Artifact, gpu: GpuDescription) -> Diagnosis:
    """The diagnosis of a kernel. UnsupportedProblemError where it has no loop, or does not fit the GPU."""
    code, resident = read(artifact), occupancy(artifact, gpu).ctas
    if not code.usual_loop or not Problem.of_config(artifact.operation, artifact.config).flops:
        raise UnsupportedProblemError(f"{version.name} has no loop over K and V, whose limits could be looked for")
    if not resident:
        raise UnsupportedProblemError(f"{version.name} with {artifact.config.name} does not fit an SM of {gpu.name}")
    report = _emulated(version, artifact)
    factor, warps = conflict_factor(report), on_a_sub_core(code.whole_warps)
    beside = BESIDE_MMA if gpu.arch.startswith(MEASURED_ARCH) else {}

    def time(steps: Sequence[Step], conflicts: float = 1.0) -> float:
        """Of a CTA's pass."""
        rates = throughput(gpu)
        return cycles(steps, resident, warps, rates, conflicts, beside_mma=beside, passes=PASSES) / resident

    whole, loop = code.usual_loop, [Step.of(instruction) for instruction in code.usual_loop]
    free = time(loop)
    total = time(loop, factor) if factor > 1 else free
    limits = [
        Limit(name, total - free + time(without(whole, part)), by_line((instruction, 1) for instruction in part))
        for name, part in _parts(whole).items()
    ]
    if factor > 1:
        limits.append(Limit("bank_conflicts", free, _conflict_lines(report)))
    bounds = {bound.pipe: bound.cycles for bound in code.loop_bounds(gpu, usual=True)}
    tensor = max(bounds.get("tensor", 0.0), bounds.get("wgmma", 0.0))
    return Diagnosis(version, code, gpu.title, total, CYCLES, tensor, ranked(limits), _memory(artifact, code, gpu))


def _memory(artifact: Artifact, code: Code, gpu: GpuDescription) -> float:
    """Cycles in which the keys of a pass come through an SM's share of the bandwidth; 0 of operations told in FLOPs."""
    if operation_named(artifact.operation).unit != BANDWIDTH:
        return 0.0
    keys = round(artifact.launch.block_n * code.loop_blocks)
    few, more = (
        Problem.of_config(artifact.operation, artifact.config, seqlen_q=1, seqlen_k=passes * keys) for passes in (1, 2)
    )
    num_bytes = more.asked.bytes_moved(more) - few.asked.bytes_moved(few)
    return num_bytes * gpu.num_sms * gpu.boost_mhz / (1e3 * gpu.bandwidth_gb_s)


def _parts(loop: Sequence[SassInstruction]) -> dict[str, list[SassInstruction]]:
    """The instructions of each limit."""
    has_tensor_cores = any(limit_of(instruction, True) == TENSOR for instruction in loop)
    parts: dict[str, list[SassInstruction]] = {}
    for instruction in loop:
        parts.setdefault(limit_of(instruction, has_tensor_cores), []).append(instruction)
    return {name: part for name, part in parts.items() if name in LIMITERS}


def without(loop: Iterable[SassInstruction], part: Iterable[SassInstruction]) -> list[Step]:
    """The steps of a loop without some instructions; what they waited for, the next one waits for."""
    left_out = {instruction.address for instruction in part}
    steps: list[Step] = []
    waits = 0
    for instruction in loop:
        step = Step.of(instruction)
        waits |= step.waits
        if instruction.address not in left_out:
            steps.append(dataclasses.replace(step, waits=waits))
            waits = 0
    return steps


def _emulated(version: Version, artifact: Artifact) -> Report:
    """The counters of one CTA and two blocks of K and V, or as many as give each row of an expression a position."""
    config, launch = artifact.config, artifact.launch
    heads = config.row_stride // config.head_dim if "row_stride" in config.fields else 1
    blocks = max(2, -(-launch.block_m // launch.block_n)) if config.as_dict().get("mods") else 2
    sizes = {"num_heads": heads, "seqlen_q": launch.block_m, "seqlen_k": blocks * launch.block_n}
    problem = Problem.of_config(version.operation, config, **sizes)
    return on_emulator(artifact, problem, make_inputs(problem), race=False)


def _conflict_lines(report: Report) -> tuple[tuple[Position, float], ...]:
    return shares((own_line(line.source), line.units - line.ideal) for line in on_lsu_path(report) if line.source)
