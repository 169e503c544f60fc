"""The instruction sets that rungs are written for, and the GPUs that have them: the one table of both."""

import re
from dataclasses import dataclass

from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import gpu_names, listing, load_gpu

_ARCH = re.compile(r"sm_(\d+)([af]?)")


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that came with an arch. Those of sm_90a exist there alone, as nvcc's suffix says; others stay."""

    name: str
    arch: str

    @property
    def needs(self) -> str:
        """The arches that have it, in words."""
        return self.arch if self.arch.endswith("a") else f"{self.arch} or later"

    def exists_on(self, arch: str) -> bool:
        """Whether code for `arch` may use it. ConfigError for what is no arch."""
        return arch == self.arch if self.arch.endswith("a") else _number(arch) >= _number(self.arch)

    def gpus(self) -> list[str]:
        """The GPUs described in configs/gpus that have it."""
        return [name for name in gpu_names() if self.exists_on(load_gpu(name).arch)]

    def check(self, user: str, arch: str) -> None:
        """Raises ConfigError, naming the user, unless the instructions exist on `arch` (sm_80, sm_90a, ...)."""
        _number(arch)
        if not self.exists_on(arch):
            raise ConfigError(
                f"{user} uses {self.name} instructions, which need {self.needs}, not {arch}; "
                f"of the GPUs described {listing(self.gpus())} have them"
            )


INSTRUCTION_SETS = {
    known.name: known
    for known in (
        InstructionSet("ampere", "sm_80"),  # mma.sync, ldmatrix, cp.async
        InstructionSet("hopper", "sm_90a"),  # wgmma, TMA
        InstructionSet("blackwell", "sm_100a"),  # tcgen05
    )
}


def _number(arch: str) -> int:
    if match := _ARCH.fullmatch(arch):
        return int(match[1])
    raise ConfigError(f"{arch} is not an arch such as sm_80 or sm_90a")
