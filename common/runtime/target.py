"""Where kernels run: the GPU of this machine, or the emulator in the place of a GPU that is described."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from flashladder.common.catalog import Card
from flashladder.common.compiler.artifact import PtxModule
from flashladder.common.console import warn
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.config import GpuDescription, load_gpu
from flashladder.common.runtime import device as devices
from flashladder.common.runtime.gpu import require_gpu

DEVICES = ("auto", "gpu", "emulator")
DEFAULT_GPU = "h100"  # what the emulator stands for


@dataclass(frozen=True)
class Target:
    """The device, what to compile for, and the GPU's description."""

    on_gpu: bool
    arch: str
    gpu: GpuDescription

    @property
    def card(self) -> Card:
        """What kernels are chosen for."""
        return Card(self.arch, self.gpu, emulated=not self.on_gpu)

    @property
    def title(self) -> str:
        """The device in words."""
        if self.on_gpu:
            return torch.cuda.get_device_name()
        return f"emulator (as {self.gpu.title})"

    def check(self, module: PtxModule) -> None:
        """Raises UnsupportedProblemError where a CTA of a kernel does not fit an SM of the target."""
        needed = max(kernel.launch.shared_bytes for kernel in module.kernels)
        if needed > self.gpu.shared_per_block:
            raise UnsupportedProblemError(
                f"{module.version} with {module.config.name} needs {needed} bytes of shared memory; "
                f"{self.gpu.name} gives a CTA {self.gpu.shared_per_block}: choose smaller tiles"
            )


def resolve(device: str, gpu: str | None) -> Target:
    """The target of `--device` (auto, gpu or emulator) and `--gpu` (a described GPU's name, or None).

    DeviceError where a GPU is asked for and there is none, ConfigError for the CPU or a GPU that is not described.
    """
    wanted = load_gpu(gpu) if gpu else None
    if device == "cpu":
        raise ConfigError("a rung is a CUDA kernel: it runs on --device gpu or emulator; on the cpu, references run")
    if device == "gpu":
        require_gpu()
    if device == "emulator" or not torch.cuda.is_available():
        described = wanted or load_gpu(DEFAULT_GPU)
        return Target(on_gpu=False, arch=described.arch, gpu=described)
    here = devices.present()
    present = devices.describe(here)
    if wanted and wanted.name != present.name:
        warn(
            f"the GPU here is {here.name}, not {wanted.title}: building for {here.arch}; "
            f"--device emulator runs the code of {wanted.name}"
        )
    if not devices.is_known(present):
        _say_once(f"the GPU here is {present.title}; its name for tuned configurations is {present.name}")
    return Target(on_gpu=True, arch=here.arch, gpu=present)


@cache
def _say_once(message: str) -> None:
    warn(message)
