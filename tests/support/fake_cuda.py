"""A stand-in for torch's GPU and NVIDIA's driver in this process: it notes what is launched, with which arguments.

CPU tensors are taken for ones on GPU -1, whose index they give.
"""

import contextlib
import ctypes
import dataclasses
from types import SimpleNamespace

import torch

from flashladder.common.api import backward, operator, step
from flashladder.common.catalog import launches
from flashladder.common.catalog.ladder import Ladder, Launch
from flashladder.common.compiler import Artifact, translate, translated
from flashladder.common.compiler.artifact import RungKernel
from flashladder.common.emulator import tensor_map
from flashladder.common.problem.config import load_gpu
from flashladder.common.runtime import fast_path, gpu, ready, target

DEVICE = torch.device("cpu")
STREAM = 0x77
PARAMS_BYTES = 160
ATTRIBUTE_BYTES = 72
SWIZZLES = ("NONE", "32B", "64B", "128B")


class _Cluster(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


class _AttributeValue(ctypes.Union):
    _fields_ = [
        ("clusterDim", _Cluster),
        ("programmaticStreamSerializationAllowed", ctypes.c_int),
        ("_all", ctypes.c_char * 64),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("_", ctypes.c_int), ("value", _AttributeValue)]

    def getPtr(self):
        return ctypes.addressof(self)


class Driver:
    """What the driver was asked for: `launches` has grids and arguments."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUtensorMapDataType = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16=9, CU_TENSOR_MAP_DATA_TYPE_FLOAT16=6)
    CUtensorMapSwizzle = SimpleNamespace(**{f"CU_TENSOR_MAP_SWIZZLE_{name}": n for n, name in enumerate(SWIZZLES)})
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_128B=2)
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0)
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6
    )
    CUlaunchAttribute, CUlaunchConfig = LaunchAttribute, SimpleNamespace
    cuuint32_t = cuuint64_t = CUstream = int

    def __init__(self):
        self.loads, self.launches = 0, []
        self.statuses = []  # of the launches to come; then 0
        self.on_launch = lambda: None
        self.names = []  # of the functions; they begin at 1
        self.parts = {}  # of a kernel's arguments, in bytes
        self.variables = {}  # of global memory, by their names: arrays of bytes
        self.memory = []  # that was asked for

    def cuLibraryLoadData(self, image, *_):
        self.loads += 1
        return 0, "library"

    def cuLibraryGetKernel(self, library, name):
        self.names.append(name.decode())
        return 0, len(self.names)

    def cuLibraryGetGlobal(self, library, name):
        if (held := self.variables.get(name.decode())) is None:
            return 500, None, None
        return 0, ctypes.addressof(held), len(held)

    def cuMemcpyDtoH(self, to, address, size):
        ctypes.memmove(to, address, size)
        return (0,)

    def cuMemAlloc(self, size):
        self.memory.append(ctypes.create_string_buffer(b"\xff" * size, size))
        return 0, ctypes.addressof(self.memory[-1])

    def cuMemsetD8(self, address, value, size):
        ctypes.memset(address, value, size)
        return (0,)

    def cuKernelGetFunction(self, kernel):
        return 0, kernel

    def cuFuncSetAttribute(self, *_):
        return (0,)

    def cuTensorMapEncodeTiled(self, kind, rank, address, dims, strides, box, steps, interleave, swizzle, *_):
        made = ctypes.create_string_buffer(_encoded(kind, address, dims, strides, box, swizzle))
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(made))

    def cuLaunchKernel(self, function, *rest):
        *shape, stream, where, _ = rest[:10]
        if self.statuses and (status := self.statuses.pop(0)):
            return (status,)
        name = self.names[function - 1]
        pointers = (ctypes.c_void_p * 3).from_address(where)
        self.on_launch()
        arguments = [
            ctypes.string_at(pointers[n], size) for n, size in enumerate(self.parts.get(name, (PARAMS_BYTES,)))
        ]
        attributes = b"".join(rest[10:])
        launch = SimpleNamespace(function=name, shape=shape, stream=stream, arguments=arguments, attributes=attributes)
        self.launches.append(launch)
        return (0,)

    def cuLaunchKernelEx(self, config, function, where, extra):
        shape = [getattr(config, f"{of}Dim{axis}") for of in ("grid", "block") for axis in "XYZ"]
        attributes = b"".join(map(bytes, config.attrs))
        return self.cuLaunchKernel(function, *shape, config.sharedMemBytes, config.hStream, where, extra, attributes)

    def cuGetErrorName(self, status):
        return 0, b"CUDA_ERROR_MADE_UP"

    def cuGetErrorString(self, status):
        return 0, b"made up"


def _encoded(kind, address, dims, strides, box, swizzle):
    spelled = {9: "bf16", 6: "fp16"}[kind]
    return tensor_map.encode(address, spelled, dims, strides, box, tensor_map.SWIZZLES[swizzle])


def launch_function(driver):
    """The driver's launch as C knows it, cuLaunchKernelEx; it must be kept."""
    pointer = ctypes.c_void_p

    def launched(config, function, where, extra):
        given = config.contents
        attributes = ctypes.string_at(given.attributes, ATTRIBUTE_BYTES * given.num_attributes)
        return driver.cuLaunchKernel(function, *given.shape, given.stream or 0, where, extra, attributes)[0]

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(LaunchConfig), pointer, pointer, pointer)(launched)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("shape", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


def install(monkeypatch, gpu_name="h100"):
    """Puts the stand-in in the place of GPU, driver and target; gives the driver."""
    made, described = Driver(), load_gpu(gpu_name)
    properties = SimpleNamespace(name="Made-up GPU", multi_processor_count=3, shared_memory_per_multiprocessor=233472)
    for name, value in {
        "is_available": True,
        "init": None,
        "synchronize": None,
        "current_device": torch.zeros(1).get_device(),
        "set_device": None,
        "is_current_stream_capturing": False,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "device": contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    capturing = lambda: torch.cuda.is_current_stream_capturing()  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: torch.cuda.current_device(), raising=False)
    monkeypatch.setattr(gpu, "driver", lambda: made)
    monkeypatch.setattr(gpu, "_loaded", {})
    made.kept = launch_function(made)
    address = ctypes.cast(made.kept, ctypes.c_void_p).value
    monkeypatch.setattr(gpu.LoadedKernel, "launch_address", lambda kernel: address)
    monkeypatch.setattr(fast_path, "prepare", lambda: None)
    monkeypatch.setattr(fast_path, "extension", None)
    monkeypatch.setattr(fast_path, "node", None)
    here = target.Target(on_gpu=True, arch=described.arch, gpu=described)
    monkeypatch.setattr(target, "resolve", lambda *_: here)
    return made


def for_attention(monkeypatch, gpu_name="h100"):
    """The same, with nothing ready yet and CPU tensors taken for ones on the GPU by `attention`; gives the driver."""
    forget_kernels(monkeypatch)
    monkeypatch.setattr(step, "planned", {})
    monkeypatch.setattr(operator, "planned", {})
    monkeypatch.setattr(ready, "is_gpu", lambda tensor: True)
    monkeypatch.setattr(ready, "build_one", unassembled)
    monkeypatch.setattr(ready, "cached", translated)
    return install(monkeypatch, gpu_name)


class Unassembled(Artifact):
    """One whose machine code is its PTX: what this driver loads it does not run."""

    cubin = Artifact.ptx

    @property
    def code(self):
        return self.ptx.read_text()


def unassembled(version, config, arch):
    """As `build_one`, without the time that ptxas takes."""
    module = translate(version, config, arch)
    fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}
    fields["kernels"] = tuple(
        RungKernel(kernel.entry, kernel.launch, registers=32, spill_store_bytes=0, spill_load_bytes=0, stack_bytes=0)
        for kernel in module.kernels
    )
    return Unassembled(**{**fields, "compile_seconds": 0.0, "cached": False})  # a module of the cache may have both


def forget_kernels(monkeypatch):
    """Nothing was called before."""
    ready._widths.cache_clear()
    for module, name in ((ready, "by_kind"), (ready, "_kernels"), (operator, "plain"), (backward, "planned")):
        monkeypatch.setattr(module, name, {})


def launch_only(monkeypatch, *rungs):
    """Calls launch these rungs alone, between which winners decide."""
    by_name = {rung.name: rung for rung in rungs}
    ladder = Ladder(launches=tuple(Launch(rung=name, rival=True) for name in by_name))
    monkeypatch.setattr(launches, "find", by_name.__getitem__)
    monkeypatch.setattr(launches, "ladder_of", lambda operation: ladder)
