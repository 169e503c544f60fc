"""How fast a kernel should be on a GPU that need not be there: from its machine code and the emulator's counters.

The main loop's instructions, without those seldom executed, run through a simulated sub-core (subcore.py), as many
CTAs side by side as an SM holds; CTAs beyond that come in further waves. The emulator says how much bank conflicts
lengthen loads and stores of shared memory. Of a kernel with warpgroup products (Hopper) the whole way through a tile is
simulated (tile.py). No operation that is told in bytes is faster than memory. Each time is a prediction, and is called
one wherever it is shown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from flashladder.common import trust, yaml_files
from flashladder.common.catalog import Version
from flashladder.common.compiler import BuildRequest, build, sass
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sass.pipes import WARP
from flashladder.common.errors import ConfigError, EmulatorError
from flashladder.common.own import FIRST
from flashladder.common.paths import ROOT, cache_dir
from flashladder.common.predict.agreement import conflict_factor
from flashladder.common.predict.subcore import Step, cycles, on_a_sub_core
from flashladder.common.predict.tile import TileCycles, TileWork
from flashladder.common.problem.config import GpuDescription, KernelConfig
from flashladder.common.problem.problem import BANDWIDTH, operation_named

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem

FEW = 8  # workloads, about half a second each, that are not worth the start of processes
SETUP_CYCLES = 2000  # of a wave of CTAs: launching, loading the first tiles, storing O; a TileWork has its own
WARPGROUP_CLOCK = 0.89  # of the highest clock, what wgmma leaves of it at the power limit: H200, docs/cost-model.md
LOOP_CODE = ("common/compiler/sass/*.py", "common/predict/*.py")  # that makes a MainLoop of a cubin
EXPERIENCE = ROOT / "configs" / "cost_model.yaml"
PRICE_CODE = (*LOOP_CODE, "common/emulator/**/*.py")  # and a time of a MainLoop
LAYOUT_FIELDS = ("block_m", "block_n", "num_warps", "num_stages")  # configurations alike in these have one layout


@dataclass(frozen=True)
class MainLoop:
    """A kernel's main loop, as far as the model looks at it."""

    steps: tuple[Step, ...]
    warps: int  # of a CTA that go through it
    blocks: float  # of K and V that a CTA does in one pass
    tile: TileWork | None = None  # of a kernel with warpgroup products

    @classmethod
    def of(cls, artifact: Artifact) -> MainLoop:
        """Disassembles a kernel; the result is kept in the cache."""
        place = cache_dir() / "loops" / f"{artifact.key}-{digest(*LOOP_CODE)}.json"
        with suppress(OSError, ValueError, TypeError):
            return cls.of_values(json.loads(place.read_text()))
        code = sass.read(artifact)
        blocks = code.loop_blocks or _blocks_by_ffma(code) or 1.0
        loop = cls(tuple(map(Step.of, code.usual_loop)), code.whole_warps, blocks, TileWork.of(code))
        trust.make(place.parent)
        temporary = place.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(dataclasses.asdict(loop)))
        temporary.replace(place)
        return loop

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> MainLoop:
        """The loop that dataclasses.asdict made into plain values."""
        steps, tile = tuple(Step(**step) for step in values["steps"]), values["tile"]
        return cls(**{**values, "steps": steps, "tile": tile and TileWork.of_values(tile)})


def _blocks_by_ffma(code: sass.Code) -> float:
    """Blocks of K and V in one pass of a kernel without tensor cores, by its multiplications; 0 without blocks."""
    if not code.block_flops:
        return 0.0
    return 2 * WARP * sass.count(code.loop, ("FFMA",)) * code.loop_warps / code.block_flops


@cache
def digest(*patterns: str) -> str:
    """Of the code in some files: what the cache holds that other code made is of no use."""
    files = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


@dataclass(frozen=True)
class Workload:
    """What one SM has to do for a problem."""

    artifact: Artifact
    gpu: GpuDescription
    ctas: int  # in all
    blocks: float  # of K and V for each, on average
    conflict_factor: float
    num_bytes: float = 0.0  # that memory brings for the whole problem; 0 of an operation that is told in FLOPs

    def cycles(self) -> float:
        """The SM's time: whole waves, then the CTAs that are left."""
        loop, resident = MainLoop.of(self.artifact), sass.occupancy(self.artifact, self.gpu).ctas
        waves, rest = divmod(self.ctas, resident)
        return sum(
            count * self._wave(loop, together)
            for count, together in ((waves, resident), (1, rest))
            if count and together
        )

    def time_us(self) -> float:
        """The same in microseconds, or what memory takes, where that is longer."""
        clock = self.gpu.boost_mhz * (WARPGROUP_CLOCK if MainLoop.of(self.artifact).tile else 1.0)
        return max(self.cycles() / clock, self.num_bytes / (1e3 * self.gpu.bandwidth_gb_s))

    def _wave(self, loop: MainLoop, ctas: int) -> float:
        """Of so many CTAs, or tiles of persistent ones, side by side."""
        if loop.tile:
            return tile_cycles(self.artifact, self.gpu, ctas).of(self.blocks)
        warps, rates = on_a_sub_core(loop.warps), sass.throughput(self.gpu)
        spent = cycles(loop.steps, ctas, warps, rates, self.conflict_factor) if loop.steps else 0.0
        return SETUP_CYCLES + self.blocks / loop.blocks * spent


