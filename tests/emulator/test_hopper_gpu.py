"""The emulator against a Hopper GPU (`pytest -m gpu`): random products and copies, bit for bit where sums are exact."""

import numpy as np
import pytest
import torch
from bulk_programs import (
    COMMIT,
    DRAINED,
    DUMP,
    IOTA,
    NUMPY,
    Run,
    Tensor,
    coordinates,
    expect,
    load,
    store,
    tiles,
    wait,
)
from hypothesis import Phase, given, settings
from lanes import Emulated
from on_gpu import OnGpu
from warpgroups import (
    COMMIT as COMMIT_PRODUCTS,
)
from warpgroups import (
    FENCE,
    ROWS,
    SIZES,
    THREADS,
    WAIT,
    WINDOW,
    Operand,
    aligned,
    braced,
    clear,
    image_of,
    matrix_of,
    opcode,
    product_of_registers,
    products,
    registers_of_d,
    run_warpgroup,
)

from flashladder.common.emulator import tensor_map
from flashladder.common.emulator.errors import MemoryAccessError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="this is for Hopper"
    ),
]
MACHINES = (Emulated, OnGpu)
# The first program that is wrong is shown as it is: each further one that faults costs a process.
FEW = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
MAX_ERROR = 2.0**-18  # of the sum of the absolute values


@FEW
@given(program=products())
def test_products_of_shared_memory(program):
    """Every swizzle, base offset, major and type."""
    ours, its = (program.run(machine=machine())[0] for machine in MACHINES)
    for name, values in ours.items():
        assert (values.view(np.uint32) == its[name].view(np.uint32)).all(), name


@pytest.mark.parametrize("type", SIZES)
def test_products_of_registers(type):
    program = product_of_registers(type)
    ours, its = (program.run(machine=machine())[0] for machine in MACHINES)
    for name, values in ours.items():
        assert (values == its[name]).all(), name


@pytest.mark.parametrize("type", ["bf16", "f16"])
def test_sums_that_are_not_exact(type):
    """Random numbers: how far the sums of a product are from each other, measured against their absolute values."""
    random, n = np.random.default_rng(1), 64
    a, b = Operand(random, type, ROWS, 128, False, WINDOW), Operand(random, type, n, 128, False, WINDOW + 8192)
    for each in (a, b):
        floats = random.standard_normal(each.values.shape).astype(np.float32)
        each.values = (
            (floats.view(np.uint32) >> 16).astype(np.uint16)
            if type == "bf16"
            else floats.astype(np.float16).view(np.uint16)
        )
    names = registers_of_d(n)
    inputs = {"desc_a": np.full(THREADS, a.descriptor, np.uint64), "desc_b": np.full(THREADS, b.descriptor, np.uint64)}
    code = f"""{clear(names)} {FENCE} {opcode(n, type)} {braced(names)}, desc_a, desc_b, 1, 1, 1, 0, 0;
        {COMMIT_PRODUCTS} {WAIT}"""
    kinds = dict.fromkeys(names, "f4")
    ours, its = (
        matrix_of(run_warpgroup(code, image_of(a, b), inputs, kinds, machine=machine())[0], n) for machine in MACHINES
    )
    error = (np.abs(ours - its) / (np.abs(a.numbers) @ np.abs(b.numbers).T)).max()
    print(f"{type}: {error:.2e} of the sum of absolute values, 2^{np.log2(max(error, 1e-30)):.1f}")
    assert error < MAX_ERROR


@FEW
@given(drawn=tiles())
def test_loaded_tiles(drawn):
    """All bytes of shared memory, also those between rows that are shorter than their swizzle. Rows of a box begin at a
    multiple of 16 bytes: at others an H200 faults, as PTX allows (5.5.3.1), and the emulator refuses them."""
    dtype, dims, box, swizzle, pads, first = drawn
    found = []
    for machine in MACHINES:
        run = Run(machine=machine())
        tensor = Tensor(run, "tensor", dtype, dims, box, swizzle, pads=pads)
        length = aligned(max(tensor.offsets()) + 16)
        out = run.memory.add("out", np.zeros(length, np.uint8))
        code = IOTA.replace("%0", str(length)) + coordinates(first) + expect(tensor.box_bytes()) + load(len(dims))
        run(code + wait() + DUMP.replace("%0", str(length)), [tensor.map], [out])
        found.append(run.memory.read("out"))
    assert (found[0] == found[1]).all()


@FEW
@given(drawn=tiles(stored=True))
def test_stored_tiles(drawn):
    """Of tensors whose rows end at a multiple of 16 bytes: of others an H200 writes more or less than the elements that
    are inside (seen: one row of 13 bytes), and the emulator refuses such a store. None begins before its tensor: see
    test_tiles_across_an_edge."""
    dtype, dims, box, swizzle, pads, first = drawn
    found = []
    for machine in MACHINES:
        run = Run(machine=machine())
        tensor = Tensor(run, "tensor", dtype, dims, box, swizzle, pads=pads, readonly=False)
        length = aligned(max(tensor.offsets()) + 16)
        code = IOTA.replace("%0", str(length)) + coordinates(first) + store(len(dims)) + COMMIT + DRAINED
        run(code, [tensor.map])
        found.append(run.memory.read("tensor"))
    assert (found[0] == found[1]).all()


