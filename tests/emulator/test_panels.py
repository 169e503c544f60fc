"""Tiles in panels of each width: what TMA, the headers and products say of where an element lies is one thing."""

import numpy as np
import pytest
import torch
from lanes import Emulated
from on_gpu import OnGpu
from warpgroups import small_integers, to_number

from flashladder.common.emulator import tensor_map

ROWS, COLS, QUERIES, ONES = 32, 96, 64, 8  # as in panels.cu
WIDTHS = (64, 32, 16)
SHARED_BYTES = 1 << 15
FOUND = np.dtype(
    [
        ("memory", "f4", ROWS * 192),
        ("elements", "f4", (ROWS, COLS)),
        ("by_columns", "f4", (QUERIES, COLS + ONES)),
        ("by_rows", "f4", (QUERIES, ROWS)),
    ]
)


def place(row, col, width):
    """Of an element in its tile (PTX ISA, 5.5.7 "Swizzling Modes"): panels of `width` columns lie one behind the other,
    and 16-byte chunks of rows of 128, 64 or 32 bytes are exchanged by the number of their line of 128 bytes."""
    byte = (col // width * ROWS + row) * 2 * width + col % width * 2
    return (byte ^ (byte // 128 % (width // 8) * 16)) // 2


def check(machine, text):
    random = np.random.default_rng(0)
    a_bits, b_bits = (small_integers(random, (n, COLS), "bf16") for n in (QUERIES, ROWS))
    a, b = to_number(a_bits, "bf16"), to_number(b_bits, "bf16")
    pointers = [machine.add("a", a_bits, readonly=True)]
    pointers += [machine.add("found", np.zeros(FOUND.itemsize * len(WIDTHS), np.uint8))]
    address = machine.add("b", b_bits, readonly=True)
    dims, strides = (COLS, ROWS, 1, 1), (2 * COLS, 2 * COLS * ROWS, 2 * COLS * ROWS)
    maps = [tensor_map.encode(address, "bf16", dims, strides, (each, ROWS, 1, 1), 2 * each) for each in WIDTHS]
    machine.run(text, b"".join(maps) + np.array(pointers, np.uint64).tobytes(), 1, 128, SHARED_BYTES)
    row, col = np.ogrid[:ROWS, :COLS]
    for width, found in zip(WIDTHS, machine.read("found").view(FOUND), strict=True):
        assert (found["memory"][place(row, col, width)] == b).all()
        assert (found["elements"] == b).all()
        assert (found["by_rows"] == a @ b.T).all()
        assert (found["by_columns"][:, :COLS] == a[:, :ROWS] @ b).all()
        beside = 0 if COLS % width else a[:, :ROWS].sum(axis=1, keepdims=True)  # a panel that is not full ends in zeros
        assert (found["by_columns"][:, COLS:] == beside).all()


@pytest.mark.slow
def test_panels(compile_kernels):
    check(Emulated(), compile_kernels("sm_90a", "panels.cu"))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="this is for Hopper"
)
def test_panels_on_a_gpu(compile_kernels):
    check(OnGpu(), compile_kernels("sm_90a", "panels.cu"))
