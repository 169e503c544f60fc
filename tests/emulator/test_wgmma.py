"""wgmma: fragments, descriptors, groups; and that every missing fence, commit and wait is found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warpgroups import (
    COMMIT,
    FENCE,
    LAYOUTS,
    ROWS,
    SIZES,
    THREADS,
    WINDOW,
    Operand,
    accumulator_place,
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

from flashladder.common.emulator.errors import (
    ConvergenceError,
    DeadlockError,
    MemoryAccessError,
    RaceError,
    UnsupportedInstructionError,
)
from flashladder.common.emulator.execute.counters import LANES, WGMMA, shared_wavefronts
from flashladder.common.emulator.execute.descriptors import chunk_addresses


@settings(max_examples=25, deadline=None)
@given(program=products(), lazy=st.booleans())
def test_one_product_of_shared_memory(program, lazy):
    """Where the canonical layouts put A and B, for every swizzle, major and type."""
    outputs, report = program.run(lazy_copies=lazy)
    assert (matrix_of(outputs, program.n, program.result) == program.expected).all()
    assert report.mma_flops == 2 * ROWS * program.n * program.depth
    assert traffic_of_products(report) == (4, (ROWS + program.n) * 32)


def traffic_of_products(report):
    """Warps that asked for products, and the bytes that these read of shared memory: without bank conflicts."""
    (line,) = (line for line in report.shared if line.mover == WGMMA)
    assert line.bytes == 128 * line.units == 128 * line.ideal == 4 * line.words
    assert report.wavefronts_of(WGMMA) == line.units
    assert report.shared_wavefronts == report.wavefronts_of(LANES) + line.units
    return line.requests, line.bytes


@given(
    layout=st.sampled_from(LAYOUTS), extent=st.sampled_from([64, 128]), shift=st.integers(0, 7), seed=st.integers(0, 9)
)
def test_eight_rows_of_a_chunk_lie_in_different_banks(layout, extent, shift, seed):
    """In every canonical layout: so a product's operands come without bank conflicts."""
    swizzle, transposed = layout
    matrix = Operand(np.random.default_rng(seed), "bf16", extent, swizzle, transposed, WINDOW + 128 * shift)
    rows, chunks = (16, extent // 8) if transposed else (extent, 2)
    addresses = chunk_addresses(matrix.descriptor, rows, chunks, transposed)
    for eight in addresses.T.reshape(-1, 8):
        assert shared_wavefronts(eight.tolist(), range(8), 16) == (1, 1, 32)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("type", SIZES)
def test_a_in_registers(type, lazy):
    program = product_of_registers(type)
    outputs, report = program.run(lazy_copies=lazy)
    assert (matrix_of(outputs, program.n) == program.expected).all()
    assert traffic_of_products(report) == (4, program.n * 32)


# -- several products

N = 16
TILES = 4  # of A and of B, each of 16 along k, one after the other


class Problem:
    """TILES matrices A_i (64 x 16) and B_i (16 x N) in shared memory, whose descriptors are registers a0, b0, ..."""

    def __init__(self, seed=0, grid=1):
        random, self.grid, end = np.random.default_rng(seed), grid, WINDOW
        self.a, self.b, self.inputs = [], [], {}
        for tile in range(TILES):
            for name, extent, matrices in (("a", ROWS, self.a), ("b", N, self.b)):
                matrices.append(Operand(random, "bf16", extent, 32, False, aligned(end)))
                end = matrices[-1].end
                self.inputs[f"{name}{tile}"] = np.full(THREADS * grid, matrices[-1].descriptor, np.uint64)
        self.image = image_of(*self.a, *self.b)

    def product(self, i, j=None):
        """A_i B_j."""
        return self.a[i].numbers @ self.b[i if j is None else j].numbers.T

    def run(self, code, outputs=("d",), *, registers="", inputs=None, **options):
        """The matrices that groups of accumulators hold at the end."""
        kinds = dict.fromkeys((name for prefix in outputs for name in registers_of_d(N, name=prefix)), "f4")
        found, _ = run_warpgroup(
            code, self.image, self.inputs | (inputs or {}), kinds, registers=registers, grid=self.grid, **options
        )
        return [matrix_of({f"d{i}": found[f"{prefix}{i}"][:THREADS] for i in range(N // 2)}, N) for prefix in outputs]


def mma(i, j=None, d="d", adds=1, n=N):
    return f"{opcode(n)} {braced(registers_of_d(n, name=d))}, a{i}, b{i if j is None else j}, {adds}, 1, 1, 0, 0;"


def from_registers(j, d="d", a="p"):
    return (
        f"{opcode(N)} {braced(registers_of_d(N, name=d))}, {braced([f'{a}{i}' for i in range(4)])}, b{j}, 1, 1, 1, 0;"
    )


def wait(pending=0):
    return f"wgmma.wait_group.sync.aligned {pending};"


ZERO_D, ZERO_E = clear(registers_of_d(N)), clear(registers_of_d(N, name="e"))
FRAGMENTS = ".reg .b32 p<4>;"
SET_A = "".join(f"mov.b32 p{i}, {{zero, zero}};" for i in range(4))


def test_chains_groups_and_two_accumulators():
    """D sums up over two groups, E over one that stands between them; wait 1 leaves the last group under way."""
    problem = Problem()
    code = f"""{ZERO_D} {ZERO_E} {FENCE} {mma(0)} {mma(1)} {COMMIT} {mma(2, d="e")} {COMMIT} {wait(1)}
        add.f32 d0, d0, 1.0; {FENCE} {mma(3)} {COMMIT} {wait()}"""
    d, e = problem.run(code, ("d", "e"))
    expected = problem.product(0) + problem.product(1) + problem.product(3)
    for lane in range(THREADS):
        expected[accumulator_place(lane // 32, lane % 32, 0)] += 1
    assert (d == expected).all()
    assert (e == problem.product(2)).all()


def test_scale_d_begins_anew():
    problem = Problem()
    (d,) = problem.run(f"{ZERO_D} {FENCE} {mma(0)} {mma(1, adds=0)} {mma(2)} {COMMIT} {wait()}")
    assert (d == problem.product(1) + problem.product(2)).all()


def test_operands_are_read_as_late_as_the_wait_or_at_once():
    """B is overwritten before the wait: the race detector's affair, but without it the numbers show it."""
    problem = Problem()
    overwrite = "bar.sync 0; mad.lo.u32 at_image, tid_, 4, at_b; st.shared.b32 [at_image], 0; bar.sync 0;"
    code = f"""{ZERO_D} mov.u32 at_b, {problem.b[0].places.min()}; {FENCE} {mma(0)} {COMMIT}"""
    registers = ".reg .b32 at_b;"
    (d,) = problem.run(f"{code} {overwrite} {wait()}", registers=registers, race=False)
    assert (d == 0).all()
    (d,) = problem.run(f"{code} {overwrite} {wait()}", registers=registers, race=False, lazy_copies=False)
    assert (d == problem.product(0)).all()
    (d,) = problem.run(f"{code} {wait()} {overwrite}", registers=registers, race=False)
    assert (d == problem.product(0)).all()
    with pytest.raises(RaceError, match=r"may still read it(?s:.*)wgmma.mma_async"):
        problem.run(f"{code} {overwrite} {wait()}", registers=registers)


def test_products_of_several_kinds_on_one_accumulator():
    """A in shared memory, A in registers, and B transposed, in one group."""
    problem, transposed = Problem(), Operand(np.random.default_rng(9), "bf16", N, 32, True, WINDOW)
    problem.image[: transposed.end - WINDOW] = 0xFF
    transposed.put(problem.image)  # in place of A_0
    inputs = {"other": np.full(THREADS, transposed.descriptor, np.uint64)}
    braces = braced(registers_of_d(N))
    for lazy in (True, False):
        (d,) = problem.run(
            f"""{ZERO_D} mov.b16 one, 0x3f80; {"".join(f"mov.b32 p{i}, {{one, one}};" for i in range(4))} {FENCE}
            {mma(1)} {mma(2)} {from_registers(3)} {opcode(N)} {braces}, a1, other, 1, 1, 1, 0, 1; {COMMIT} {wait()}""",
            registers=FRAGMENTS + ".reg .b16 one;", inputs=inputs, lazy_copies=lazy,
        )  # fmt: skip
        ones = np.ones((ROWS, 16))
        expected = problem.product(1) + problem.product(2) + ones @ problem.b[3].numbers.T
        assert (d == expected + problem.a[1].numbers @ transposed.numbers.T).all()


@settings(max_examples=25, deadline=None)
@given(data=st.data(), lazy=st.booleans())
def test_random_groups(data, lazy):
    """Products on two accumulators in any groups, with any waits between: each sums up what it was given, in turn."""
    problem, code = Problem(), [ZERO_D, ZERO_E, FENCE]
    sums = {"d": np.zeros((ROWS, N)), "e": np.zeros((ROWS, N))}
    for _ in range(data.draw(st.integers(1, 10), label="steps")):
        kind = data.draw(st.sampled_from(["product", "product", "commit", "wait"]), label="step")
        if kind == "product":
            i, j = (data.draw(st.integers(0, TILES - 1)) for _ in range(2))
            into, adds = data.draw(st.sampled_from("de")), data.draw(st.integers(0, 3)) > 0
            code.append(mma(i, j, d=into, adds=int(adds)))
            sums[into] = problem.product(i, j) + (sums[into] if adds else 0)
        else:
            code.append(COMMIT if kind == "commit" else wait(data.draw(st.integers(0, 2))))
    found = problem.run(" ".join([*code, COMMIT, wait()]), ("d", "e"), lazy_copies=lazy)
    assert all((matrix == sums[name]).all() for matrix, name in zip(found, "de", strict=True))


def test_ctas_that_go_different_ways():
    """CTA c sums up its first c + 1 products, in groups of their own, with descriptors of its own."""
    problem, grid = Problem(grid=TILES), TILES
    cta = np.repeat(np.arange(grid), THREADS)
    order = [[(c + step) % TILES for step in range(TILES)] for c in range(grid)]
    inputs = {
        f"{name}{step}": np.array([matrices[order[c][step]].descriptor for c in cta], np.uint64)
        for name, matrices in (("a", problem.a), ("b", problem.b))
        for step in range(TILES)
    }
    steps = "".join(
        f"{FENCE} {mma(step)} {COMMIT} {wait(step % 2)} setp.eq.u32 leaves, cta_, {step}; @leaves bra done;"
        for step in range(TILES)
    )
    names = registers_of_d(N)
    outputs, _ = run_warpgroup(
        f"{ZERO_D} {steps} done: {wait()}", problem.image, inputs, dict.fromkeys(names, "f4"),
        registers=".reg .pred leaves;", grid=grid,
    )  # fmt: skip
    for c in range(grid):
        own = {name: outputs[name][THREADS * c : THREADS * (c + 1)] for name in names}
        assert (matrix_of(own, N) == sum(problem.product(i) for i in order[c][: c + 1])).all()


# -- what is wrong

GOOD = {
    "one product": [ZERO_D, FENCE, mma(0), COMMIT, wait(), "add.f32 d0, d0, d0;"],
    "a chain of one shape needs no second fence": [ZERO_D, FENCE, mma(0), COMMIT, mma(1), COMMIT, wait()],
    "two read the same fragments": [
        ZERO_D, ZERO_E, SET_A, FENCE, from_registers(0), from_registers(1, "e"), COMMIT, wait(),
    ],
    "fragments are set anew": [
        ZERO_D, SET_A, FENCE, from_registers(0), COMMIT, wait(), SET_A, FENCE, from_registers(1), COMMIT, wait(),
    ],
    "the older group is waited for": [
        ZERO_D, ZERO_E, FENCE, mma(0), COMMIT, mma(1, d="e"), COMMIT, wait(1), "add.f32 d0, d0, d0;", wait(),
        "add.f32 e0, e0, e0;",
    ],
    "a loop with one in flight over its end": [
        ZERO_D, ZERO_E, FENCE, mma(0), COMMIT, "mov.b32 n, 3; again:", FENCE, mma(1, d="e"), COMMIT, wait(1),
        "add.f32 d0, d0, d0;", FENCE, mma(0), COMMIT, wait(1), "add.f32 e0, e0, e0;",
        "sub.u32 n, n, 1; setp.ne.u32 more, n, 0; @more bra again;", wait(),
    ],
}  # fmt: skip
REGISTERS = FRAGMENTS + ".reg .f32 e<8>; .reg .b16 zero; .reg .b32 n; .reg .pred more;"


def run_steps(steps):
    return Problem().run("mov.b16 zero, 0;" + " ".join(steps), registers=REGISTERS)


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_let_through(name):
    run_steps(GOOD[name])


def removals():
    found = []
    for name, steps in GOOD.items():
        used = any("add.f32" in step for step in steps) or "anew" in name
        for at, step in enumerate(steps):
            if step == FENCE or (used and step != steps[-1] and (step == COMMIT or step.startswith("wgmma.wait"))):
                found.append(pytest.param(steps, at, id=f"{name}: {step.split('.')[1]} at {at}"))
    return found


@pytest.mark.parametrize(("steps", "at"), removals())
def test_what_is_removed_is_missed(steps, at):
    """Without a fence, a commit or a wait: both lines are named."""
    with pytest.raises(RaceError, match=r"(?s)no wgmma\.(fence|wait_group that covers it).*`wgmma.mma_async"):
        run_steps(steps[:at] + steps[at + 1 :])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([ZERO_D, FENCE, mma(0), COMMIT, "mov.b32 d3, 0;", wait()], "d3 is an accumulator.*touches it.*`mov.b32 d3"),
        ([ZERO_D, FENCE, mma(0), COMMIT, "mov.f32 e0, d3;", wait()], "d3 is an accumulator"),
        ([ZERO_D, SET_A, FENCE, from_registers(0), "mov.b32 p2, 0;", COMMIT, wait()], "p2 is a fragment of A"),
        ([ZERO_D, SET_A, FENCE, from_registers(0), "mov.b32 n, p2;", COMMIT, wait()], "p2 is a fragment of A"),
        ([ZERO_D, FENCE, mma(0), COMMIT, mma(0), COMMIT, wait(1), "mov.f32 e0, d3;"], "d3 is an accumulator"),
        ([ZERO_D, FENCE, mma(0), COMMIT, mma(0, n=8), COMMIT, wait()], "is an accumulator"),
        ([ZERO_D, FENCE, mma(0), mma(1), wait(), "mov.f32 e0, d3;"], "d3 is an accumulator"),
        (
            [
                ZERO_D,
                FENCE,
                mma(0),
                COMMIT,
                "setp.eq.u32 more, tid_, 500; @more bra over;",
                wait(),
                "over: mov.f32 e0, d3;",
            ],
            "d3 is an accumulator",
        ),
        (
            [ZERO_D, FENCE, mma(0), COMMIT, wait(), "mov.f32 d1, 1.0;", mma(1), COMMIT, wait()],
            r"register d1.*`mov.f32 d1",
        ),
        ([ZERO_D, FENCE, SET_A, from_registers(0), COMMIT, wait()], "register p0"),
        (["mov.b32 n, 0;", mma(0), COMMIT, wait()], "before the first wgmma"),
    ],
)
def test_registers_in_flight(steps, message):
    with pytest.raises(RaceError, match=f"(?s){message}"):
        run_steps(steps)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("setp.ge.u32 more, tid_, 96; @more bra over; WORK over: ", DeadlockError, r"\(warps 3 of its warpgroup"),
        ("setp.ge.u32 more, tid_, 16; @more bra over; WORK over: ", ConvergenceError, "divergent"),
        ("setp.ge.u32 more, tid_, 96; @more mov.b64 b0, b1; WORK", ConvergenceError, "descriptors in warp 3"),
        ("setp.eq.u32 more, tid_, 5; @more mov.b64 b0, b1; WORK", ConvergenceError, "lanes of a warp give different"),
        (
            f"setp.eq.u32 more, tid_, 5; {FENCE} @more {mma(0)} {COMMIT} {wait()}",
            UnsupportedInstructionError, "under a guard",
        ),
        ("mov.b64 b0, 0x4000000800010001; WORK", MemoryAccessError, r"wgmma reads out of bounds: offset -1008"),
        ("or.b64 b0, b0, 0x3fff; WORK", MemoryAccessError, r"wgmma reads out of bounds.*\n.*warp 0.*`wgmma"),
    ],
)  # fmt: skip
def test_wrong_products(code, error, message):
    work = f"{FENCE} {mma(0)} {COMMIT} {wait()}"
    with pytest.raises(error, match=message):
        Problem().run(ZERO_D + code.replace("WORK", work), registers=REGISTERS)


def test_a_wait_awaits_all_four_warps():
    """Warp 0 waits for its products before it comes to the barrier at which the others wait before theirs."""
    code = f"""{ZERO_D} setp.lt.u32 more, tid_, 32; @more bra first; bar.sync 1;
        {FENCE} {mma(0)} {COMMIT} {wait()} bra over;
        first: {FENCE} {mma(0)} {COMMIT} {wait()} bar.sync 1; over:"""
    with pytest.raises(DeadlockError, match=r"warp 0 waits at a wgmma.wait_group \(warps 1, 2, 3 of its warpgroup"):
        Problem().run(code, registers=REGISTERS)


@pytest.mark.parametrize("form", ["m64n16k8.f32.tf32.tf32", "m64n16k32.s32.s8.s8", "m64n12k16.f32.bf16.bf16"])
def test_what_is_not_executed_is_refused(form):
    code = f"{FENCE} wgmma.mma_async.sync.aligned.{form} {braced(registers_of_d(N))}, a0, b0, 1, 1, 1, 0, 0;"
    with pytest.raises(UnsupportedInstructionError, match=rf"(does not know|do not fit).*{form[:6]}"):
        Problem().run(f"{code} {COMMIT} {wait()}")
