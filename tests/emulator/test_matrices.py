"""Fragments of mma, ldmatrix and stmatrix against the layouts that the PTX ISA draws, element by element."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import run_lanes

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}


def as_floats(registers, kind):
    """(lanes, 2) floats, the lower half first, of one packed register a lane."""
    return torch.from_numpy(registers.view(np.int16).copy()).view(KINDS[kind]).double().numpy().reshape(-1, 2)


def random_pairs(random, kind, lanes=32):
    return torch.from_numpy(random.normal(size=2 * lanes)).to(KINDS[kind]).view(torch.int16).numpy().view(np.uint32)


def reference_mma(a, b, c, kind):
    """D of one warp from its registers, as the figures of the PTX ISA place them."""
    depth = 8 * len(b)
    left, right, sums = np.zeros((16, depth)), np.zeros((depth, 8)), np.zeros((16, 8))
    for lane in range(32):
        group, member = lane // 4, lane % 4
        for i, register in enumerate(a):
            row, col = group + 8 * (i % 2), 2 * member + 8 * (i // 2)
            left[row, col : col + 2] = as_floats(register, kind)[lane]
        for i, register in enumerate(b):
            right[2 * member + 8 * i : 2 * member + 8 * i + 2, group] = as_floats(register, kind)[lane]
        for i, register in enumerate(c):
            sums[group + 8 * (i // 2), 2 * member + i % 2] = register[lane]
    product = sums + left @ right
    d = np.zeros((4, 32))
    for lane in range(32):
        for i in range(4):
            d[i, lane] = product[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
    return d


def mma(kind, depth, d, a, b, c):
    shape = f"m16n8k{depth}"
    operands = ", ".join("{" + ", ".join(part) + "}" for part in (d, a, b, c))
    return f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {operands};"


def registers(*groups):
    return "".join(f".reg .{kind} {', '.join(names)};" for kind, names in groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [8, 16])
def test_one_mma(kind, depth):
    random = np.random.default_rng(depth)
    names_a, names_b = [f"a{i}" for i in range(depth // 4)], [f"b{i}" for i in range(depth // 8)]
    names_c, names_d = [f"c{i}" for i in range(4)], [f"d{i}" for i in range(4)]
    inputs = {name: random_pairs(random, kind) for name in names_a + names_b}
    inputs |= {name: random.normal(size=32).astype(np.float32) for name in names_c}
    code = mma(kind, depth, names_d, names_a, names_b, names_c)
    outputs, report = run_lanes(code, inputs, dict.fromkeys(names_d, "f4"))
    expected = reference_mma(*([inputs[n] for n in names] for names in (names_a, names_b, names_c)), kind)
    np.testing.assert_allclose([outputs[name] for name in names_d], expected, rtol=1e-5, atol=1e-5)
    assert report.mma_flops == 2 * 16 * 8 * depth


@pytest.mark.parametrize("storage", ["f4", "u4"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_sequence_of_mma_and_reads_between(storage, data):
    """However mma are joined into products: a random program gives what one mma after the other would. Newer compilers
    keep floats in registers of type .b32."""
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    kind, num_fragments, num_sums = "bf16", 3, 3
    a = [[f"a{n}_{i}" for i in range(4)] for n in range(num_fragments)]
    b = [[f"b{n}_{i}" for i in range(2)] for n in range(num_fragments)]
    sums = [[f"s{n}_{i}" for i in range(4)] for n in range(num_sums)]
    pairs = {name: random_pairs(random, kind) for group in (*a, *b) for name in group}
    state = {name: random.normal(size=32).astype(np.float32) for group in sums for name in group}
    code, expected = [], {name: values.astype(np.float64) for name, values in state.items()}
    fragment, target = st.integers(0, num_fragments - 1), st.integers(0, num_sums - 1)
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["mma", "mma", "mma", "scale", "copy"]))
        to, other = data.draw(target), data.draw(target)
        if step == "mma":
            left, right = data.draw(fragment), data.draw(fragment)
            code.append(mma(kind, 16, sums[to], a[left], b[right], sums[other]))
            operands = [pairs[n] for n in a[left]], [pairs[n] for n in b[right]], [expected[n] for n in sums[other]]
            expected.update(zip(sums[to], reference_mma(*operands, kind), strict=True))
        elif step == "scale":
            code += [f"mul.f32 {name}, {name}, 0f3F000000;" for name in sums[to]]
            expected.update({name: expected[name] * 0.5 for name in sums[to]})
        else:
            code += [f"mov.f32 {x}, {y};" for x, y in zip(sums[to], sums[other], strict=True)]
            expected.update({x: expected[y] for x, y in zip(sums[to], sums[other], strict=True)})
    inputs = pairs | {f"{name}_in": values.view(storage) for name, values in state.items()}
    moves = "".join(f"mov.b32 {name}, {name}_in;" for name in state)
    outputs, _ = run_lanes(moves + "".join(code), inputs, dict.fromkeys(state, storage))
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name].view("f4"), values, rtol=1e-3, atol=1e-3)


def test_mma_of_a_whole_tile_in_several_ctas():
    """64 x 64 x 64 of four warps in three CTAs, against torch."""
    random, kind = np.random.default_rng(5), "f16"
    code, names_d = [], []
    for n in range(8):
        for k in range(4):
            c = [f"d{n}_{i}" if k else "zero" for i in range(4)]
            code.append(
                mma(
                    kind,
                    16,
                    [f"d{n}_{i}" for i in range(4)],
                    [f"a{k}_{i}" for i in range(4)],
                    [f"b{n}_{k}_{i}" for i in range(2)],
                    c,
                )
            )
        names_d += [f"d{n}_{i}" for i in range(4)]
    threads, grid = 128, 3
    names = [f"a{k}_{i}" for k in range(4) for i in range(4)] + [
        f"b{n}_{k}_{i}" for n in range(8) for k in range(4) for i in range(2)
    ]
    inputs = {name: random_pairs(random, kind, threads * grid) for name in names}
    outputs, report = run_lanes(
        "mov.f32 zero, 0f00000000;" + "".join(code), inputs, dict.fromkeys(names_d, "f4"),
        registers=".reg .f32 zero;", num_threads=threads, grid=grid,
    )  # fmt: skip
    assert report.mma_flops == 2 * 64 * 64 * 64 * grid
    for warp in range(threads * grid // 32):
        part = slice(32 * warp, 32 * warp + 32)
        for n in range(8):
            c = np.zeros((4, 32))
            for k in range(4):
                operands = (
                    [inputs[f"a{k}_{i}"][part] for i in range(4)],
                    [inputs[f"b{n}_{k}_{i}"][part] for i in range(2)],
                )
                c = reference_mma(*operands, c, kind)
            actual = [outputs[f"d{n}_{i}"][part] for i in range(4)]
            np.testing.assert_allclose(actual, c, rtol=1e-4, atol=1e-4)


# -- ldmatrix and stmatrix

FILL = """
    mov.u32 addr, buffer;
    mad.lo.u32 addr, tid, 16, addr;
    st.shared.v4.b32 [addr], {w0, w1, w2, w3};
    bar.sync 0;
