"""The state of a GPU as its driver reports it: clock, power, temperature, what slows it, who else uses it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

# NVML's bits, in words. What only says that the GPU idles, or that someone chose its clocks, slows no kernel.
SLOWDOWNS = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}


@dataclass(frozen=True)
class GpuState:
    """One reading; None where the driver does not say."""

    sm_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    slowdowns: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the driver said anything."""
        return bool(self.slowdowns) or any(each is not None for each in (self.sm_mhz, self.power_w, self.temperature_c))


class Monitor:
    """Reads the state of a CUDA device through NVML. Without NVML it reads nothing, and `missing` says why."""

    def __init__(self, device: int) -> None:
        self.missing: str | None = None
        properties = torch.cuda.get_device_properties(device)
        self.uuid = str(properties.uuid).removeprefix("GPU-")
        try:
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.uuid}")
        except ImportError:
            self.missing = "clocks and power are not recorded: pip install nvidia-ml-py"
        except Exception as error:  # a driver without NVML, or a virtual GPU that NVML does not know
            self.missing = f"clocks and power are not recorded: {error}"

    @property
    def gpu_id(self) -> str:
        """Tells GPUs apart without telling which they are: a hash of the UUID."""
        return hashlib.sha256(self.uuid.encode()).hexdigest()[:12]

    def read(self) -> GpuState:
        """The state now; takes up to a few milliseconds."""
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return GpuState(
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=self._ask("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
            slowdowns=tuple(word for bit, word in SLOWDOWNS.items() if reasons & bit),
        )

    def power_limit_w(self) -> float | None:
        """The power cap in force."""
        milliwatts = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1000

    def other_processes(self) -> int:
        """How many other processes compute on the GPU; this one must do so already."""
        return max(0, len(self._ask("nvmlDeviceGetComputeRunningProcesses") or []) - 1)

    def driver_version(self) -> str | None:
        """The version of the NVIDIA driver."""
        if self.missing:
            return None
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    def _ask(self, function: str, *arguments: int) -> Any:
        """An answer of NVML about the device; None where it has none."""
        if self.missing:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None
