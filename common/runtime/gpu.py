"""A compiled kernel on the GPU: loaded through the driver API, launched on torch's current stream.

Importing this file needs no GPU; `require_gpu`, `load` and everything after it raise DeviceError without one.
"""

from __future__ import annotations

import ctypes
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from importlib import import_module
from statistics import median
from typing import Any, Protocol

import torch

from flashladder.common.compiler.artifact import Artifact
from flashladder.common.emulator import tensor_map
from flashladder.common.emulator.tensor_map import TensorMap
from flashladder.common.errors import DeviceError
from flashladder.common.problem.config import KernelConfig
from flashladder.common.runtime.launch import KernelLaunch, Launcher

Launch = Callable[[], None]
PORTABLE_CLUSTER = 8  # CTAs; not every GPU has room for more
MAPS_KEPT = 256  # of a kernel
CYCLES_PER_US = 2000  # of a kernel that holds a queue; GPUs clock a little lower, so it holds a little longer
BATCH, ROUNDS, WARMUP_ROUNDS = 100, 20, 5  # of calls whose cost for the host is measured
CALLS = BATCH * (ROUNDS + WARMUP_ROUNDS)  # of each
_loaded: dict[tuple[object, ...], LoadedKernel] = {}


def require_gpu() -> None:
    """Raises DeviceError, saying what was found, unless torch can use an NVIDIA GPU."""
    if torch.cuda.is_available():
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise DeviceError("there is no NVIDIA driver on this machine (libcuda.so.1 was not found)") from None
    if torch.version.cuda is None:
        raise DeviceError(f"torch {torch.__version__} is a build without CUDA: install a CUDA build of torch")
    raise DeviceError(
        f"there is an NVIDIA driver, but torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable GPU: "
        "see nvidia-smi and CUDA_VISIBLE_DEVICES"
    )


def device_arch(device: int | None = None) -> str:
    """What to compile for on a CUDA device: sm_80, sm_89, and from Hopper on with the arch's own features, sm_90a."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def num_sms() -> int:
    """SMs of the current device."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def load(artifact: Artifact) -> LoadedKernel:
    """The artifact's kernels; DeviceError where there is no GPU or the driver refuses it.

    Artifacts that are the same, wherever they lie and whether or not they were compiled just now, are loaded once.
    """
    same = describe(artifact), artifact.arch, artifact.code, artifact.kernels, artifact.workspaces
    if same not in _loaded:
        require_gpu()
        torch.cuda.init()
        _loaded[same] = LoadedKernel(artifact)
    return _loaded[same]


class _Arguments:
    """What a kernel is launched with: parameters, pointers to workspaces, tensor maps, without those it has not."""

    def __init__(self, *parts: bytes) -> None:
        self._packed = [ctypes.create_string_buffer(part, len(part)) for part in parts if part]
        self._addresses = (ctypes.c_void_p * len(self._packed))(*map(ctypes.addressof, self._packed))
        self.where = ctypes.addressof(self._addresses)


