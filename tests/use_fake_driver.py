"""Launches a kernel through common/run/gpu.py; tests/test_driver.py runs this with a stand-in for the driver."""

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
    "get_device_capability": (9, 0),
    "get_device_properties": device,
}.items():
    setattr(torch.cuda, name, lambda *_, value=value: value)

from flashladder.common.build import LaunchInfo  # noqa: E402
from flashladder.common.run import gpu, launch  # noqa: E402

cubin = Path(sys.argv[1])
cubin.write_bytes(b"ELF!")
artifact = SimpleNamespace(
    version="02_swizzling",
    config=SimpleNamespace(name="block_m=64"),
    arch="sm_90a",
    cubin=cubin,
    code="0123",
    launch=LaunchInfo(num_threads=128, shared_bytes=49152, block_m=64, block_n=64, params_bytes=160),
)
kernel = gpu.load(artifact)
assert gpu.load(SimpleNamespace(**vars(artifact))) is kernel  # as from the cache, a second time
start = kernel.prepare(bytes(launch.AttentionParams(q=0x1230)), (2, 3, 4))
kernel.prepare(bytes(launch.AttentionParams(q=0x4560)), (1, 1, 1))
start()
print("occupancy", kernel.occupancy())
