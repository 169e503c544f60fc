"""Where kernels run: the GPU of this machine, or the emulator in the place of a GPU that is described."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashladder.common.build.artifact import Artifact
from flashladder.common.config import GpuDescription, gpu_names, load_gpu
from flashladder.common.console import warn
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.run.gpu import device_arch, require_gpu

DEVICES = ("auto", "gpu", "emulator")
DEFAULT_GPU = "h100"  # what the emulator stands for


@dataclass(frozen=True)
class Target:
    """The device, what to compile for, and the GPU's description where there is one."""

    on_gpu: bool
    arch: str
    gpu: GpuDescription | None

    @property
    def title(self) -> str:
        """The device in words."""
        if self.on_gpu:
            return torch.cuda.get_device_name()
        return f"emulator (as {self.gpu.title})" if self.gpu else "emulator"

    def check(self, artifact: Artifact) -> None:
        """Raises UnsupportedProblemError where a CTA of a kernel does not fit an SM of the target."""
        needed = max(kernel.launch.shared_bytes for kernel in artifact.kernels)
        if self.gpu and needed > self.gpu.shared_per_block:
            raise UnsupportedProblemError(
                f"{artifact.version} with {artifact.config.name} needs {needed} bytes of shared memory; "
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
    present = _description_of(torch.cuda.get_device_name())
    if wanted and wanted != present:
        warn(
            f"the GPU here is {torch.cuda.get_device_name()}, not {wanted.title}: building for {device_arch()}; "
            f"--device emulator runs the code of {wanted.name}"
        )
    return Target(on_gpu=True, arch=device_arch(), gpu=present)


def _description_of(device_name: str) -> GpuDescription | None:
    """The description whose short name is part of the device's name."""
    plain = device_name.lower().replace(" ", "")
    return next((load_gpu(name) for name in gpu_names() if name in plain), None)
