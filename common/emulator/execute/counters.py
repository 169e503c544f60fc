"""What a run did: executed instructions, tensor-core work, memory traffic per instruction and per source line."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..compile.program import Program
from ..parse.ptx import SourceChain, format_chain

NUM_BANKS = 32
WAVEFRONT_BYTES, SECTOR_BYTES = 4 * NUM_BANKS, 32
LANES, WGMMA, TMA = "lanes", "wgmma", "TMA"  # who moves what shared memory holds
_MMA_SHAPE = re.compile(r"(?:mma|wgmma\.mma_async)\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.")


def shared_wavefronts(addresses: Sequence[int], lanes: Sequence[int], size: int) -> tuple[int, int, int]:
    """Passes over the 32 banks of 4 bytes that one warp access takes, the passes it would take without conflicts, and
    the words that it moves in them.

    Accesses of 8 bytes are served in half-warps, of 16 bytes (ldmatrix too: 8 rows) in quarter-warps; lanes that want
    the same word of a bank share it.

    Args:
        addresses: byte addresses of the active lanes.
        lanes: their lane numbers.
        size: bytes a lane.
    """
    lanes_a_pass = min(32, 128 // size)
    passes: dict[int, set[int]] = defaultdict(set)
    for address, lane in zip(addresses, lanes, strict=True):
        passes[lane // lanes_a_pass].update(range(address >> 2, (address + size + 3) >> 2))
    actual = sum(max(Counter(word % NUM_BANKS for word in words).values()) for words in passes.values())
    return actual, len(passes), sum(map(len, passes.values()))


@dataclass
class AccessCount:
    """Traffic of one instruction. For shared memory `units` are wavefronts and `ideal` those without bank conflicts;
    for global memory `units` are 32-byte sectors and `ideal` those that the bytes of each request would fill. `words`,
    of shared memory, are those of 4 bytes that the banks move: one that several lanes share in a pass counts once."""

    requests: int = 0
    units: int = 0
    ideal: int = 0
    bytes: int = 0
    words: int = 0

    def add(self, requests: int, units: int, ideal: int, bytes: int, words: int = 0) -> None:
        self.requests += requests
        self.units += units
        self.ideal += ideal
        self.bytes += bytes
        self.words += words


@dataclass(frozen=True)
class LineCount:
    """The traffic of one kind of instruction at one source line (a chain of inlined positions, innermost first)."""

    source: SourceChain
    opcode: str
    requests: int
    units: int
    ideal: int
    bytes: int
    words: int

    @property
    def where(self) -> str:
        return format_chain(self.source)

    @property
    def mover(self) -> str:
        """Who moves it: WGMMA its operands, TMA what bulk copies bring and take, the LANES of a warp the rest."""
        words = self.opcode.split(".")
        return WGMMA if words[0] == "wgmma" else TMA if "bulk" in words else LANES

    @property
    def ratio(self) -> float:
        """Units over ideal units: 1 is conflict-free, or fully coalesced."""
        return self.units / self.ideal if self.ideal else 1.0


@dataclass
class Report:
    """The counters of a run. Instructions are counted once a warp; wavefronts and sectors as AccessCount says.

    Attributes:
        instructions: executed warp instructions by opcode.
        reached: places in the program of the instructions that were executed.
        mma_flops: floating-point operations on tensor cores.
        shared, global_memory: traffic by source line and opcode, in program order.
        bytes_read, bytes_written: by memory space ("global", "shared").
        num_ctas: CTAs that ran.
        elapsed: seconds.
    """

    instructions: dict[str, int] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    mma_flops: int = 0
    shared: list[LineCount] = field(default_factory=list)
    global_memory: list[LineCount] = field(default_factory=list)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    num_ctas: int = 0
    elapsed: float = 0.0

    @property
    def shared_wavefronts(self) -> int:
        return sum(line.units for line in self.shared)

    def wavefronts_of(self, mover: str) -> int:
        """Those of shared memory that are LANES', WGMMA's or TMA's."""
        return sum(line.units for line in self.shared if line.mover == mover)

    @property
    def shared_wavefronts_ideal(self) -> int:
        return sum(line.ideal for line in self.shared)

    @property
    def global_requests(self) -> int:
        return sum(line.requests for line in self.global_memory)

    @property
    def global_sectors(self) -> int:
        return sum(line.units for line in self.global_memory)


def total(reports: Sequence[Report]) -> Report:
    """The counters of kernels that ran one after the other; `reached` are places in the last one's program."""
    if len(reports) == 1:
        return reports[0]
    whole = Report(reached=reports[-1].reached)
    for report in reports:
        for name in ("instructions", "bytes_read", "bytes_written"):
            counts = getattr(whole, name)
            for key, count in getattr(report, name).items():
                counts[key] = counts.get(key, 0) + count
        for name in ("mma_flops", "shared", "global_memory", "num_ctas", "elapsed"):
            setattr(whole, name, getattr(whole, name) + getattr(report, name))
    return whole


class Counters:
    """Collects during a run: executed blocks, and traffic per instruction and space."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [0] * num_blocks
        self.shared: dict[int, AccessCount] = defaultdict(AccessCount)
        self.global_memory: dict[int, AccessCount] = defaultdict(AccessCount)


def summarise(counters: Counters, program: Program) -> Report:
    """The report of a finished run: block counts times each block's instructions, and traffic by source line."""
    report = Report()
    for block, executed in zip(program.blocks, counters.blocks, strict=True):
        if not executed:
            continue
        for instruction in block.instructions:
            report.reached.add(instruction.index)
            report.instructions[instruction.opcode] = report.instructions.get(instruction.opcode, 0) + executed
            if shape := _MMA_SHAPE.match(instruction.opcode):
                m, n, k = (int(part) for part in shape.groups())
                sharing = 4 if instruction.opcode.startswith("wgmma") else 1  # warps that multiply together
                report.mma_flops += 2 * m * n * k * executed // sharing
    for space, counts, lines in (
        ("shared", counters.shared, report.shared),
        ("global", counters.global_memory, report.global_memory),
    ):
        _by_line(program, space, counts, lines, report)
    return report


def _by_line(
    program: Program, space: str, counts: dict[int, AccessCount], lines: list[LineCount], report: Report
) -> None:
    merged: dict[tuple[SourceChain, str], AccessCount] = {}
    for index, count in sorted(counts.items()):
        instruction = program.kernel.instructions[index]
        total = merged.setdefault((instruction.source, instruction.opcode), AccessCount())
        total.add(count.requests, count.units, count.ideal, count.bytes, count.words)
        is_copy = instruction.opcode.startswith("cp.")
        target = "global" if ".global.shared" in instruction.opcode else "shared"
        stores = instruction.opcode.startswith(("st", "red")) or (is_copy and space == target)
        into = report.bytes_written if stores else report.bytes_read
        into[space] = into.get(space, 0) + count.bytes
    for (source, opcode), total in merged.items():
        lines.append(LineCount(source, opcode, total.requests, total.units, total.ideal, total.bytes, total.words))
