"""Launches a kernel through common/runtime/gpu.py; tests/test_driver.py runs this with a stand-in for the driver."""

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
from flashladder.common.runtime import gpu, launch  # noqa: E402

cubin = Path(sys.argv[1])
cubin.write_bytes(b"ELF!")
info = LaunchInfo(num_threads=128, shared_bytes=49152, block_m=64, block_n=64, params_bytes=160)
after = LaunchInfo(num_threads=32, shared_bytes=0, block_m=64, block_n=0, params_bytes=160)
entries = {"attention_forward": info} | ({"combine": after} if "several" in sys.argv else {})
kernels = tuple(RungKernel(entry, declared, 32, 0, 0, 0) for entry, declared in entries.items())
lent = (Workspace("partial", 1, "64", zeroed=False), Workspace("next", 1, "64", zeroed=True))
artifact = SimpleNamespace(
    version="02_swizzling",
    config=SimpleNamespace(name="block_m=64"),
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
launches = [
    launch.KernelLaunch(entry, (2, 3, 4), declared.num_threads, declared.shared_bytes)
    for entry, declared in entries.items()
]
start = kernel.prepare(bytes(launch.AttentionParams(q=0x1230)), launches, memory)
kernel.prepare(bytes(launch.AttentionParams(q=0x4560)), launches, memory)
start()
print("occupancy", kernel.occupancy())