"""
REGISTERS = ".reg .b32 addr, tid;"
BUFFER = ".shared .align 16 .b8 buffer[512];"


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    """Rows are named in a scrambled order; lane l gets element (l / 4, 2 (l % 4) + e), or its transpose."""
    random = np.random.default_rng(count)
    words = {f"w{i}": random.integers(0, 1 << 32, 32, np.uint32) for i in range(4)}
    rows = np.stack(list(words.values()), axis=1).view(np.uint16).reshape(32, 8)  # row of 16 bytes a lane
    order = random.permutation(32).astype(np.uint32)
    names = [f"m{i}" for i in range(count)]
    code = f"""mov.u32 tid, %tid.x; {FILL}
        mov.u32 addr, buffer;
        mad.lo.u32 addr, order, 16, addr;
        ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 {{{", ".join(names)}}}, [addr];"""
    outputs, _ = run_lanes(
        code, words | {"order": order}, dict.fromkeys(names, "u4"), registers=REGISTERS, declarations=BUFFER
    )
    for number, name in enumerate(names):
        matrix = rows[order[8 * number : 8 * number + 8]]
        for lane, register in enumerate(outputs[name].view(np.uint16).reshape(32, 2)):
            for e in range(2):
                row, col = lane // 4, 2 * (lane % 4) + e
                assert register[e] == (matrix[col, row] if trans else matrix[row, col])


@pytest.mark.parametrize("order", [".m8n8.x{}", ".x{}.m8n8"])
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_undoes_ldmatrix(count, trans, order):
    random = np.random.default_rng(count)
    names = [f"m{i}" for i in range(count)]
    values = {name: random.integers(0, 1 << 32, 32, np.uint32) for name in names}
    form = f"{order.format(count)}{'.trans' if trans else ''}.shared.b16"
    braced = "{" + ", ".join(names) + "}"
    back = "{" + ", ".join(f"n{i}" for i in range(count)) + "}"
    code = f"""
        mov.u32 tid, %tid.x; xor.b32 tid, tid, 5; mov.u32 addr, buffer; mad.lo.u32 addr, tid, 16, addr;
        stmatrix.sync.aligned{form} [addr], {braced};
        bar.warp.sync -1;
        ldmatrix.sync.aligned{form} {back}, [addr];"""
    outputs, _ = run_lanes(
        code, values, {f"n{i}": "u4" for i in range(count)}, registers=REGISTERS, declarations=BUFFER
    )
    for i, name in enumerate(names):
        assert (outputs[f"n{i}"] == values[name]).all()
