"""Products of two matrices on the emulator by kernels of others: C = A B^T of bf16, of whole numbers: C is exact."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flashladder.common import emulator
from flashladder.common.emulator import compile_ptx, tensor_map


@dataclass(frozen=True)
class Finding:
    """What the race detector finds in a kernel, the source lines that it names, and what mends it: a pattern of the
    PTX, and what stands there instead."""

    says: str
    lines: tuple[str, ...]
    pattern: str
    instead: str

    def mend(self, ptx):
        """The PTX with the mend."""
        text, count = re.subn(self.pattern, self.instead, ptx)
        assert count, self.pattern
        return text


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched; `params`, in the entry's order, are numbers or bytes."""

    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int
    params: list


@dataclass(frozen=True)
class Kernel:
    """One of a repository: what its entry's name contains, m, n, k of a small problem, how to launch it on that, and
    what is wrong with it. `transposed`: it writes C by columns. `cluster`: CTAs, where only the launch says so."""

    repository: str
    entry: tuple[str, ...]
    size: tuple[int, int, int]
    launch: "Callable[[Operands], Launch]"
    findings: tuple[Finding, ...] = ()
    transposed: bool = False
    cluster: int = 1

    def program(self, ptx):
        """What the emulator executes."""
        (name,) = (n for n in re.findall(r"\.entry (\w+)\(", ptx) if all(part in n for part in self.entry))
        before, own = ptx[: (at := ptx.index(f".entry {name}("))], ptx[at:]
        if self.cluster > 1:
            own = own.replace(".maxntid", f".explicitcluster .reqnctapercluster {self.cluster}, 1, 1\n.maxntid", 1)
        return compile_ptx(before + own, name)

    def run(self, program, host_program=None, **options):
        """Runs it under the race detector; whether C is right. EmulatorError where something is found."""
        operands = Operands(*self.size, host_program)
        launch, params = self.launch(operands), b""
        for param, value in zip(program.kernel.params.values(), launch.params, strict=True):
            params = params.ljust(-(-len(params) // param.align) * param.align, b"\0")
            params += value if isinstance(value, bytes) else int(value).to_bytes(param.size, "little")
        emulator.run(program, params, launch.grid, launch.num_threads, launch.shared_bytes, operands.memory, **options)
        expected = operands.product.T if self.transposed else operands.product
        return operands.memory.read("C").tobytes() == bf16(expected).tobytes()


class Operands:
    """A (m, k), B (n, k) and C in the emulator's memory; and a program of the kernel's, if it has one."""

    def __init__(self, m, n, k, host_program=None):
        self.host_program = host_program
        random = np.random.default_rng(0)
        a, b = random.integers(-2, 3, (m, k)), random.integers(-2, 3, (n, k))
        self.m, self.n, self.k, self.product = m, n, k, a @ b.T
        self.memory = emulator.GlobalMemory()
        self.a = self.memory.add("A", bf16(a), readonly=True)
        self.b = self.memory.add("B", bf16(b), readonly=True)
        self.c = self.memory.add("C", np.zeros(m * n, np.uint16))

    def map(self, name, rows, columns=64, swizzle=128, rank=2, panel=64):
        """A tensor map of "A", "B", "C" or the transposed C, "C^T", whose boxes are so many rows and columns. With
        three dimensions and more, columns lie in panels of 64 beside each other, and a box has rows of `panel`."""
        address, height, width = {
            "A": (self.a, self.m, self.k), "B": (self.b, self.n, self.k), "C": (self.c, self.m, self.n),
            "C^T": (self.c, self.n, self.m),
        }[name]  # fmt: skip
        if rank == 2:
            dims, strides, box = (width, height), (2 * width,), (columns, rows)
        else:
            ones, zeros = [1] * (rank - 3), [0] * (rank - 3)
            dims, strides = (64, height, width // 64, *ones), (2 * width, 128, *zeros)
            box = (panel, rows, columns // 64, *ones)
        return tensor_map.encode(address, "bf16", dims, strides, box, swizzle)

    def put(self, name, data):
        """The address of further bytes or words."""
        array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        return self.memory.add(name, array, readonly=True)


def bf16(values):
    """Whole numbers of 8 bits as bf16, and others rounded towards zero."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