class LoadedKernel:
    """A loaded cubin and its kernels, until the process ends. It may be launched on any device that its arch suits."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact, self.launcher = artifact, Launcher(artifact)
        self.driver = driver()
        no_options = (None, None, 0)
        image = artifact.cubin.read_bytes()
        self._library = self.checked("load", self.driver.cuLibraryLoadData(image, *no_options, *no_options))
        self._kernels = {kernel.entry: self._found(kernel.entry) for kernel in artifact.kernels}
        self._functions: dict[tuple[int, str], Any] = {}
        self._maps: dict[tuple[object, ...], bytes] = {}  # by all but the address

    def prepare(self, launches: Sequence[KernelLaunch], workspaces: Sequence[torch.Tensor | int] = ()) -> Launch:
        """A callable that launches the kernels on torch's current stream of the device that is current now.

        Everything is packed here, so that a launch costs the host a few microseconds; it can be captured in a CUDA
        graph. The tensors must outlive it. A workspace is a tensor, or the address of memory that stays.
        """
        device = torch.cuda.current_device()
        torch.cuda.set_device(device)  # makes its context current in this thread, which the driver's calls need
        pointers = struct.pack(f"{len(workspaces)}Q", *map(address_of, workspaces))
        arguments = [
            _Arguments(each.params, pointers, b"".join(map(self.tensor_map, each.tensor_maps))) for each in launches
        ]
        starts = [
            self._start(self.function(device, each.entry), each, given.where)
            for each, given in zip(launches, arguments, strict=True)
        ]
        current_device = torch.cuda.current_device
        current_stream = torch._C._cuda_getCurrentRawStream  # what torch's own generated code calls

        def launch(_keep_alive: object = (arguments, workspaces)) -> None:
            if current_device() != device:
                with torch.cuda.device(device):
                    return launch()
            stream = current_stream(device)
            for start in starts:
                (status,) = start(stream)
                if status:
                    self.checked("launch", (status,))
            return None

        return launch

    def _start(self, function: Any, launch: KernelLaunch, where: int) -> Callable[[int], tuple[Any]]:
        """What launches a kernel on a stream."""
        driver, shape = self.driver, (*launch.grid, launch.num_threads, 1, 1, launch.shared_bytes)
        if not (attributes := self.attributes(launch.cluster, launch.is_dependent)):
            return lambda stream: driver.cuLaunchKernel(function, *shape, stream, where, 0)

        def start(stream: int) -> tuple[Any]:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ, *cta, config.sharedMemBytes = shape
            config.blockDimX, config.blockDimY, config.blockDimZ = cta
            config.hStream, config.attrs, config.numAttrs = driver.CUstream(stream), attributes, len(attributes)
            return driver.cuLaunchKernelEx(config, function, where, 0)

        return start

    def attributes(self, cluster: Sequence[int], is_dependent: bool) -> list[Any]:
        """What the driver is told of a launch beside its shape."""
        made: list[Any] = []
        if math.prod(cluster) > 1:
            made.append(self.driver.CUlaunchAttribute())
            made[-1].id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value = made[-1].value
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster
        if is_dependent:
            made.append(self.driver.CUlaunchAttribute())
            made[-1].id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            made[-1].value.programmaticStreamSerializationAllowed = 1
        return made

    def read_variable(self, name: str) -> bytes:
        """What a variable of global memory holds on the current device, when all launches are done."""
        address, size = self._variable(name)
        held = ctypes.create_string_buffer(size)
        self.checked(f"read {name} of", self.driver.cuMemcpyDtoH(ctypes.addressof(held), address, size))
        return held.raw

    def clear_variable(self, name: str) -> None:
        """Sets a variable of global memory to zero on the current device."""
        address, size = self._variable(name)
        self.checked(f"clear {name} of", self.driver.cuMemsetD8(address, 0, size))

    def zeros(self, num_bytes: int) -> int:
        """Memory of the current device, cleared, until the process ends. torch's pools, as of CUDA graphs, own none."""
        status, address = self.driver.cuMemAlloc(num_bytes)
        self.checked(f"find {num_bytes} bytes of memory for", (status,))
        self.checked("clear memory for", self.driver.cuMemsetD8(address, 0, num_bytes))
        return int(address)

    def _variable(self, name: str) -> tuple[Any, int]:
        torch.cuda.synchronize()  # launches are done, and there is a context
        status, address, size = self.driver.cuLibraryGetGlobal(self._library, name.encode())
        self.checked(f"find {name} in", (status,))
        return address, int(size)

    def occupancy(self) -> int:
        """How many CTAs of the main kernel an SM of the current device holds at a time."""
        info = self.artifact.launch
        function = self.function(torch.cuda.current_device(), self.artifact.entry)
        query = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(self.checked("ask the occupancy of", query(function, info.num_threads, info.shared_bytes)))

    def launch_address(self) -> int:
        """Where cuLaunchKernelEx lies; 0 where a driver lacks it."""
        found = getattr(ctypes.CDLL("libcuda.so.1"), "cuLaunchKernelEx", None)
        return ctypes.cast(found, ctypes.c_void_p).value or 0 if found else 0

    def tensor_map(self, mapped: TensorMap) -> bytes:
        """The 128 bytes that TMA reads, as the driver makes them: once for tensors that differ in addresses alone."""
        kind = (mapped.dtype, mapped.dims, mapped.strides, mapped.box, mapped.swizzle_bytes)
        if (alike := self._maps.get(kind)) is not None:
            return tensor_map.at(alike, mapped.address)
        made = self._encoded(mapped)
        if not self._maps and made != tensor_map.encode(*astuple(mapped)):
            return made  # this driver's maps are others: it makes them all
        if len(self._maps) == MAPS_KEPT:
            self._maps.clear()
        self._maps[kind] = made
        return made

    def _encoded(self, mapped: TensorMap) -> bytes:
        """A map, by the driver."""
        driver = self.driver
        types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
        kind = {
            "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            "fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        }[mapped.dtype]
        swizzle = {
            0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
            64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        }[mapped.swizzle_bytes]
        found = self.checked(
            "map a tensor for",
            driver.cuTensorMapEncodeTiled(
                kind,
                len(mapped.dims),
                mapped.address,
                [driver.cuuint64_t(count) for count in mapped.dims],
                [driver.cuuint64_t(stride) for stride in mapped.strides],
                [driver.cuuint32_t(count) for count in mapped.box],
                [driver.cuuint32_t(1)] * len(mapped.dims),
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
        )
        return ctypes.string_at(found.getPtr(), 128)

    def _found(self, entry: str) -> Any:
        return self.checked(f"find {entry} in", self.driver.cuLibraryGetKernel(self._library, entry.encode()))

    def function(self, device: int, entry: str) -> Any:
        """A kernel on the current device, `device`, allowed its dynamic shared memory."""
        if (device, entry) not in self._functions:
            torch.cuda.synchronize()  # makes the device's context, which the driver's calls need
            function = self.checked("load", self.driver.cuKernelGetFunction(self._kernels[entry]))
            kinds, set_to = self.driver.CUfunction_attribute, self.driver.cuFuncSetAttribute
            launch = next(kernel.launch for kernel in self.artifact.kernels if kernel.entry == entry)
            self.checked(
                f"reserve {launch.shared_bytes} bytes of shared memory for",
                set_to(function, kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes),
            )
            if (size := math.prod(launch.cluster)) > PORTABLE_CLUSTER:
                allowed = set_to(function, kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
                self.checked(f"allow clusters of {size} CTAs for", allowed)
            self._functions[device, entry] = function
        return self._functions[device, entry]

    def checked(self, action: str, answer: tuple[Any, ...]) -> Any:
        """The value of a driver call's answer; DeviceError where its status is not success."""
        status, *values = answer
        if status:
            raise DeviceError(f"cannot {action} {describe(self.artifact)}: {self._reason(status)}")
        return values[0] if values else None

    def _reason(self, status: Any) -> str:
        _, name = self.driver.cuGetErrorName(status)
        _, text = self.driver.cuGetErrorString(status)
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        return (
            f"{_text(name)} ({_text(text)}). It was built for {self.artifact.arch}; the device is a {device.name} "
            f"({device_arch()}, {device.shared_memory_per_multiprocessor} bytes of shared memory an SM)"
        )


class Named(Protocol):
    """A configured kernel: an artifact, or a reference with its configuration."""

    @property
    def version(self) -> str: ...

    @property
    def config(self) -> KernelConfig: ...


def address_of(memory: torch.Tensor | int) -> int:
    """Of a tensor, or one that is given as it is."""
    return memory if isinstance(memory, int) else memory.data_ptr()


def describe(kernel: Named) -> str:
    """The kernel and its configuration, for messages."""
    return f"{kernel.version} with {kernel.config.name}"


@contextmanager
def faults_named(kernel: Named) -> Iterator[None]:
    """Wait for the GPU at the end, and turn a fault of the kernel into a DeviceError that names it."""
    try:
        yield
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "CUDA error" not in str(error):
            raise
        raise DeviceError(
            f"{describe(kernel)} faulted: {str(error).splitlines()[0]}. This process can no longer use the GPU; "
            "compute-sanitizer names the line: compute-sanitizer python tools/run_version.py ... --no-measure"
        ) from error


def host_costs_us(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The host's time for one of each of the calls, in microseconds: the median over rounds.

    In a round each has its turn, a batch that the GPU's queue can hold, so that all meet the CPU in the same states.
    The first rounds, in which it comes up to its clock, are not counted.
    """
    costs: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARMUP_ROUNDS + ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(BATCH):
                call()
            costs[name].append((time.perf_counter() - begin) / BATCH * 1e6)
    torch.cuda.synchronize()
    return {name: median(of_rounds[WARMUP_ROUNDS:]) for name, of_rounds in costs.items()}


def driver() -> Any:
    """NVIDIA's driver API; DeviceError where its bindings are missing."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(f'cuda-bindings is not usable ({error}): pip install "cuda-bindings>=13.0.3,<14"') from error


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
