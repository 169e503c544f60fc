"""Which GPU this is: what its driver says of it, and the description that fits.

A GPU is known by its name, its number of SMs and its memory, all three: a slice of a card, or a card that shares its
name with a larger one, is not that card. One that no file of configs/gpus describes is described by its own attributes.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from flashladder.common.errors import DeviceError
from flashladder.common.problem.config import GpuDescription, gpu_names, load_gpu
from flashladder.common.runtime.gpu import device_arch, driver

MEASURED = "measured from its own attributes; unknown to configs/gpus"
MEMORY_TOLERANCE = 0.1  # of a label's GB, taken for GiB: what error correction and the driver keep, and rounding
# Dense 16-bit FLOP with fp32 sums of an SM's tensor cores in a clock, by compute capability: those of the described
# GPUs. GeForce cards of the smaller chips sum at half of it.
TENSOR_FLOPS = {80: 2048, 86: 1024, 90: 4096, 100: 8192, 120: 1024}
HALVED_ON_GEFORCE = 1024
UNTOLD_MHZ = 1000  # a clock for predictions where the driver names none: their order does not depend on it


@dataclass(frozen=True)
class Device:
    """A GPU as its driver sees it. Clocks and the memory's bus are 0 where the driver does not say."""

    name: str
    arch: str
    memory_bytes: int
    num_sms: int
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    max_threads_per_sm: int
    max_ctas_per_sm: int
    l2_bytes: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int

    @property
    def boost_mhz(self) -> int:
        """The highest SM clock."""
        return round(self.clock_khz / 1e3)

    @property
    def bandwidth_gb_s(self) -> float:
        """Of the memory, which moves data at both edges of its clock."""
        return round(2 * self.memory_clock_khz * self.memory_bus_bits / 8 / 1e6, 1)


_ATTRIBUTES = {
    "num_sms": "MULTIPROCESSOR_COUNT",
    "shared_per_block": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "max_threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
    "max_ctas_per_sm": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "l2_bytes": "L2_CACHE_SIZE",
    "clock_khz": "CLOCK_RATE",
    "memory_clock_khz": "MEMORY_CLOCK_RATE",
    "memory_bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
}


def present(index: int | None = None) -> Device:
    """A GPU of this machine, the current one by default. DeviceError where its driver cannot be asked."""
    index = torch.cuda.current_device() if index is None else index
    return _asked(index)


@cache
def _asked(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)  # makes the driver ready, too
    api = driver()

    def checked(answer: tuple[Any, ...]) -> Any:
        status, value = answer
        if status:
            raise DeviceError(f"the driver does not describe GPU {index}: {status}")
        return value

    handle = checked(api.cuDeviceGet(index))
    attributes = {
        field: int(checked(api.cuDeviceGetAttribute(_attribute(api, name), handle)))
        for field, name in _ATTRIBUTES.items()
    }
    return Device(properties.name, device_arch(index), properties.total_memory, **attributes)


def _attribute(api: Any, name: str) -> Any:
    return getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")


@cache
def describe(device: Device) -> GpuDescription:
    """The description of configs/gpus that fits, or one made of the device's own attributes."""
    for gpu in map(load_gpu, gpu_names()):
        if _is(device, gpu):
            own = {name: getattr(device, name) for name in gpu.unconfirmed if getattr(device, name, 0)}
            return dataclasses.replace(gpu, **own)
    return _measured(device)


def is_known(gpu: GpuDescription) -> bool:
    """Whether configs/gpus describes it."""
    return gpu.name in gpu_names()


def _is(device: Device, gpu: GpuDescription) -> bool:
    gib = device.memory_bytes / 2**30
    return (
        device.name.lower() in (name.lower() for name in gpu.names)
        and device.num_sms == gpu.num_sms
        and abs(gib - gpu.memory_gb) <= MEMORY_TOLERANCE * gpu.memory_gb
    )


def _measured(device: Device) -> GpuDescription:
    plain = re.sub(r"[^a-z0-9]+", "-", device.name.lower().removeprefix("nvidia ")).strip("-")
    flops, boost_mhz = _tensor_flops(device) * device.num_sms, device.boost_mhz or UNTOLD_MHZ
    return GpuDescription(
        name=f"{plain}-{device.num_sms}sm",
        title=f"{device.name} ({MEASURED})",
        names=(device.name,),
        memory_gb=round(device.memory_bytes / 2**30),
        arch=device.arch,
        num_sms=device.num_sms,
        shared_per_block=device.shared_per_block,
        shared_per_sm=device.shared_per_sm,
        registers_per_sm=device.registers_per_sm,
        max_threads_per_sm=device.max_threads_per_sm,
        max_ctas_per_sm=device.max_ctas_per_sm,
        l2_bytes=device.l2_bytes,
        bandwidth_gb_s=device.bandwidth_gb_s,
        dense_bf16_tflops=round(flops * boost_mhz / 1e6, 1),
        base_mhz=None,
        boost_mhz=boost_mhz,
        sources=(
            "cuDeviceGetAttribute of the device: all but the peak",
            "that of the tensor cores of other GPUs of its architecture: the peak, at the highest clock",
        ),
    )


def _tensor_flops(device: Device) -> int:
    """Of an SM in a clock, as in the nearest architecture below that is known."""
    capability = int(re.sub(r"\D", "", device.arch))
    flops = TENSOR_FLOPS[max((known for known in TENSOR_FLOPS if known <= capability), default=min(TENSOR_FLOPS))]
    return flops // 2 if flops == HALVED_ON_GEFORCE and "geforce" in device.name.lower() else flops