@cache
def tile_cycles(artifact: Artifact, gpu: GpuDescription, ctas: int) -> TileCycles:
    """Of a kernel with warpgroup products, where so many CTAs share an SM; all lengths have the same."""
    tile = MainLoop.of(artifact).tile
    assert tile
    return tile.cycles(ctas, sass.throughput(gpu))


def time_us(problem: Problem, artifact: Artifact, gpu: GpuDescription, conflict_factor: float) -> float:
    """The predicted time of a kernel. UnsupportedProblemError where it does not fit an SM, ToolchainError without
    nvdisasm, ConfigError where it has no loop over blocks of keys."""
    if not artifact.launch.block_n:
        raise ConfigError(f"the cost model prices loops over keys, and {artifact.version} declares no block_n")
    return workload(problem, artifact, gpu, conflict_factor).time_us()


@dataclass(frozen=True)
class Experience:
    """How far measured times were from predictions: between `low` and `high` times as long."""

    low: float
    high: float
    kernels: str
    gpu: str

    def __str__(self) -> str:
        return f"on an {self.gpu}, {self.kernels} took {span(self.low, self.high, 'g')} times what it predicts"


def span(low: float, high: float, form: str) -> str:
    """Two figures as a range; one where they are the same, as of a rung that was measured once."""
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"


def experience(version: Version) -> Experience | None:
    """That with the rung, or with kernels of its kind; None where no such kernel was held against a GPU."""
    known = yaml_files.parsed(EXPERIENCE.read_text())
    if interval := known["rungs"].get(version.address):
        low, high = interval
        return Experience(low, high, f"rung {version.address} (bf16, head_dim 128, no mask)", known["gpu"].upper())
    if operation_named(version.operation).unit == BANDWIDTH:
        return Experience(0.68, 3.8, "kernels of the ladder mla", "H100")
    if version.operation != FIRST:
        return None
    if version.instruction_set == "hopper":
        return Experience(0.93, 1.08, "rungs 25 to 37", "H200")
    return Experience(1.12, 1.41, "kernels of mma.sync", "H100")


def mean_us(times: Sequence[float]) -> float:
    """What several problems count together: the geometric mean of their times."""
    return math.exp(sum(map(math.log, times)) / len(times))


def workload(problem: Problem, artifact: Artifact, gpu: GpuDescription, conflict_factor: float) -> Workload:
    """The share of one SM in a problem. Of a kernel that declares no blocks of keys, its CTAs alone count."""
    tile = artifact.launch
    asked = problem.asked
    ctas = asked.row_tiles(problem, tile.block_m)
    blocks = asked.blocks(problem, tile.block_m, tile.block_n) if tile.block_n else 0.0
    num_bytes = asked.bytes_moved(problem) if asked.unit == BANDWIDTH else 0.0
    return Workload(artifact, gpu, math.ceil(ctas / gpu.num_sms), blocks, conflict_factor, num_bytes)


def conflicts(
    version: Version, problem: Problem, configs: Iterable[KernelConfig], gpu: GpuDescription
) -> dict[object, float]:
    """By how much bank conflicts lengthen loads and stores of shared memory, by layout.

    Configs: the fields that the problem leaves open. What cannot be emulated is left out, and so is what has warpgroup
    products, which conflict with nothing.
    """
    from flashladder.common.problem.inputs import make_inputs
    from flashladder.common.runtime.execute import on_emulator

    examples = {layout_of(config): config for config in configs}
    problems = {layout: _small(problem, config) for layout, config in examples.items()}
    requests = [
        BuildRequest(version, version.config_for(problems[layout], **config.as_dict()), gpu.arch)
        for layout, config in examples.items()
    ]
    found: dict[object, float] = {}
    for layout, artifact in zip(examples, build(requests, on_error="return"), strict=True):
        with suppress(EmulatorError):
            if isinstance(artifact, Artifact) and not MainLoop.of(artifact).tile:
                report = on_emulator(artifact, problems[layout], make_inputs(problems[layout]), race=False)
                found[layout] = conflict_factor(report)
    return found


def layout_of(config: KernelConfig) -> tuple[object, ...]:
    """Equal where the bank conflicts are."""
    return tuple(value for name, value in config.items if name in LAYOUT_FIELDS)


def _small(problem: Problem, config: KernelConfig) -> Problem:
    """One CTA of a problem's kind, with one block of K and V."""
    rows, keys = getattr(config, "block_m", 64), getattr(config, "block_n", 64)
    return dataclasses.replace(
        problem, batch=1, num_heads=1, num_heads_k=1, seqlen_q=rows, seqlen_k=keys, layout="bshd"
    )


def times_us(workloads: Sequence[Workload], progress: Any = None) -> list[float]:
    """The time of each, on all cores."""
    cores = len(os.sched_getaffinity(0))
    results: list[float] = []
    if len(workloads) < FEW:
        return [each.time_us() for each in workloads]
    context = multiprocessing.get_context("spawn")
    deaf = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the search
    with ProcessPoolExecutor(
        min(cores, len(workloads)), mp_context=context, initializer=signal.signal, initargs=deaf
    ) as pool:
        for result in pool.map(Workload.time_us, workloads):
            results.append(result)
            if progress:
                progress(len(results), len(workloads), "")
    return results
