"""The tests' small PTX programs on a real GPU, compiled by ptxas: what lanes.Emulated does on the emulator."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from flashladder.common.build.toolchain import toolchain
from flashladder.common.emulator.parse import parse
from flashladder.common.run.gpu import device_arch, driver, require_gpu


class OnGpu:
    """Tensors and launches on the current GPU."""

    def __init__(self):
        require_gpu()
        torch.cuda.init()
        self._tensors = {}

    def add(self, name, array, readonly=False, initialised=True):
        """Copies an array's bytes to the GPU; their address there."""
        data = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()).cuda()
        self._tensors[name] = data
        return data.data_ptr()

    def read(self, name):
        """A copy of a tensor's bytes."""
        torch.cuda.synchronize()
        return self._tensors[name].cpu().numpy()

    def run(self, text, params, grid, num_threads, shared_bytes, **_options):
        """Executes the entry `kernel` of a PTX module; options of the emulator are left aside."""
        api = driver()
        module = _checked(api.cuModuleLoadData(_cubin(text)))
        try:
            function = _checked(api.cuModuleGetFunction(module, b"kernel"))
            attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(api.cuFuncSetAttribute(function, attribute, shared_bytes))
            buffer = ctypes.create_string_buffer(params, len(params))
            starts = [ctypes.addressof(buffer) + offset for offset in _offsets(text)]
            arguments = (ctypes.c_void_p * len(starts))(*starts)
            where = ctypes.addressof(arguments)
            _checked(api.cuLaunchKernel(function, grid, 1, 1, num_threads, 1, 1, shared_bytes, 0, where, 0))
            torch.cuda.synchronize()
        finally:
            _checked(api.cuModuleUnload(module))


def _offsets(text):
    """Where each parameter of the entry lies among them all. The driver must be told of each: where they lie on the GPU
    depends on their alignment there."""
    at = 0
    for param in parse(text, "kernel").params.values():
        at = -(-at // param.align) * param.align
        yield at
        at += param.size


def _cubin(text):
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        command = [toolchain().ptxas, f"-arch={device_arch()}", source, "-o", cubin]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return cubin.read_bytes()


def _checked(answer):
    status, *values = answer
    assert not status, f"the driver says {status!r}"
    return values[0] if values else None
