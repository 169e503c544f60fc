"""Launches a kernel through common/runtime/gpu.py; runtime/test_driver.py runs this with a stand-in for the driver."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

torch._C._cuda_getCurrentRawStream = lambda device: 0x77 + device
device = SimpleNamespace(name="Made-up GPU", shared_memory_per_multiprocessor=233472)
for name, value in {
    "is_available": True,
    "init": None,
    "synchronize": None,
    "current_device": 0,
    "set_device": None,
    "get_device_capability": (9, 0),
    "get_device_properties": device,
}.items():
    setattr(torch.cuda, name, lambda *_, value=value: value)

from flashladder.common.compiler import LaunchInfo  # noqa: E402
from flashladder.common.compiler.artifact import RungKernel  # noqa: E402
from flashladder.common.compiler.declaration import Workspace  # noqa: E402
from flashladder.common.problem.config import KernelConfig  # noqa: E402
from flashladder.common.runtime import gpu, launch  # noqa: E402
from flashladder.tests.support.attention_params import PARAMS  # noqa: E402

cubin = Path(sys.argv[1])
cubin.write_bytes(b"ELF!")
info = LaunchInfo(num_threads=128, shared_bytes=49152, block_m=64, block_n=64, **PARAMS)
after = LaunchInfo(
    num_threads=32, shared_bytes=0, block_m=64, block_n=0, cluster=(2, 1, 1), is_dependent=True, **PARAMS
)
entries = {"attention_forward": info} | ({"combine": after} if "several" in sys.argv else {})
kernels = tuple(RungKernel(entry, declared, 32, 0, 0, 0) for entry, declared in entries.items())
lent = (Workspace("partial", 1, "64", zeroed=False), Workspace("next", 1, "64", zeroed=True))
artifact = SimpleNamespace(
    version="02_swizzling",
    config=KernelConfig.of(block_m=64),
    arch="sm_90a",
    cubin=cubin,
    code="0123",
    launch=info,
    entry="attention_forward",
    kernels=kernels,
    workspaces=lent if "several" in sys.argv else (),
)
kernel = gpu.load(artifact)
assert gpu.load(SimpleNamespace(**vars(artifact))) is kernel  # as from the cache, a second time
memory = [SimpleNamespace(data_ptr=lambda at=at: at, numel=lambda: 64) for at in (0xA00, 0xB00)]
memory = memory[: len(artifact.workspaces)]


def launches(q):
    """Of kernels whose first argument begins with this address."""
    params = q.to_bytes(8, "little").ljust(160, b"\0")
    return [
        launch.KernelLaunch(
            each.entry,
            params,
            (2, 3, 4),
            each.launch.num_threads,
            each.launch.shared_bytes,
            cluster=each.launch.cluster,
            is_dependent=each.launch.is_dependent,
        )
        for each in kernels
    ]


start = kernel.prepare(launches(0x1230), memory)
kernel.prepare(launches(0x4560), memory)
start()
print("occupancy", kernel.occupancy())
