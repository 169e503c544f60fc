"""What runs a kind of problem on a device: chosen, built and loaded at the first call for it, then kept."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

import torch

from flashladder.common.catalog import FASTEST, ROW_STRIDE, Version, Widths, choice, find, kind_of, widths
from flashladder.common.catalog.winners import of_each_length
from flashladder.common.compiler import PtxModule, build_one, cached, prebuilt, translate, translated
from flashladder.common.console import warn
from flashladder.common.errors import DeviceError, UnsupportedProblemError
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors, allocate
from flashladder.common.problem.kind import SHORT, Kind
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import overlap, target
from flashladder.common.runtime.calls import Call
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.runtime.launch import PROBLEMS_KEPT, as_kernels_read
from flashladder.common.runtime.plan import Plan
from flashladder.common.runtime.target import Target

QUIET = "FLASHLADDER_QUIET"
Made = TypeVar("Made", bound=PtxModule)
_preparing = threading.Lock()


@dataclass(frozen=True)
class Ready:
    """A rung, configured and built for problems of a kind on a device; without `call` on the emulator."""

    rung: Version
    artifact: PtxModule
    call: Call | None

    @cached_property
    def check(self) -> Callable[[Problem], None]:
        """Raises UnsupportedProblemError for a problem that the rung does not take."""
        return lru_cache(PROBLEMS_KEPT)(lambda problem: self.rung.check(problem, self.artifact.config))

    @property
    def plan(self) -> Plan | None:
        """What fast_path.cpp launches by, which asks for it."""
        return self.call.plan if self.call else None

    def launch(self, problem: Problem, tensors: dict[str, torch.Tensor], out_is_given: bool = False) -> None:
        """Computes a problem of the kind on tensors, by their names; outputs among them, the first perhaps a caller's.

        In C++ what is plainly right; else by Python, or the emulator, from copies of inputs of other strides than
        kernels read. UnsupportedProblemError where they will not do.
        """
        if self.call and self.plan:
            ordered = [tensors.get(name) for name in problem.tensors]
            if self.call.launch_fast(ordered, problem.softmax_scale):
                return
        self.check(problem)
        if out_is_given:
            check_out(tensors["o"], tensors["q"], problem.head_dim_v)
        read = as_kernels_read(problem, tensors)
        if out_is_given:
            check_apart(tensors["o"], {name: tensors[name] for name in problem.inputs})
        if self.call:
            self.call.launch(problem, Tensors(read, problem))
        else:
            self._emulate(problem, read)

    def _emulate(self, problem: Problem, tensors: dict[str, torch.Tensor]) -> None:
        """On copies of the tensors, in memory whose bounds the emulator knows."""
        copies = allocate(problem)
        for name in problem.inputs:
            copies.by_name[name].copy_(tensors[name])
        on_emulator(self.artifact, problem, copies, race=False)
        for name in (*problem.outputs, *problem.updated):
            tensors[name].copy_(copies.by_name[name])


# By kind, version, device and, where a rung is compiled for one, stride between rows. They only grow, which
# fast_path.cpp relies on; kinds have no sizes, so that there are few.
by_kind: dict[tuple[Kind, str, torch.device, int], Ready] = {}
_kernels: dict[tuple[Kind, Version, KernelConfig, torch.device], Ready] = {}  # kinds of all sizes share them


def ready_for(problem: Problem, device: torch.device, version: str = FASTEST) -> Ready:
    """What runs problems of this kind on a device; made ready at the first call for it."""
    key = _key(problem, version, device)
    return by_kind.get(key) or _prepare(key, problem)


def is_gpu(device: torch.device) -> bool:
    """Whether kernels are launched on it, not emulated."""
    return device.type == "cuda"


def choice_for(problem: Problem, device: torch.device, version: str = FASTEST) -> tuple[Version, KernelConfig]:
    """The rung that runs a problem on a device, and its configuration; UnsupportedProblemError for none."""
    return _choice(problem, version, device, is_gpu(device))


@torch.compiler.assume_constant_result
def widths_for(operation: str, device: torch.device, mods: bool = False) -> Widths:
    """What tensors of an operation, or with `mods` of one beside expressions, may have on a device without copies."""
    return _widths(operation, device, is_gpu(device), mods)


def check_out(out: torch.Tensor, q: torch.Tensor, head_dim_v: int) -> None:
    """Raises UnsupportedProblemError unless O, which is like q but for its columns, has room there."""
    shape = (*q.shape[:3], head_dim_v)
    if (tuple(out.shape), out.dtype, out.device) != (shape, q.dtype, q.device):
        raise UnsupportedProblemError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; O is {shape} {q.dtype} on {q.device}"
        )
    if not overlap.is_apart_in_itself(out.shape, out.stride()):
        raise UnsupportedProblemError(
            f"out has strides {out.stride()}, by which elements lie on each other; it takes memory for each"
        )


def check_apart(out: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
    """Raises UnsupportedProblemError where O would be written over an input."""
    for name, tensor in inputs.items():
        if overlap.share(out, tensor):
            raise UnsupportedProblemError(f"out shares memory with {name}; it takes memory of its own")


def _key(problem: Problem, version: str, device: torch.device) -> tuple[Kind, str, torch.device, int]:
    stride = problem.num_heads * problem.head_dim if _has_row_stride(version) else 0
    return kind_of(problem), version, device, stride


@lru_cache(PROBLEMS_KEPT)
def _has_row_stride(version: str) -> bool:
    return version != FASTEST and ROW_STRIDE in find(version.partition("@")[0]).choices


def _prepare(key: tuple[Kind, str, torch.device, int], problem: Problem) -> Ready:
    """What runs on a device: as tuned for it, or the rung's default. Compiles it if it must.

    With it what runs for keys of the other class of lengths: generation may come to them.
    """
    _, version, device, _ = key
    gpu = is_gpu(device)
    with _preparing:
        if key in by_kind:  # another thread has been here
            return by_kind[key]
        if not gpu and device.type != "cpu":
            raise UnsupportedProblemError(f"q is on {device}; kernels run on NVIDIA's GPUs, or emulated on the CPU")
        if gpu and torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                "the first call for tensors of a kind loads a kernel, which a CUDA graph cannot capture: "
                f"call attention once before the capture, on such tensors: {problem.name}"
            )
        with torch.cuda.device(device if gpu else -1):
            made = {_key(each, version, device): _kernel(each, version, device) for each in of_each_length(problem)}
        by_kind.update(made)
        return made[key]


def _kernel(problem: Problem, version: str, device: torch.device) -> Ready:
    """One of those that are kept, or a new one."""
    gpu = is_gpu(device)
    place = target.resolve("gpu" if gpu else "emulator", None)
    rung, config = choice(problem, place.card, version)
    of_any_size = replace(kind_of(problem), gqa=False, length=SHORT, classes=())
    key = of_any_size, rung, config, device
    if key not in _kernels:
        _kernels[key] = _made(rung, config, place, problem, device if gpu else None)
    return _kernels[key]


def _made(rung: Version, config: KernelConfig, place: Target, problem: Problem, device: torch.device | None) -> Ready:
    """The rung, built and loaded where there is a device; what the emulator runs of it where there is none."""
    kernel = rung, config, place.arch
    if device is None:
        module = _told(translated, translate, kernel)
        place.check(module)
        return Ready(rung, module, None)
    artifact = prebuilt.find(*kernel) or _told(cached, build_one, kernel)
    place.check(artifact)
    return Ready(rung, artifact, Call(rung, artifact, problem, device))


def _told(
    find: Callable[..., Made | None], make: Callable[..., Made], kernel: tuple[Version, KernelConfig, str]
) -> Made:
    """From the cache, or compiled, which takes seconds: that is told, unless FLASHLADDER_QUIET is set."""
    if os.environ.get(QUIET) or find(*kernel):
        return make(*kernel)
    rung, config, arch = kernel
    warn(f"compiling {rung.name} for {arch}, once, which takes some seconds: {config}")
    begin = time.monotonic()
    made = make(*kernel)
    warn(f"compiled in {time.monotonic() - begin:.1f} s")
    return made


@lru_cache(PROBLEMS_KEPT)
def _widths(operation: str, device: torch.device, gpu: bool, mods: bool) -> Widths:
    with torch.cuda.device(device if gpu else -1):
        return widths(operation, target.resolve("gpu" if gpu else "emulator", None).arch, not gpu, mods)


@lru_cache(PROBLEMS_KEPT)
def _choice(problem: Problem, version: str, device: torch.device, gpu: bool) -> tuple[Version, KernelConfig]:
    with torch.cuda.device(device if gpu else -1):
        return choice(problem, target.resolve("gpu" if gpu else "emulator", None).card, version)