# An H200 loads from any coordinates. A store or a sum that begins before its tensor, in any dimension, is an illegal
# instruction there, though PTX names no such limit (5.5.3.3); one past its end is not (seen 2026-11-22).
EDGES = {
    "inside": ("fp32", (8,), (8,), 0, (0,)),
    "as it was found": ("fp32", (8,), (8,), 0, (-4,)),
    "past the end": ("fp32", (8,), (8,), 0, (4,)),
    "all before": ("fp32", (8,), (8,), 0, (-8,)),
    "all behind": ("fp32", (8,), (8,), 0, (8,)),
    "longer tensor": ("fp32", (64,), (8,), 0, (-4,)),
    "longer tensor, past the end": ("fp32", (64,), (8,), 0, (60,)),
    "longer tensor, longer box": ("fp32", (64,), (16,), 0, (-4,)),
    "longer tensor, longer box, most outside": ("fp32", (64,), (16,), 0, (-12,)),
    "longer tensor, box of 128 bytes": ("fp32", (64,), (32,), 0, (-16,)),
    "longer tensor, box of 16 bytes, all before": ("fp32", (64,), (4,), 0, (-4,)),
    "int32": ("int32", (8,), (8,), 0, (-4,)),
    "bf16": ("bf16", (16,), (16,), 0, (-8,)),
    "uint8": ("uint8", (32,), (32,), 0, (-16,)),
    "uint64": ("uint64", (4,), (4,), 0, (-2,)),
    "two dimensions, one row": ("fp32", (8, 1), (8, 1), 0, (-4, 0)),
    "two dimensions, left": ("fp32", (8, 4), (8, 2), 0, (-4, 0)),
    "two dimensions, right": ("fp32", (8, 4), (8, 2), 0, (4, 0)),
    "two dimensions, above": ("fp32", (8, 4), (8, 2), 0, (0, -1)),
    "two dimensions, below": ("fp32", (8, 4), (8, 2), 0, (0, 3)),
    "two dimensions, swizzled": ("fp32", (8, 4), (8, 2), 32, (-4, 0)),
    "three dimensions": ("fp32", (8, 4, 2), (8, 2, 2), 0, (-4, 0, 0)),
}


@pytest.mark.parametrize("kind", ["load", "store", "add"])
@pytest.mark.parametrize("case", list(EDGES))
def test_tiles_across_an_edge(case, kind):
    """Also what lies beside the tensor is compared. A fault ends its process, so that the others still tell."""
    dtype, dims, box, swizzle, first = EDGES[case]
    if kind == "add" and dtype == "uint8":
        pytest.skip("PTX adds no bytes")
    found = []
    for machine in MACHINES:
        run = Run(machine=machine())
        room = run.memory.add("room", np.arange(4096, dtype=np.uint16).view(np.uint8))
        size = np.dtype(NUMPY[dtype]).itemsize
        strides = [int(np.prod(dims[:n])) * size for n in range(1, len(dims))]
        tensor = tensor_map.encode(room + 2048, dtype, dims, strides, box, swizzle)
        length = int(np.prod(box)) * size
        out = run.memory.add("out", np.zeros(512, np.uint8))
        fill = IOTA.replace("%0", "512") + coordinates(first)
        if kind == "load":
            code = fill + expect(length) + load(len(dims)) + wait() + DUMP.replace("%0", "512")
        else:
            code = fill + store(len(dims), "add" if kind == "add" else "") + COMMIT + DRAINED
        if kind != "load" and min(first) < 0:
            refusal = r"begins before its tensor|ILLEGAL_INSTRUCTION"
            with pytest.raises((MemoryAccessError, AssertionError), match=refusal):
                run(code, [tensor], [out])
            continue
        run(code, [tensor], [out])
        found.append([run.memory.read(name) for name in ("room", "out")])
    for ours, its in zip(*found, strict=True):
        assert (ours == its).all()


@pytest.mark.parametrize(
    ("dtype", "function"),
    [
        ("int32", "add"), ("int32", "min"), ("int32", "max"), ("int32", "and"), ("int32", "or"), ("int32", "xor"),
        ("fp32", "add"), ("fp16", "add"), ("bf16", "add"), ("uint64", "add"),
    ],
)  # fmt: skip
def test_reduced_tiles(dtype, function):
    """The bytes 0, 1, 2, ... are combined with small values; as fp32 they are subnormals, which are kept."""
    found = []
    for machine in MACHINES:
        run = Run(machine=machine())
        tensor = Tensor(run, "tensor", dtype, (64, 6), (16, 4), 0, readonly=False, values=lambda n: np.arange(*n) % 50)
        length = aligned(tensor.box_bytes())
        code = IOTA.replace("%0", str(length)) + coordinates((16, 3)) + store(2, function) + COMMIT + DRAINED
        run(code, [tensor.map])
        found.append(run.memory.read("tensor"))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("reduction", ["", ".add.f32", ".add.u32", ".add.noftz.bf16", ".add.noftz.f16", ".min.s32"])
def test_plain_bytes(reduction):
    """From global to shared memory, and back: copied, or combined with what is there."""
    found = []
    for machine in MACHINES:
        run = Run(machine=machine())
        source = (np.arange(64, dtype=np.float32) - 20).view(np.uint8)
        p0 = run.memory.add("in", source, readonly=True)
        p1 = run.memory.add("out", np.linspace(-3, 3, 64, dtype=np.float32))
        kind = "cp.reduce.async" if reduction else "cp.async"
        code = f"""{expect(256)}
            @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [p0], 256, [bar]; {wait()}
            @p {kind}.bulk.global.shared::cta.bulk_group{reduction} [p1], [tile], 256; {COMMIT} {DRAINED}"""
        run(code, (), [p0, p1])
        found.append(run.memory.read("out"))
    assert (found[0] == found[1]).all()
