"""Calls a stand-in for the driver through the real bindings, in Python and in C++; runtime/test_driver.py runs this."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

torch._C._cuda_getCurrentRawStream = lambda device: 0x77
torch._C._cuda_getDevice = lambda: torch.zeros(1).get_device()
properties = SimpleNamespace(name="Made-up GPU", multi_processor_count=3)
for name, value in {
    "is_available": True,
    "init": None,
    "synchronize": None,
    "current_device": torch.zeros(1).get_device(),
    "get_device_properties": properties,
    "set_device": None,
    "device": contextlib.nullcontext(),
}.items():
    setattr(torch.cuda, name, lambda *_, value=value: value)

from flashladder.common.catalog import find  # noqa: E402
from flashladder.common.compiler.artifact import Artifact, RungKernel  # noqa: E402
from flashladder.common.compiler.declaration import LaunchInfo  # noqa: E402
from flashladder.common.problem.config import KernelConfig  # noqa: E402
from flashladder.common.problem.inputs import Tensors  # noqa: E402
from flashladder.common.problem.problem import Problem  # noqa: E402
from flashladder.common.runtime import fast_path  # noqa: E402
from flashladder.common.runtime.calls import Call  # noqa: E402
from flashladder.tests.support.attention_params import PARAMS  # noqa: E402

folder = Path(sys.argv[1]).parent
(folder / "kernel.cubin").write_bytes(b"ELF!")
launches = {
    "attention_forward": LaunchInfo(128, 49152, 64, 64, cluster=(1, 2, 1), **PARAMS),
    "combine": LaunchInfo(32, 16, 1, 0, grid=("seqlen_q", "num_heads", "1"), is_dependent=True, **PARAMS),
}
kernels = tuple(RungKernel(entry, launch, 32, 0, 0, 0) for entry, launch in launches.items())
config = KernelConfig.of(dtype="bf16", head_dim=64)
artifact = Artifact("24_made_up", config, "sm_90a", folder, kernels, "forward", compile_seconds=0.0, cached=True)
artifact.__dict__["code"] = "0123"
fast_path.prepare = lambda: None
sizes = {"batch": 3, "num_heads": 4, "seqlen_q": 100, "head_dim": 64}
problem = Problem(**sizes)
call = Call(find("24"), artifact, problem, torch.device("cpu"))
q = torch.zeros(3, 100, 4, 64, dtype=torch.bfloat16)
tensors = Tensors({"q": q, "k": q, "v": q, "o": torch.empty_like(q)}, problem)
print("way Python", flush=True)
call(problem, tensors)
fast_path.load()
print("way C++", flush=True)
assert call.launch_fast((*tensors.by_name.values(), None), problem.softmax_scale)
