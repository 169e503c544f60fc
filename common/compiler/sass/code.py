"""The machine code of one artifact and what is read off it: the main loop, opcode counts, spills, live registers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sass.flow import Graph
from flashladder.common.compiler.sass.instruction import SassInstruction, disassemble
from flashladder.common.compiler.sass.opcodes import histogram, mma
from flashladder.common.compiler.sass.pipes import WARP, Bound, bounds, loads
from flashladder.common.compiler.sass.registers import live_registers
from flashladder.common.problem.config import GpuDescription


@dataclass(frozen=True)
class Code:
    """A disassembled kernel."""

    artifact: Artifact
    instructions: tuple[SassInstruction, ...]  # of the kernel and the functions it calls

    @cached_property
    def graph(self) -> Graph:
        return Graph.of(self.instructions)

    @cached_property
    def loop(self) -> tuple[SassInstruction, ...]:
        """The main loop, over K and V (Graph.main_loop)."""
        return tuple(self.graph.main_loop())

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each kind of opcode is in the whole kernel."""
        return histogram(self.instructions)

    @cached_property
    def loop_counts(self) -> Counter[str]:
        """How often each kind of opcode is in the main loop."""
        return histogram(self.loop)

    @cached_property
    def live(self) -> dict[int, int]:
        """Live registers by address."""
        return live_registers(self.graph)

    @property
    def loop_live(self) -> int:
        """The most registers that are live at once in the main loop."""
        return max((self.live[instruction.address] for instruction in self.loop), default=0)

    @property
    def loop_issue_cycles(self) -> int:
        """Cycles that one warp alone takes to issue the main loop, if it never waits for memory or a barrier."""
        return sum(max(1, instruction.control.stall) for instruction in self.loop)

    @property
    def loop_flops(self) -> int:
        """Tensor-core operations of one warp in the main loop; beside warpgroup products, others are an exception's."""
        operations = [operation for i in self.loop if (operation := mma(i.opcode))]
        of_warpgroups = [operation for operation in operations if operation.is_warpgroup]
        return sum(operation.flops for operation in of_warpgroups or operations)

    @property
    def block_flops(self) -> int:
        """Tensor-core operations that a CTA has to do for one block of K and V."""
        from flashladder.common.problem.problem import operation_named  # it needs torch, which takes seconds

        launch, values = self.artifact.launch, self.artifact.config.as_dict()
        head_dim = int(values["head_dim"])
        head_dim_v = int(values.get("head_dim_v", head_dim))
        asked = operation_named(self.artifact.operation)
        return asked.block_flops(launch.block_m, launch.block_n, head_dim, head_dim_v)

    @property
    def loop_warps(self) -> float:
        """Warps of a CTA that go through the main loop: all, or with wgmma as many as one block's work occupies."""
        if any(operation.is_warpgroup for i in self.loop if (operation := mma(i.opcode))):
            return self.block_flops / self.loop_flops
        return self.artifact.launch.num_threads / WARP

    @property
    def whole_warps(self) -> int:
        """The same as a number of warps that can be simulated."""
        return max(1, round(self.loop_warps))

    @property
    def loop_blocks(self) -> float:
        """Blocks of K and V that a CTA does in one pass through the main loop; 0 without tensor cores, or blocks."""
        return self.loop_flops * self.loop_warps / self.block_flops if self.block_flops else 0.0

    @property
    def spill_instructions(self) -> int:
        """Accesses to local memory in the main loop."""
        return count(self.loop, ("LDL", "STL"))

    def figures(self) -> dict[str, int]:
        """What two kernels are compared by, apart from opcode counts."""
        artifact = self.artifact
        return {
            "instructions in the main loop": len(self.loop),
            "instructions in the kernel": len(self.instructions),
            "cycles to issue the loop, one warp": self.loop_issue_cycles,
            "barriers in the loop": count(self.loop, ("BAR",)),
            "registers": artifact.registers,
            "live registers in the loop": self.loop_live,
            "spill stores and loads, bytes": artifact.spill_store_bytes + artifact.spill_load_bytes,
            "local accesses in the loop": self.spill_instructions,
            "shared memory, bytes": artifact.launch.shared_bytes,
        }

    @cached_property
    def usual_loop(self) -> tuple[SassInstruction, ...]:
        """The main loop without what is seldom executed (Graph.usual_loop)."""
        return tuple(self.graph.usual_loop())

    def loop_bounds(self, gpu: GpuDescription, *, usual: bool = False) -> list[Bound]:
        """What a CTA's pass through the main loop, or the usual one, takes of an SM at least, by pipe, the longest
        first."""
        return bounds(loads(self.usual_loop if usual else self.loop, self.loop_warps), gpu)


@cache
def read(artifact: Artifact) -> Code:
    """Disassembles an artifact's main kernel; ToolchainError where there is no nvdisasm."""
    others = {kernel.entry for kernel in artifact.kernels} - {artifact.entry}
    return Code(artifact, tuple(disassemble(artifact.cubin, others)))


def count(instructions: Iterable[SassInstruction], bases: Sequence[str]) -> int:
    """How many of the instructions have one of these opcodes and can execute."""
    return sum(instruction.base in bases and not instruction.is_filler for instruction in instructions)
