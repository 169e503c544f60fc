"""The kernels of a space: compiled on all cores, told apart by their machine code, those that cannot win left out.

What is left is priced by the cost model.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.compile import BuildProgress, BuildRequest, build
from flashladder.common.compiler.sass import occupancy
from flashladder.common.errors import BuildError, ConfigError, UnsupportedProblemError
from flashladder.common.predict import cost
from flashladder.common.problem.config import GpuDescription, KernelConfig
from flashladder.tuner.space import Space

SPILLS = 256  # bytes of registers that a thread may spill: beyond a quarter of them, no kernel has been worth it


@dataclass(frozen=True)
class Candidate:
    """One piece of machine code, and all configurations that compile to it; the first stands for them.

    Artifacts: one for each problem, in the space's order, of the first configuration.
    """

    code: str  # digest
    configs: tuple[KernelConfig, ...]
    artifacts: tuple[Artifact, ...] = field(repr=False)

    @property
    def config(self) -> KernelConfig:
        return self.configs[0]


@dataclass(frozen=True)
class Stock:
    """What compiling a space gave."""

    space: Space
    kernels: tuple[Candidate, ...]  # that are worth measuring, the default's first
    left_out: Mapping[str, int]  # reasons, with how many configurations they cost

    @property
    def num_configs(self) -> int:
        """Configurations that the kernels stand for."""
        return sum(len(kernel.configs) for kernel in self.kernels)

    @property
    def default(self) -> Candidate | None:
        """The kernel of the rung's default configuration, unless it does not run on the GPU."""
        return self.of(self.space.default)

    def of(self, config: KernelConfig) -> Candidate | None:
        """The kernel that a configuration compiles to, if it is worth measuring."""
        return next((kernel for kernel in self.kernels if config in kernel.configs), None)

    def seeds(self, gpu: str) -> list[Candidate]:
        """The kernels of the space's seeds."""
        found = [self.of(config) for config in self.space.seeds(gpu)]
        return list(dict.fromkeys(kernel for kernel in found if kernel))


def compile_all(
    space: Space,
    gpu: GpuDescription,
    spills: int = SPILLS,
    progress: BuildProgress | None = None,
    limit: int | None = None,
) -> Stock:
    """Compiles every configuration for the GPU's arch, or as many as `limit`, those near the space's seeds.

    Raises ConfigError where the arch's instruction set lacks the rung's.

    Configurations are left out that do not compile, do not fit an SM or spill more than `spills` bytes; the rung's
    default may spill what it likes, as it is what a winner is held against.
    """
    space.version.check_arch(gpu.arch)
    chosen = space.configs if limit is None else space.near(space.seeds(gpu.name), limit)
    configs = list(dict.fromkeys([space.default, *chosen]))
    wanted = {config: requests(space, config, gpu.arch) for config in configs}
    distinct = list(dict.fromkeys(request for several in wanted.values() for request in several))
    built = dict(zip(distinct, build(distinct, progress, on_error="return"), strict=True))

    left_out: dict[str, int] = defaultdict(int)
    alike: dict[str, list[KernelConfig]] = defaultdict(list)
    artifacts: dict[KernelConfig, list[Artifact]] = {}
    for config, several in wanted.items():
        results = [built[request] for request in several]
        if reason := unfit(results, gpu, None if config == space.default else spills):
            left_out[reason] += 1
            continue
        artifacts[config] = [result for result in results if isinstance(result, Artifact)]
        alike[code_of(artifacts[config])].append(config)
    kernels = [Candidate(code, tuple(same), tuple(artifacts[same[0]])) for code, same in alike.items()]
    if not kernels:
        raise ConfigError(f"{space.version.name} has no kernel for {gpu.name}: {_why(left_out, built.values())}")
    return Stock(space, tuple(kernels), dict(left_out))


def requests(space: Space, config: KernelConfig, arch: str) -> list[BuildRequest]:
    """What is compiled of a configuration: a kernel for each problem, in the space's order."""
    return [BuildRequest(space.version, space.full(config, problem), arch) for problem in space.problems]


def unfit(results: Sequence[Artifact | BuildError], gpu: GpuDescription, spills: int | None) -> str | None:
    """Why the kernels of a configuration are not worth a launch; None where they are."""
    for result in results:
        if isinstance(result, BuildError):
            return "does not compile"
        try:
            occupancy(result, gpu)
        except UnsupportedProblemError:
            return f"does not fit an SM of {gpu.name}"
        if spills is not None and result.local_bytes > spills:
            return f"spills more than {spills} bytes a thread"
    return None


def code_of(artifacts: Sequence[Artifact]) -> str:
    """What tells the kernels of several problems from those of another configuration."""
    return hashlib.sha256(" ".join(artifact.code for artifact in artifacts).encode()).hexdigest()[:16]


def predict(stock: Stock, gpu: GpuDescription, progress: Any = None) -> dict[str, float]:
    """The predicted time of every kernel by its code: microseconds, the geometric mean over the space's problems."""
    space = stock.space
    factors = cost.conflicts(space.version, space.problems[0], (kernel.config for kernel in stock.kernels), gpu)
    wanted = {
        (kernel.code, problem): workload
        for kernel in stock.kernels
        for problem, workload in zip(space.problems, workloads(kernel, space, gpu, factors), strict=True)
    }
    times: dict[str, list[float]] = defaultdict(list)
    for (code, _), spent in zip(wanted, cost.times_us(list(wanted.values()), progress), strict=True):
        times[code].append(spent)
    return {code: cost.mean_us(several) for code, several in times.items()}


def workloads(
    kernel: Candidate, space: Space, gpu: GpuDescription, factors: Mapping[object, float]
) -> list[cost.Workload]:
    """What an SM has to do for each problem; factors: of each layout's bank conflicts (cost.conflicts)."""
    factor = factors.get(cost.layout_of(kernel.config), 1.0)
    pairs = zip(space.problems, kernel.artifacts, strict=True)
    return [cost.workload(problem, artifact, gpu, factor) for problem, artifact in pairs]


def _why(left_out: Mapping[str, int], built: Iterable[Artifact | BuildError]) -> str:
    counts = "; ".join(
        f"{count} {'configuration' if count == 1 else 'configurations'}: {reason}" for reason, count in left_out.items()
    )
    error = next((f". The first error: {result}" for result in built if isinstance(result, BuildError)), "")
    return counts + error
