"""A rung that stands ready on a GPU, for calls that come often: what does not depend on the tensors is done once.

`execute.on_gpu` is the same at leisure, and says what is wrong with tensors. A call takes those that are plainly right,
and leaves the others to it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch

from flashladder.common.catalog import Version
from flashladder.common.compiler.artifact import Artifact, RungKernel
from flashladder.common.compiler.declaration import Workspace
from flashladder.common.emulator.tensor_map import NUM_BYTES
from flashladder.common.problem.problem import SCALES
from flashladder.common.runtime import gpu, quick
from flashladder.common.runtime.launch import (
    ALIGNMENT,
    ELEMENT_BYTES,
    MAX_GRID_YZ,
    MAX_ROW_STRIDE,
    SIZES,
    by_sizes,
    check_runnable,
    count_of,
    grid_of,
    mapped,
    sized,
)
from flashladder.common.runtime.overlap import is_apart_in_itself, span

_PARAMS = struct.Struct("=5Q12q5if")  # as launch.AttentionParams
_POINTER = struct.Struct("=Q")
NO_SIZES = (1, 1, 1, 1, 1)  # for what does not depend on them
RESERVE = 1024  # counters that are zero from the beginning: for so many streams and captured calls
_TENSORS = ("q", "k", "v", "o")  # in this order throughout

Sizes = tuple[int, int, int, int, int]  # launch.SIZES
LaunchShape = tuple[object, ...]  # of a launch, as cuLaunchKernel takes it: function, grid, threads, shared memory


class Call:
    """The kernels of an artifact of the forward pass on a GPU; calling it launches them on torch's current stream.

    Any thread may call it, and a CUDA graph may capture it.
    """

    def __init__(self, rung: Version, artifact: Artifact, device: torch.device) -> None:
        config, supports, index = artifact.config, rung.supports, quick.number(device)
        self._device, self._gqa, self._dtype = index, supports.gqa, str(config.dtype)
        self._row_stride = config.row_stride if "row_stride" in config.fields else None
        self._multiples = [
            1 if tile == "any" else getattr(config, tile) for tile in (supports.seqlen_q, supports.seqlen_k)
        ]
        with torch.cuda.device(device):
            self._kernel = gpu.load(artifact)
            self._launches = [_OneLaunch(self._kernel, each, index) for each in artifact.kernels]
            self._workspaces = [_lender(self._kernel, each) for each in artifact.workspaces]
            torch.cuda.synchronize()  # counters are zero, for any stream
            self._plan = self._planned(device)
        self.plan_at = ctypes.addressof(self._plan) if self._plan else 0  # for quick.cpp
        quick.prepare()
        self._spare: list[_ArgumentMemory] = []  # memory of calls that are over: a thread takes what no other has

    def _planned(self, device: torch.device) -> quick.Plan | None:
        counters = [each for each in self._workspaces if isinstance(each, ZeroedMemory)]
        if len(counters) > 1 or len(counters) < len(self._workspaces):
            return None
        return quick.plan(
            self._kernel,
            device,
            self._launches[0].most_ctas,
            counters[0] if counters else None,
            gqa=self._gqa,
            multiple_q=self._multiples[0],
            multiple_k=self._multiples[1],
            row_stride=self._row_stride or 0,
        )

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
    ) -> bool:
        """Whether it launched. False, with nothing done, for what `on_gpu` should look at.

        q, k, v and o are (batch, seqlen, heads, head_dim), of any strides; q is of the artifact's dtype and head_dim,
        on its GPU. lse is contiguous, and as the artifact writes it; or None. DeviceError where the driver refuses.
        """
        if torch.cuda.current_device() == self._device:
            return self._launched(q, k, v, o, lse, softmax_scale)
        with torch.cuda.device(self._device):
            return self._launched(q, k, v, o, lse, softmax_scale)

    def _launched(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
    ) -> bool:
        """In C++, if that is there and manages it. The device is current."""
        if self.plan_at and quick.extension and quick.extension.launch(self.plan_at, q, k, v, o, lse, softmax_scale):
            return True
        return self._in_python(q, k, v, o, lse, softmax_scale)

    def _in_python(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
    ) -> bool:
        sizes = self._sizes(q, k, v, o)
        if sizes is None or not SCALES[0] <= softmax_scale <= SCALES[1]:
            return False
        strides = q.stride(), k.stride(), v.stride(), o.stride()
        pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
        shapes = [shape for launch in self._launches if (shape := launch.shape(sizes))]
        if len(shapes) < len(self._launches) or not self._takes((q, k, v, o), pointers, strides):
            return False
        try:
            arguments = self._spare.pop()
        except IndexError:
            arguments = _ArgumentMemory(len(self._workspaces), self._launches)
        of_q, of_k, of_v, of_o = strides
        lse_pointer = 0 if lse is None else lse.data_ptr()
        steps = *of_q[:3], *of_k[:3], *of_v[:3], *of_o[:3]
        _PARAMS.pack_into(arguments.memory, 0, *pointers, lse_pointer, *steps, *sizes, softmax_scale)
        for place, each in arguments.maps:
            number = _TENSORS.index(each.tensor)
            tensor, stride = (q, k, v, o)[number], strides[number]
            made = self._kernel.tensor_map(mapped(each, pointers[number], self._dtype, tensor.shape, stride[:3]))
            ctypes.memmove(place, made, NUM_BYTES)
        self._run(arguments, shapes, sizes, q)
        self._spare.append(arguments)
        return True

    def _sizes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> Sizes | None:
        """Those of tensors that belong together, and that the rung takes."""
        shape, shape_k = q.shape, k.shape
        if len(shape) != 4 or len(shape_k) != 4:
            return None
        batch, seqlen_q, num_heads, head_dim = shape
        batch_k, seqlen_k, num_heads_k, head_dim_k = shape_k
        multiple_q, multiple_k = self._multiples
        if (
            (batch, head_dim) == (batch_k, head_dim_k)
            and (shape, shape_k) == (o.shape, v.shape)
            and q.dtype == k.dtype == v.dtype == o.dtype
            and self._device == k.get_device() == v.get_device() == o.get_device()
            and (batch and seqlen_q and seqlen_k and num_heads and num_heads_k)
            and (num_heads == num_heads_k or (self._gqa and num_heads % num_heads_k == 0))
            and seqlen_q % multiple_q == seqlen_k % multiple_k == 0
        ):
            return batch, num_heads, num_heads_k, seqlen_q, seqlen_k
        return None

    def _takes(
        self, tensors: Sequence[torch.Tensor], pointers: Sequence[int], strides: Sequence[Sequence[int]]
    ) -> bool:
        """Whether rows are contiguous and begin where copies of 16 bytes may; and O is before or behind each input."""
        q, k, v, o = strides
        rows = q[1], k[1], v[1], o[1]
        steps = q[0] | q[1] | q[2] | k[0] | k[1] | k[2] | v[0] | v[1] | v[2] | o[0] | o[1] | o[2]
        return (
            q[3] == k[3] == v[3] == o[3] == 1
            and steps * ELEMENT_BYTES % ALIGNMENT == 0
            and (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % ALIGNMENT == 0
            and max(rows) <= MAX_ROW_STRIDE
            and (self._row_stride is None or rows == (self._row_stride,) * 4)
            and (tensors[3].is_contiguous() or is_apart_in_itself(tensors[3].shape, o))
            and _is_apart_from_the_last(tensors, pointers, strides)
        )

    def _run(self, arguments: _ArgumentMemory, shapes: Sequence[LaunchShape], sizes: Sizes, q: torch.Tensor) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        lent = [lend(q, stream, sizes) for lend in self._workspaces]  # the allocator waits until the stream is done
        for place, memory in enumerate(lent):
            _POINTER.pack_into(arguments.memory, _PARAMS.size + place * _POINTER.size, _address(memory))
        status = self._status(arguments, shapes, stream)
        if status == gpu.NO_CONTEXT:  # this thread has not used the GPU yet
            torch.cuda.synchronize()  # makes its context current
            status = self._status(arguments, shapes, stream)
        if status:
            self._kernel.checked("launch", (status,))

    def _status(self, arguments: _ArgumentMemory, shapes: Sequence[LaunchShape], stream: int) -> int:
        """What the driver says of the launches: 0, or the first error."""
        for shape, where in zip(shapes, arguments.where, strict=True):
            (status,) = self._kernel.driver.cuLaunchKernel(*shape, stream, where, 0)
            if status:
                return int(status)
        return 0


def _is_apart_from_the_last(
    tensors: Sequence[torch.Tensor], pointers: Sequence[int], strides: Sequence[Sequence[int]]
) -> bool:
    begin = pointers[3]
    end = begin + ELEMENT_BYTES * span(tensors[3].shape, strides[3])
    for tensor, first, stride in zip(tensors[:3], pointers, strides, strict=False):
        if first < end and begin < first + ELEMENT_BYTES * span(tensor.shape, stride):
            return False
    return True


def _address(memory: torch.Tensor | int) -> int:
    return memory if isinstance(memory, int) else memory.data_ptr()


def _lender(kernel: gpu.LoadedKernel, workspace: Workspace) -> Callable[[torch.Tensor, int, Sizes], torch.Tensor | int]:
    """What gives a workspace to a call, or its address where it stays."""
    artifact = kernel.artifact
    count, make = count_of(workspace), torch.zeros if workspace.zeroed else torch.empty
    elements = by_sizes(count, artifact, artifact.launch)
    if workspace.zeroed and count.names.isdisjoint(SIZES):
        return ZeroedMemory(sized(workspace, elements(*NO_SIZES)), kernel)

    def lend(q: torch.Tensor, stream: int, sizes: Sizes) -> torch.Tensor:
        return make(sized(workspace, elements(*sizes)), dtype=torch.uint8, device=q.device)

    return lend


class ZeroedMemory:
    """Memory that kernels find zero and leave zero, so that the host need not clear it.

    Runs of one stream follow each other, and share it. A graph may run beside any stream: what is captured has its own.
    """

    def __init__(self, num_bytes: int, kernel: gpu.LoadedKernel) -> None:
        begin = kernel.zeros(RESERVE * num_bytes)
        self._unused = list(range(begin, begin + RESERVE * num_bytes, num_bytes))
        self.of_stream: dict[int, int] = {}
        self._num_bytes = num_bytes

    def __call__(self, q: torch.Tensor, stream: int, sizes: Sizes = NO_SIZES) -> torch.Tensor | int:
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and stream in self.of_stream:
            return self.of_stream[stream]
        try:
            address = self._unused.pop()
        except IndexError:
            return torch.zeros(self._num_bytes, dtype=torch.uint8, device=q.device)
        return address if capturing else self.of_stream.setdefault(stream, address)


class _OneLaunch:
    """What of a kernel's launch does not depend on the tensors."""

    def __init__(self, loaded: gpu.LoadedKernel, kernel: RungKernel, device: int) -> None:
        launch = kernel.launch
        check_runnable(loaded.artifact, kernel.entry, launch, _PARAMS.size)
        self._function = loaded.function(device, kernel.entry)
        self._grid = by_sizes(grid_of(kernel.entry, launch), loaded.artifact, launch)
        self.most_ctas = launch.ctas_per_sm * gpu.num_sms()
        self._cta = launch.num_threads, 1, 1, launch.shared_bytes
        self.tensor_maps = launch.tensor_maps

    def shape(self, sizes: Sizes) -> LaunchShape | None:
        """None where the grid is larger than CUDA allows."""
        x, y, z = self._grid(*sizes)
        if self.most_ctas:
            return self._function, min(x * y * z, self.most_ctas), 1, 1, *self._cta
        if y > MAX_GRID_YZ or z > MAX_GRID_YZ:
            return None
        return self._function, x, y, z, *self._cta


class _ArgumentMemory:
    """Memory for what kernels are launched with: the parameters, pointers to workspaces, and each kernel's maps."""

    def __init__(self, num_workspaces: int, launches: Sequence[_OneLaunch]) -> None:
        ends = [_PARAMS.size, _PARAMS.size + num_workspaces * _POINTER.size]
        for launch in launches:
            ends.append(ends[-1] + len(launch.tensor_maps) * NUM_BYTES)
        self.memory = ctypes.create_string_buffer(ends[-1])
        base = ctypes.addressof(self.memory)
        shared = [base, *([base + ends[0]] if num_workspaces else [])]
        self._pointers = [
            (ctypes.c_void_p * 3)(*shared, *([base + begin] if launch.tensor_maps else []))
            for launch, begin in zip(launches, ends[1:], strict=False)
        ]
        self.where = [ctypes.addressof(each) for each in self._pointers]
        self.maps = [  # where each lies
            (base + begin + NUM_BYTES * number, each)
            for launch, begin in zip(launches, ends[1:], strict=False)
            for number, each in enumerate(launch.tensor_maps)
        ]
