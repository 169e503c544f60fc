"""How well the emulator and the machine code predict what a GPU counts."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flashladder.common.compiler.sass.opcodes import FILLER, reads_a
from flashladder.common.compiler.sass.pipes import throughput, work
from flashladder.common.emulator import LANES, NUM_BANKS, TMA, LineCount, Report
from flashladder.common.predict.ncu import Profile
from flashladder.common.problem.config import GpuDescription

# The opcode that a PTX instruction becomes, by how the instruction begins; the first that fits.
_OPCODES = (
    (re.compile(r"mma\.sync"), "HMMA"),
    (re.compile(r"wgmma\.mma_async"), "HGMMA"),
    (re.compile(r"ldmatrix"), "LDSM"),
    (re.compile(r"stmatrix"), "STSM"),
    (re.compile(r"cp\.async\.c[ag]\."), "LDGSTS"),
    (re.compile(r"cp\.async\.bulk\.tensor\..*\.shared::\w+\.global"), "UTMALDG"),
    (re.compile(r"cp\.async\.bulk\.tensor\..*\.global\.shared"), "UTMASTG"),
    (re.compile(r"ld\.(volatile\.)?shared"), "LDS"),
    (re.compile(r"st\.(volatile\.)?shared"), "STS"),
    (re.compile(r"ld\.global"), "LDG"),
    (re.compile(r"st\.global"), "STG"),
    (re.compile(r"atom\.global"), "ATOMG"),
    (re.compile(r"shfl"), "SHFL"),
    (re.compile(r"bar(rier)?\.(cta\.)?(sync|red)"), "BAR"),
    (re.compile(r"mbarrier\.init"), "SYNCS.EXCH"),
    (re.compile(r"mbarrier\.arrive"), "SYNCS.ARRIVE"),
)
_SHARED = ("LDSM", "STSM", "LDS", "STS", "LDGSTS", "HGMMA")
_GLOBAL = ("LDGSTS", "LDG", "STG", "ATOMG")
# What TMA moves is not on ncu's source page. The metrics of the kernel have it as it crosses between L2 and L1.
_BY_TMA = {
    "UTMALDG": "l1tex__m_xbar2l1tex_read_{}_mem_global_op_tma_ld.sum",
    "UTMASTG": "l1tex__m_l1tex2xbar_write_{}_mem_global_op_tma_st.sum",
}

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
# Of all warps. The source page has more where warps poll an mbarrier: code that ncu patched to count is slower.
_EXECUTED = "smsp__inst_executed.sum"
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
    yield from _executed(profile, report)
    for quantity, field, opcodes, lines in (
        ("shared wavefronts", "shared_wavefronts", _SHARED, [line for line in report.shared if line.mover != TMA]),
        ("global sectors", "global_sectors", _GLOBAL, [line for line in report.global_memory if line.mover != TMA]),
    ):
        units, ideal = _by_opcode(lines, "units"), _by_opcode(lines, "ideal")
        for opcode in [opcode for opcode in opcodes if units[opcode]]:
            yield Agreement(quantity, opcode, profile.total(field, opcode), units[opcode], "emulator")
            yield Agreement(
                f"{quantity}, ideal", opcode, profile.total(f"{field}_ideal", opcode), ideal[opcode], "emulator"
            )
        yield Agreement(quantity, "all", profile.total(field), units.total(), "emulator")
    yield from _by_tma(profile, report)


def _executed(profile: Profile, report: Report) -> Iterator[Agreement]:
    executed: Counter[str] = Counter()
    for opcode, times in report.instructions.items():
        executed[sass_opcode(opcode)] += times
    for opcode in [base for _, base in _OPCODES if executed[base]]:
        yield Agreement("executed", opcode, profile.total("executed", opcode), executed[opcode], "emulator")


def _by_tma(profile: Profile, report: Report) -> Iterator[Agreement]:
    """What TMA moves from and to global memory."""
    sectors, moved = (_by_opcode(report.global_memory, attribute) for attribute in ("units", "bytes"))
    for opcode, metric in _BY_TMA.items():
        for quantity, unit, counts in (("global sectors", "sectors", sectors), ("global bytes", "bytes", moved)):
            name = metric.format(unit)
            if counts[opcode] and name in profile.metrics:
                yield Agreement(quantity, opcode, profile.metrics[name], counts[opcode], "emulator")


def _by_opcode(lines: Iterable[LineCount], attribute: str) -> Counter[str]:
    """The sum of an attribute over the lines of each opcode."""
    found: Counter[str] = Counter()
    for line in lines:
        found[sass_opcode(line.opcode)] += getattr(line, attribute)
    return found


def _with_machine_code(profile: Profile, report: Report, gpu: GpuDescription) -> Iterator[Agreement]:
    """How busy each pipe was, in %, against the work of the executed instructions at the rates of throughput.yaml.

    The emulator adds what addresses decide: bank conflicts, which lengthen the way of loads and stores, words that
    several lanes share, which the banks move once, and what TMA moves.
    """
    loads: dict[str, float] = defaultdict(float)
    for instruction in profile.instructions:
        asked = work(instruction.opcode, instruction.kind == FILLER, reads_a(instruction.text))
        for pipe, amount in asked.items():
            loads[pipe] += amount * instruction.executed
    loads["issue"] = profile.metrics.get(_EXECUTED, loads["issue"])
    lines = on_lsu_path(report)
    loads["lsu"] += sum(line.units - line.ideal for line in lines)
    loads["shared"] -= sum(line.ideal - line.words / NUM_BANKS for line in lines)
    loads["shared"] += report.wavefronts_of(TMA)
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
    """The accesses to shared memory that bank conflicts lengthen: of lanes, but for copies, which are written past that
    path."""
    return [line for line in report.shared if line.mover == LANES and sass_opcode(line.opcode) != "LDGSTS"]


def conflict_factor(report: Report) -> float:
    """By how much bank conflicts lengthen the way of loads and stores of shared memory; 1 where there are none."""
    lines = on_lsu_path(report)
    return sum(line.units for line in lines) / max(1, sum(line.ideal for line in lines))


def sass_opcode(ptx: str) -> str:
    """The opcode that a PTX instruction becomes; empty where none is told apart."""
    return next((opcode for pattern, opcode in _OPCODES if pattern.match(ptx)), "")


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 where both orders are the same, -1 where one is the reverse; nan for fewer than three values."""
    import pandas as pd

    if len(first) < 3:
        return math.nan
    return float(pd.Series(first).rank().corr(pd.Series(second).rank()))
