"""How many CTAs of a kernel an SM holds at once, and what limits them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashladder.common.compiler.artifact import Artifact
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.paths import AS_NAMES
from flashladder.common.problem.config import GpuDescription

SUB_CORES = 4  # of an SM; each has a quarter of the registers, and warps of its own
WARP = 32
_REGISTERS_AT_A_TIME = 256  # that a warp is given
_SHARED_AT_A_TIME = 128  # bytes that a CTA is given


@dataclass(frozen=True)
class Occupancy:
    """CTAs of an SM, and how many each resource would allow."""

    limits: dict[str, int]  # by resource: registers, shared memory, threads, CTAs
    warps_per_cta: int

    @property
    def ctas(self) -> int:
        return min(self.limits.values())

    @property
    def warps(self) -> int:
        return self.ctas * self.warps_per_cta

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow no more."""
        return tuple(resource for resource, limit in self.limits.items() if limit == self.ctas)


def occupancy(artifact: Artifact, gpu: GpuDescription) -> Occupancy:
    """The occupancy of a kernel on a GPU; UnsupportedProblemError where not even one CTA fits."""
    threads, shared = artifact.launch.num_threads, artifact.launch.shared_bytes + static_shared_bytes(artifact)
    found = occupancy_of(artifact.registers, threads, shared, gpu)
    if found.ctas == 0:
        raise UnsupportedProblemError(
            f"{artifact.version} with {artifact.config.name} does not fit an SM of {gpu.name}: {threads} threads of "
            f"{artifact.registers} registers, {shared} bytes of shared memory. Choose a smaller tile or fewer warps"
        )
    return found


def occupancy_of(registers: int, num_threads: int, shared_bytes: int, gpu: GpuDescription) -> Occupancy:
    """The occupancy of CTAs with so many registers a thread and bytes of shared memory."""
    warps = -(-num_threads // WARP)
    registers_per_warp = _round_up(registers * WARP, _REGISTERS_AT_A_TIME)
    warps_by_registers = gpu.registers_per_sm // SUB_CORES // registers_per_warp * SUB_CORES
    reserved = gpu.shared_per_sm - gpu.shared_per_block  # by the driver, for each CTA
    limits = {
        "registers": warps_by_registers // warps,
        "shared memory": gpu.shared_per_sm // _round_up(shared_bytes + reserved, _SHARED_AT_A_TIME),
        "threads": gpu.max_threads_per_sm // (warps * WARP),
        "CTAs": gpu.max_ctas_per_sm,
    }
    return Occupancy(limits, warps)


def static_shared_bytes(artifact: Artifact) -> int:
    """Shared memory that the kernel declares with a size, in the words of ptxas."""
    match = re.search(r"(\d+) bytes smem", artifact.log.read_text(errors=AS_NAMES))
    return int(match[1]) if match else 0


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
