"""What an SM needs at least for one pass through a loop: cycles of each pipe, by configs/throughput.yaml."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from flashladder.common import yaml_files
from flashladder.common.compiler.sass.instruction import SassInstruction
from flashladder.common.compiler.sass.opcodes import (
    access_width,
    bank_wavefronts,
    mma,
    operand_bytes,
    pipe_of,
    reads_a,
)
from flashladder.common.errors import ConfigError
from flashladder.common.paths import CONFIGS
from flashladder.common.problem.config import GpuDescription, listing

THROUGHPUT = CONFIGS / "throughput.yaml"
WARP = 32
WARPGROUP = 4  # warps
WAVEFRONT = 128  # bytes
_TWO_PASSES = ("IMAD.WIDE", "IMAD.HI")  # of the FMA pipe: they are about the upper half of a product


@dataclass(frozen=True)
class Rate:
    """How much a pipe of an SM does in a clock, and who says so."""

    per_clock: float
    source: str


@dataclass(frozen=True)
class Bound:
    """The least time that a pipe needs for some instructions of a CTA."""

    pipe: str
    work: float  # in the pipe's unit: FLOP, lanes, wavefronts, warp instructions
    cycles: float
    source: str


def throughput(gpu: GpuDescription) -> dict[str, Rate]:
    """The rate of every pipe of one SM; `tensor` is mma.sync's, left out where it is unknown, `wgmma` the full one.

    An architecture that the table lacks has the rates of the nearest below it, marked as such.
    """
    table, arch = _table(), _nearest(gpu.arch)
    known = {pipe: entry for pipe, entry in table[arch].items() if entry[0] is not None}
    is_own = re.sub("[af]$", "", gpu.arch) == arch
    rates = {
        pipe: Rate(float(Fraction(value)), source if is_own else "nearest") for pipe, (value, source) in known.items()
    }
    peak = tensor_peak(gpu)
    if part := rates.pop("mma_sync", None):
        rates["tensor"] = Rate(peak * part.per_clock, part.source)
    return {**rates, "wgmma": Rate(peak, "peak")}


def _nearest(arch: str) -> str:
    """The architecture of the table that is this one, or else the highest below; ConfigError below all of them."""
    known = {int(name.removeprefix("sm_")): name for name in _table() if name != "sources"}
    wanted = int(re.sub(r"\D", "", arch))
    if below := [number for number in known if number <= wanted]:
        return known[max(below)]
    raise ConfigError(f"{THROUGHPUT} has no {arch}, only {listing(known.values())}")


def tensor_peak(gpu: GpuDescription) -> float:
    """Dense 16-bit FLOP with fp32 sums that an SM's tensor cores do in a clock.

    It is a power of two; the published peak belongs to a clock near the highest one.
    """
    published = gpu.dense_bf16_tflops * 1e12 / (gpu.num_sms * gpu.boost_mhz * 1e6)
    return 2.0 ** round(math.log2(published))


def work(opcode: str, is_filler: bool = False, from_shared: bool = False) -> dict[str, float]:
    """What one warp's execution of an opcode asks of each pipe, without bank conflicts.

    A warpgroup product reads B once for its four warps, and A, too, where that is `from_shared` memory.
    """
    asked: dict[str, float] = {"issue": 1}
    pipe = pipe_of(opcode)
    if pipe == "lsu":
        if is_filler:  # it moves nothing, yet passes through
            return asked | {"lsu": 1}
        return asked | {"lsu": _data_wavefronts(opcode), "shared": bank_wavefronts(opcode)}
    if is_filler or pipe is None:
        return asked
    if operation := mma(opcode):
        if not operation.is_warpgroup:
            return asked | {"tensor": operation.flops}
        read = operand_bytes(opcode, from_shared) / WAVEFRONT / WARPGROUP
        return asked | {"wgmma": operation.flops, "lsu": read, "shared": read}
    if opcode.startswith(("IMAD", "IDP")):
        lanes = 2 * WARP if opcode.startswith(_TWO_PASSES) else WARP
        return asked | {"fma": lanes, "imad": lanes}
    return asked | {pipe: WARP}


def _data_wavefronts(opcode: str) -> int:
    """Passes over the load/store data path. What LDGSTS brings is written past it: counters of an H100 show none."""
    return 0 if opcode.startswith("LDGSTS") else access_width(opcode)


def bounds(loads: Mapping[str, float], gpu: GpuDescription) -> list[Bound]:
    """The time that each pipe needs for these loads, the longest first; a pipe of unknown rate is left out."""
    rates = throughput(gpu)
    found = [
        Bound(pipe, amount, amount / rates[pipe].per_clock, rates[pipe].source)
        for pipe, amount in loads.items()
        if amount and pipe in rates
    ]
    return sorted(found, key=lambda bound: (-round(bound.cycles), bound.pipe not in ("tensor", "wgmma")))


def loads(instructions: Iterable[SassInstruction], times: float = 1) -> dict[str, float]:
    """What executing these instructions so many times asks of each pipe."""
    total: dict[str, float] = defaultdict(float)
    for instruction in instructions:
        for pipe, amount in work(instruction.opcode, instruction.is_filler, reads_a(instruction.text)).items():
            total[pipe] += amount * times
    return dict(total)


def source_text(mark: str) -> str:
    """The source that a mark stands for."""
    return str(_table()["sources"][mark])


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = yaml_files.parsed(THROUGHPUT.read_text())
    return found
