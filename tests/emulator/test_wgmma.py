"""wgmma: fragments, descriptors, groups; and that every missing fence, commit and wait is found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warpgroups import (
    SIZES,
    WINDOW,
    accumulator_place,
    canonical_offset,
    descriptor,
    fragment_place,
    run_warpgroup,
    small_integers,
    swizzle_address,
    to_number,
)

from flashladder.common.emulator.errors import (
    ConvergenceError,
    DeadlockError,
    MemoryAccessError,
    RaceError,
    UnsupportedInstructionError,
)

THREADS, ROWS = 128, 64
FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)


class Operand:
    """A matrix (extent x depth) somewhere in an image of shared memory, and its descriptor."""

    def __init__(self, random, type, extent, swizzle, transposed, at, *, pad=0):
        self.type, size = type, SIZES[type]
        depth, wide = 32 // size, max(swizzle, 16) // 16
        block = 128 * wide + pad  # from one swizzled block of 8 rows to the next
        if swizzle:
            strides = {"stride": block, "leading": block * (depth // 8) if transposed else 16}
        elif transposed:
            strides = {"stride": block * (depth // 8), "leading": block}
        else:
            strides = {"stride": block * 2, "leading": block}
        self.values = small_integers(random, (extent, depth), type)
        phase = (at >> 7) % (8 * wide // 8) if swizzle else 0
        self.descriptor = descriptor(at, swizzle=swizzle, phase=phase, **strides)
        layout = {"size": size, "swizzle": swizzle, "transposed": transposed, **strides}
        self.places = at + np.array(
            [[swizzle_address(canonical_offset(r, k, **layout), swizzle) for k in range(depth)] for r in range(extent)]
        )
        self.end = int(self.places.max()) + size

    def put(self, image):
        for byte in range(SIZES[self.type]):
            image[self.places - WINDOW + byte] = self.values >> 8 * byte & 0xFF

    @property
    def numbers(self):
        return to_number(self.values, self.type)


def registers_of_d(n, result="f32", name="d"):
    return [f"{name}{i}" for i in range(n // (2 if result == "f32" else 4))]


def opcode(n, type_a="bf16", type_b=None, result="f32"):
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // SIZES[type_a]}.{result}.{type_a}.{type_b or type_a}"


def braced(names):
    return "{" + ", ".join(names) + "}"


def clear(names):
    return "".join(f"mov.b32 {name}, 0;" for name in names)


def matrix_of(outputs, n, result="f32"):
    """D (64, n) of its registers."""
    found = np.full((ROWS, n), np.nan)
    for number in range(n // 2):
        if result == "f32":
            values = outputs[f"d{number}"]
        else:
            values = outputs[f"d{number // 2}"].view(np.float16)[number % 2 :: 2]
        for thread in range(THREADS):
            found[accumulator_place(thread // 32, thread % 32, number)] = values[thread]
    return found


def aligned(offset, to=1024):
    return -(-offset // to) * to


def image_of(*operands):
    image = np.full(aligned(max(each.end for each in operands) - WINDOW), 0xFF, np.uint8)
    for each in operands:
        each.put(image)
    return image


LAYOUTS = [(swizzle, transposed) for swizzle in (0, 32, 64, 128) for transposed in (False, True)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    types=st.sampled_from([("bf16", "bf16"), ("f16", "f16"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e4m3", "e4m3")]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    n=st.sampled_from([8, 16, 24, 64, 136, 256]),
    result=st.sampled_from(["f32", "f16"]),
    adds=st.booleans(),
    scales=st.tuples(st.sampled_from([1, -1]), st.sampled_from([1, -1])),
    pad=st.sampled_from([0, 1024]),
    shift=st.integers(0, 7),
)
def test_one_product_of_shared_memory(seed, types, layouts, n, result, adds, scales, pad, shift):
    """D = +-A B (+ D) for every swizzle, major and type, where the canonical layouts put A and B; the swizzle's pattern
    begins `shift` rows of 128 bytes behind a multiple of 1024, which the base offset tells."""
    random = np.random.default_rng(seed)
    (swizzle_a, trans_a), (swizzle_b, trans_b) = layouts
    eight = SIZES[types[0]] == 1
    if eight:
        trans_a = trans_b = False
    elif types[0] == "bf16":
        result = "f32"
    if trans_b and swizzle_b and n % (swizzle_b // 2):
        swizzle_b = 0
    a = Operand(random, types[0], ROWS, swizzle_a, trans_a, WINDOW + 128 * shift, pad=pad)
    b = Operand(random, types[1], n, swizzle_b, trans_b, aligned(a.end) + 128 * shift, pad=pad)
    names, old = registers_of_d(n, result), random.integers(-3, 4, (ROWS, n)).astype(float)
    inputs = {"desc_a": np.full(THREADS, a.descriptor, np.uint64), "desc_b": np.full(THREADS, b.descriptor, np.uint64)}
    for number in range(n // 2):
        values = np.array([old[accumulator_place(t // 32, t % 32, number)] for t in range(THREADS)])
        if result == "f32":
            inputs[f"c{number}"] = values.astype(np.float32)
        else:
            pair = inputs.setdefault(f"c{number // 2}", np.zeros(THREADS, np.uint32))
            pair |= values.astype(np.float16).view(np.uint16).astype(np.uint32) << (16 * (number % 2))
    constants = ", ".join(map(str, (*scales, *(() if eight else (int(trans_a), int(trans_b))))))
    code = f"""
        {"".join(f"mov.b32 {d}, c{i};" for i, d in enumerate(names))} {FENCE}
        {opcode(n, *types, result)} {braced(names)}, desc_a, desc_b, {int(adds)}, {constants}; {COMMIT} {WAIT}"""
    kinds = dict.fromkeys(names, "f4" if result == "f32" else "u4")
    outputs, report = run_warpgroup(code, image_of(a, b), inputs, kinds)
    expected = scales[0] * scales[1] * a.numbers @ b.numbers.T + (old if adds else 0)
    assert (matrix_of(outputs, n, result) == expected).all()
    assert report.mma_flops == 2 * ROWS * n * (32 // SIZES[types[0]])


@pytest.mark.parametrize("type", SIZES)
def test_a_in_registers(type):
    random, n, size = np.random.default_rng(3), 64, SIZES[type]
    b = Operand(random, type, n, 128, size == 2, WINDOW)
    a = small_integers(random, (ROWS, 32 // size), type)
    names = registers_of_d(n)
    inputs = {"desc_b": np.full(THREADS, b.descriptor, np.uint64)}
    for register in range(4):
        words = np.zeros(THREADS, np.uint32)
        for thread in range(THREADS):
            for within in range(4 // size):
                place = fragment_place(thread // 32, thread % 32, register * (4 // size) + within, size)
                words[thread] |= np.uint32(int(a[place]) << 8 * size * within)
        inputs[f"a{register}"] = words
    code = f"""{clear(names)} {FENCE} {opcode(n, type)} {braced(names)}, {{a0, a1, a2, a3}}, desc_b, 1,
               1, 1{", 1" if size == 2 else ""}; {COMMIT} {WAIT}"""
    outputs, _ = run_warpgroup(code, image_of(b), inputs, dict.fromkeys(names, "f4"))
    assert (matrix_of(outputs, n) == to_number(a, type) @ b.numbers.T).all()


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


def test_operands_are_read_as_late_as_the_wait():
    """B is overwritten before the wait: the race detector's affair, but without it the numbers show it."""
    problem = Problem()
    overwrite = (
        "mov.u32 at_image, %tid.x; mad.lo.u32 at_image, at_image, 4, at_b; st.shared.b32 [at_image], 0; bar.sync 0;"
    )
    code = f"""{ZERO_D} mov.u32 at_b, {problem.b[0].places.min()}; {FENCE} {mma(0)} {COMMIT}"""
    registers = ".reg .b32 at_b;"
    (d,) = problem.run(f"{code} {overwrite} {wait()}", registers=registers, race=False)
    assert (d == 0).all()
    (d,) = problem.run(f"{code} {wait()} bar.sync 0; {overwrite}", registers=registers, race=False)
    assert (d == problem.product(0)).all()


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
