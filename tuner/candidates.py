"""The kernels of a space: compiled on all cores, told apart by their machine code, those that cannot win left out."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashladder.common.build.artifact import Artifact
from flashladder.common.build.compile import BuildRequest, Progress, build
from flashladder.common.config import GpuDescription, KernelConfig
from flashladder.common.errors import BuildError, ConfigError, UnsupportedProblemError
from flashladder.common.sass import occupancy
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
    progress: Progress | None = None,
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
    requests = {
        config: [BuildRequest(space.version, space.full(config, problem), gpu.arch) for problem in space.problems]
        for config in configs
    }
    distinct = list(dict.fromkeys(request for several in requests.values() for request in several))
    built = dict(zip(distinct, build(distinct, progress, on_error="return"), strict=True))

    left_out: dict[str, int] = defaultdict(int)
    alike: dict[str, list[KernelConfig]] = defaultdict(list)
    artifacts: dict[KernelConfig, list[Artifact]] = {}
    for config, several in requests.items():
        results = [built[request] for request in several]
        found = [result for result in results if isinstance(result, Artifact)]
        reason = "does not compile" if len(found) < len(results) else None
        reason = reason or _unfit(found, gpu, None if config == space.default else spills)
        if reason:
            left_out[reason] += 1
            continue
        artifacts[config] = found
        alike[_code(found)].append(config)
    kernels = [Candidate(code, tuple(same), tuple(artifacts[same[0]])) for code, same in alike.items()]
    if not kernels:
        raise ConfigError(f"{space.version.name} has no kernel for {gpu.name}: {_why(left_out, built.values())}")
    return Stock(space, tuple(kernels), dict(left_out))


def _unfit(artifacts: Sequence[Artifact], gpu: GpuDescription, spills: int | None) -> str | None:
    """Why a kernel is not worth a launch; None where it is."""
    for artifact in artifacts:
        try:
            occupancy(artifact, gpu)
        except UnsupportedProblemError:
            return f"does not fit an SM of {gpu.name}"
        if spills is not None and artifact.local_bytes > spills:
            return f"spills more than {spills} bytes a thread"
    return None


def _code(artifacts: Sequence[Artifact]) -> str:
    """What tells the kernels of several problems from those of another configuration."""
    return hashlib.sha256(" ".join(artifact.code for artifact in artifacts).encode()).hexdigest()[:16]


def _why(left_out: Mapping[str, int], built: Iterable[Artifact | BuildError]) -> str:
    counts = "; ".join(
        f"{count} {'configuration' if count == 1 else 'configurations'}: {reason}" for reason, count in left_out.items()
    )
    error = next((f". The first error: {result}" for result in built if isinstance(result, BuildError)), "")
    return counts + error
