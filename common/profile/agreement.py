"""How well the emulator and the machine code predict what a GPU counts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from flashladder.common.config import GpuDescription
from flashladder.common.emulator import Report
from flashladder.common.emulator.counters import NUM_BANKS, LineCount
from flashladder.common.profile.ncu import Profile
from flashladder.common.sass.opcodes import FILLER
from flashladder.common.sass.pipes import throughput, work

# The opcode that a PTX instruction becomes, by how the instruction begins; the first that fits.
_OPCODES = (
    (re.compile(r"mma\.sync"), "HMMA"),
    (re.compile(r"wgmma\.mma_async"), "HGMMA"),
    (re.compile(r"ldmatrix"), "LDSM"),
    (re.compile(r"stmatrix"), "STSM"),
    (re.compile(r"cp\.async\.c[ag]\."), "LDGSTS"),
    (re.compile(r"ld\.(volatile\.)?shared"), "LDS"),
    (re.compile(r"st\.(volatile\.)?shared"), "STS"),
    (re.compile(r"ld\.global"), "LDG"),
    (re.compile(r"st\.global"), "STG"),
    (re.compile(r"shfl"), "SHFL"),
    (re.compile(r"bar(rier)?\.(cta\.)?(sync|red)"), "BAR"),
)
_SHARED = ("LDSM", "STSM", "LDS", "STS", "LDGSTS")
_GLOBAL = ("LDGSTS", "LDG", "STG")

# ncu's figures that say together how busy a pipe is, in % of its peak. None tells IMADs from the FP32 work that the
# same half of the FMA pipe takes beside them: the hardware shares that out as it runs.
_TENSOR = (r"sm__pipe_tensor(_op_hmma|_op_gmma)?_cycles_active",)
_BUSY = {
    "tensor": _TENSOR,
    "wgmma": _TENSOR,
    "mufu": (r"sm__(pipe_xu_cycles_active|inst_executed_pipe_xu)",),
    "fma": (r"sm__pipe_fma_cycles_active",),
    "alu": (r"sm__pipe_alu_cycles_active",),
    "lsu": (r"l1tex__data_pipe_lsu_wavefronts",),
    "shared": (r"l1tex__data_bank_reads", r"l1tex__data_bank_writes"),
    "issue": (r"sm__(inst_issued|issue_active)",),
}
_CYCLES = {"active": "sm__cycles_active.avg", "elapsed": "sm__cycles_elapsed.avg"}  # of an SM, by when a peak counts


@dataclass(frozen=True)
class Agreement:
    """A figure that the GPU counted, and what was predicted."""

    quantity: str
    opcode: str  # or the pipe
    measured: float
    predicted: float
    by: str  # emulator, sass or both

    @property
    def deviation(self) -> float:
        """How far the prediction is above what was measured, as a part of it."""
        if self.measured == self.predicted:
            return 0.0
        return self.predicted / self.measured - 1 if self.measured else float("inf")


def compare(profile: Profile, report: Report, gpu: GpuDescription | None) -> list[Agreement]:
    """Every figure that both sides have: of the emulator, for the same problem, and of the machine code."""
    return [*_with_emulator(profile, report), *(_with_machine_code(profile, report, gpu) if gpu else ())]


def _with_emulator(profile: Profile, report: Report) -> Iterator[Agreement]:
    executed: Counter[str] = Counter()
    for opcode, times in report.instructions.items():
        executed[sass_opcode(opcode)] += times
    for opcode in [base for _, base in _OPCODES if executed[base]]:
        yield Agreement("executed", opcode, profile.total("executed", opcode), executed[opcode], "emulator")
    for quantity, field, opcodes, lines in (
        ("shared wavefronts", "shared_wavefronts", _SHARED, report.shared),
        ("global sectors", "global_sectors", _GLOBAL, report.global_memory),
    ):
        units: Counter[str] = Counter()
        ideal: Counter[str] = Counter()
        for line in lines:
            units[sass_opcode(line.opcode)] += line.units
            ideal[sass_opcode(line.opcode)] += line.ideal
        for opcode in [opcode for opcode in opcodes if units[opcode]]:
            yield Agreement(quantity, opcode, profile.total(field, opcode), units[opcode], "emulator")
            yield Agreement(
                f"{quantity}, ideal", opcode, profile.total(f"{field}_ideal", opcode), ideal[opcode], "emulator"
            )
        yield Agreement(quantity, "all", profile.total(field), units.total(), "emulator")


def _with_machine_code(profile: Profile, report: Report, gpu: GpuDescription) -> Iterator[Agreement]:
    """How busy each pipe was, in %, against the work of the executed instructions at the rates of throughput.yaml.

    The emulator adds what addresses decide: bank conflicts, which lengthen the way of loads and stores, and words that
    several lanes share, which the banks move once.
    """
    loads: dict[str, float] = defaultdict(float)
    for instruction in profile.instructions:
        for pipe, amount in work(instruction.opcode, instruction.kind == FILLER).items():
            loads[pipe] += amount * instruction.executed
    lines = on_lsu_path(report)
    loads["lsu"] += sum(line.units - line.ideal for line in lines)
    loads["shared"] -= sum(line.ideal - line.words / NUM_BANKS for line in lines)
    rates = throughput(gpu)
    for pipe in [pipe for pipe, amount in loads.items() if amount and pipe in rates and pipe in _BUSY]:
        if busy := _busy(profile, pipe):
            percent, cycles = busy
            predicted = 100 * loads[pipe] / rates[pipe].per_clock / gpu.num_sms / cycles
            yield Agreement("busy %", pipe, percent, predicted, "both" if pipe in ("lsu", "shared") else "sass")


def _busy(profile: Profile, pipe: str) -> tuple[float, float] | None:
    """ncu's figure for a pipe, and the cycles that it is a part of; None where there is none."""
    for during, cycles in _CYCLES.items():
        parts = [_percent(profile, pattern, during) for pattern in _BUSY[pipe]]
        if all(part is not None for part in parts) and cycles in profile.metrics:
            return sum(part for part in parts if part is not None), profile.metrics[cycles]
    return None


def _percent(profile: Profile, pattern: str, during: str) -> float | None:
    """The metric of that name, in % of its peak while the SM was active, or of all the time that elapsed."""
    name = re.compile(rf"{pattern}\.avg\.pct_of_peak_sustained_{during}$")
    return max((value for metric, value in profile.metrics.items() if name.match(metric)), default=None)


def on_lsu_path(report: Report) -> list[LineCount]:
    """The accesses to shared memory that bank conflicts lengthen: all but copies, which are written past that path."""
    return [line for line in report.shared if sass_opcode(line.opcode) != "LDGSTS"]


def conflict_factor(report: Report) -> float:
    """By how much bank conflicts lengthen the way of loads and stores of shared memory; 1 where there are none."""
    lines = on_lsu_path(report)
    return sum(line.units for line in lines) / max(1, sum(line.ideal for line in lines))


def sass_opcode(ptx: str) -> str:
    """The opcode that a PTX instruction becomes; empty where none is told apart."""
    return next((opcode for pattern, opcode in _OPCODES if pattern.match(ptx)), "")
