"""The tests' small PTX programs on a real GPU, compiled by ptxas: what lanes.Emulated does on the emulator.

They run in a process of its own, which ends with the first program that faults: a fault spoils a CUDA context for good,
and other tests need theirs.
"""

import atexit
import ctypes
import multiprocessing
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.emulator.parse.parser import parse

_worker = None


class OnGpu:
    """Tensors and launches on GPU 0."""

    def __init__(self):
        global _worker
        if _worker is None or not _worker.alive:
            _worker = _Worker()
        self._worker, self._addresses, self._sizes = _worker, {}, {}

    def add(self, name, array, readonly=False, initialised=True):
        """Copies an array's bytes to the GPU; their address there."""
        data = np.ascontiguousarray(array).tobytes()
        self._sizes[name] = len(data)
        self._addresses[name] = self._worker.ask("add", data)
        return self._addresses[name]

    def read(self, name):
        """A copy of a tensor's bytes."""
        return np.frombuffer(self._worker.ask("read", self._addresses[name], self._sizes[name]), np.uint8)

    def run(self, text, params, grid, num_threads, shared_bytes, **_options):
        """Executes the entry `kernel` of a PTX module; options of the emulator are left aside."""
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(text)
            command = [toolchain().ptxas, "-arch=sm_90a", source, "-o", cubin]
            subprocess.run(command, check=True, capture_output=True, text=True)
            code = cubin.read_bytes()
        try:
            self._worker.ask("run", code, params, list(_offsets(text)), grid, num_threads, shared_bytes)
        except RuntimeError as fault:
            raise AssertionError(f"{fault}, in this program:\n{text}") from None


def _offsets(text):
    """Where each parameter of the entry lies among them all. The driver must be told of each: where they lie on the GPU
    depends on their alignment there."""
    at = 0
    for param in parse(text, "kernel").params.values():
        at = -(-at // param.align) * param.align
        yield at
        at += param.size


class _Worker:
    """The process that has the GPU's context."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self.alive = True
        atexit.register(self._pipe.close)

    def ask(self, name, *arguments):
        """What the process answers; RuntimeError with what it says where it cannot, and then it is no more."""
        self._pipe.send((name, arguments))
        try:
            is_right, answer = self._pipe.recv()
        except EOFError:
            is_right, answer = False, "the process has died"
        if not is_right:
            self.alive = False
            self._process.join()
            raise RuntimeError(answer)
        return answer


def _serve(pipe):
    gpu = _Gpu()
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(gpu, name)(*arguments)))
        except RuntimeError as fault:
            pipe.send((False, str(fault)))
            return


class _Gpu:
    """The driver's side."""

    def __init__(self):
        from cuda.bindings import driver

        self._api = driver
        self._checked(driver.cuInit(0))
        context = self._checked(driver.cuDevicePrimaryCtxRetain(self._checked(driver.cuDeviceGet(0))))
        self._checked(driver.cuCtxSetCurrent(context))

    def _checked(self, answer):
        status, *values = answer
        if status:
            raise RuntimeError(f"the driver says {status!r}")
        return values[0] if values else None

    def add(self, data):
        address = self._checked(self._api.cuMemAlloc(max(len(data), 1)))
        source = ctypes.create_string_buffer(data, max(len(data), 1))
        self._checked(self._api.cuMemcpyHtoD(address, ctypes.addressof(source), len(data)))
        return int(address)

    def read(self, address, size):
        found = ctypes.create_string_buffer(size)
        self._checked(self._api.cuMemcpyDtoH(ctypes.addressof(found), address, size))
        return found.raw

    def run(self, cubin, params, offsets, grid, num_threads, shared_bytes):
        api = self._api
        module = self._checked(api.cuModuleLoadData(cubin))
        function = self._checked(api.cuModuleGetFunction(module, b"kernel"))
        attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(api.cuFuncSetAttribute(function, attribute, shared_bytes))
        buffer = ctypes.create_string_buffer(params, len(params))
        arguments = (ctypes.c_void_p * len(offsets))(*(ctypes.addressof(buffer) + offset for offset in offsets))
        where = ctypes.addressof(arguments)
        self._checked(api.cuLaunchKernel(function, grid, 1, 1, num_threads, 1, 1, shared_bytes, 0, where, 0))
        self._checked(api.cuCtxSynchronize())
        self._checked(api.cuModuleUnload(module))
