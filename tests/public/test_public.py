"""Hopper kernels that others wrote, under the race detector: no false alarm, what is wrong with them is found, and so
is the loss of their synchronisation.

`make test-public` runs this. RACES.md has a table of what it finds. Where the detector reports a kernel, the report is
held against its two lines, and the kernel with the mend is silent.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from public_gemms import Finding, Kernel, Launch
from public_sources import compiled, sources

from flashladder.common.emulator import tensor_map
from flashladder.common.emulator.mutate import mutated, mutations
from flashladder.common.errors import EmulatorError

HARNESSES = {"fast.cu": "fast_cu.cu", "DeepGEMM": "deep_gemm.cu", "cutlass": "cutlass.cu"}
NEEDS = {"fast.cu": ["fast.cu"], "DeepGEMM": ["DeepGEMM", "cutlass"], "cutlass": ["cutlass"]}
INCLUDES = {"fast.cu": [""], "DeepGEMM": ["deep_gemm/include"], "cutlass": ["include", "tools/util/include"]}
MARK = b"\xa5" * tensor_map.NUM_BYTES  # where cutlass.cu leaves a tensor map out

# -- fast.cu: H100 matmul, step by step


def first_steps(o, rows=128, columns=128, warpgroups=1, stages=1, shared=None, tail=()):
    """Kernels 2 to 5: a CTA a tile, tensor maps in global memory."""
    maps = [o.put(f"map of {name}", o.map(name, size)) for name, size in (("A", rows), ("B", columns))]
    shared = 128 * stages * (rows + columns) if shared is None else shared
    grid = o.m // rows * (o.n // columns)
    return Launch((grid, 1, 1), 128 * warpgroups, shared, [o.m, o.n, o.k, o.c, *maps, *tail])


def persistent(o, rank):
    """Kernels 6 to 9: 64 CTAs, alone or in pairs; tiles of 128 x 256, three stages."""
    maps = [o.map("A", 128, rank=rank), o.map("B", 256, rank=rank)]
    return Launch((64, 1, 1), 384, 3 * 128 * 384 + 64, [o.m, o.n, o.k, o.c, *maps])


def by_tma_stores(o, ctas=64, rows=128, panel=64, tail=()):
    """Kernels 10 to 12: O leaves by TMA."""
    c = o.map("C^T", 256, rows, swizzle=0, rank=3, panel=panel)
    maps = [c, o.map("A", 128, rank=3), o.map("B", 256, rank=3)]
    shared = 3 * 128 * 384 + 256 * 128 // 64 * panel * 2 + 64 + 512
    return Launch((ctas, 1, 1), 384, shared, [o.m, o.n, o.k, *maps, *tail])


def by_a_table(o, **options):
    """Kernels 11 and 12: their two pairs of CTAs take tiles of a table, row << 16 | column, -1 after the last."""
    tiles = np.full((2, 128), -1, np.int32)
    for i, (row, column) in enumerate(np.ndindex(o.m // 256, o.n // 256)):
        tiles[i % 2, i // 2] = row << 16 | column
    return by_tma_stores(o, ctas=4, tail=[o.put("tiles", tiles)], **options)


INIT = Finding(
    "a copy uses an mbarrier whose initialisation no fence makes visible to it",
    ("matmul_7.cuh:280", "matmul_7.cuh:259"),
    r"(mbarrier\.init\.shared::cta\.b64 [^;]*;)",
    r"\1 fence.mbarrier_init.release.cluster;",
)


WAIT_AT_END = r"(\s)ret;", r"\1cp.async.bulk.wait_group.read 0; ret;"


def stores(file, copy, write):
    """What is wrong with the epilogues of kernels 10 to 12; the lines of the copy and of the write to what it reads."""
    return (
        Finding(
            "an ordinary write, and no fence.proxy.async of its thread lies between",
            (f"{file}:{copy}", f"{file}:{write}"),
            r"(bar\.sync (?:10?, 256|%r\d+, 128);)",
            r"fence.proxy.async; \1",
        ),
        Finding(
            "has waited for what reads it, but no barrier orders that wait before",
            (f"{file}:{copy}", f"{file}:{write}"),
            r"(cp\.async\.bulk\.wait_group 0;)",
            r"\1 bar.sync 1, 256;",
        ),
        Finding(
            "ends while a copy may still access its shared memory",
            (f"{file}:{copy}",),
            *WAIT_AT_END,
        ),
    )


def fast_cu(number, size, launch, *findings, entry="I"):
    return pytest.param(
        Kernel("fast.cu", (f"matmulKernel{number}{entry}",), size, launch, findings, transposed=True),
        id=f"fast.cu {number}",
        marks=pytest.mark.xdist_group("fast.cu"),
    )


# -- DeepGEMM


def deep_gemm(o):
    """Four CTAs, four stages of 128 x 128 x 64."""
    maps = [o.map("A", 128), o.map("B", 128), o.map("C", 128)]
    return Launch((4, 1, 1), 384, 2 * 128 * 128 + 4 * (32768 + 16), [0, o.m, o.n, o.k, *maps])


NOT_WAITED_FOR = Finding(
    "ends while a copy may still access its shared memory", ("sm90_bf16_gemm.cuh:378",), *WAIT_AT_END
)

# -- CUTLASS


def cutlass(name):
    """By the program that cutlass.cu makes: what CUTLASS itself would launch, with tensor maps of our own."""

    def launch(o):
        arguments = (o.m, o.n, o.k, o.a, o.b, o.c, 4)
        said = subprocess.run([o.host_program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout
        lines = [line.split() for line in said.splitlines()]
        at = next(i for i, line in enumerate(lines) if line[0] == name)
        *grid, threads, shared = (int(word) for word in lines[at][1:6])
        params = bytes.fromhex(lines[at][6])
        for _, address, swizzle, *dims in lines[at - 3 : at]:
            sizes, boxes, (_, *strides) = ([int(word) for word in dims[i::3]] for i in range(3))
            made = tensor_map.encode(int(address, 16), "bf16", sizes, strides, boxes, (0, 32, 64, 128)[int(swizzle)])
            params = params.replace(MARK, made, 1)
        return Launch(tuple(grid), threads, shared, [params])

    return launch


def other(repository, entry, launch, *findings, cluster=1):
    kernel = Kernel(repository, (entry,), (512, 384, 448), launch, findings, cluster=cluster)
    return pytest.param(kernel, id=f"{repository} {entry}", marks=pytest.mark.xdist_group(repository))


P64 = "ILi128ELi256ELi64ELi384ELi3ELi64E"
KERNELS = [
    fast_cu(2, (256, 128, 256), lambda o: first_steps(o, 64, 64, shared=0)),
    fast_cu(3, (256, 256, 256), lambda o: first_steps(o, tail=[0]), entry="ILi128ELi128ELi64ELi128ELb0E"),
    fast_cu(4, (256, 256, 448), lambda o: first_steps(o, warpgroups=2, stages=5)),
    fast_cu(5, (256, 512, 320), lambda o: first_steps(o, 128, 256, warpgroups=3, stages=3)),
    fast_cu(6, (2048, 2048, 128), lambda o: persistent(o, 2), entry=P64),
    fast_cu(7, (2048, 2048, 128), lambda o: persistent(o, 5), INIT, entry=P64),
    fast_cu(8, (2048, 2048, 128), lambda o: persistent(o, 3), entry=P64),
    fast_cu(9, (2048, 2048, 128), lambda o: persistent(o, 3), entry=P64),
    fast_cu(10, (2048, 2048, 128), by_tma_stores, *stores("matmul_10.cuh", 285, 558), entry=P64),
    fast_cu(11, (512, 1024, 256), by_a_table, *stores("matmul_11.cuh", 243, 506)),
    fast_cu(12, (512, 1024, 256), lambda o: by_a_table(o, rows=64, panel=72), *stores("matmul_12.cuh", 243, 514)),
    other("DeepGEMM", "Lj256ELj1ELb0E", deep_gemm, NOT_WAITED_FOR),
    other("DeepGEMM", "Lj256ELj2ELb1E", deep_gemm, NOT_WAITED_FOR, cluster=2),
    other("cutlass", "Cooperative", cutlass("Cooperative"), cluster=2),
    other("cutlass", "Pingpong", cutlass("Pingpong"), cluster=2),
]


# -- the tests


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The PTX of a repository's kernels, and for CUTLASS's the program that says how they are launched."""
    made = {}

    def of(repository):
        if repository not in made:
            trees = {name: sources(name) for name in NEEDS[repository]}
            includes = [trees[name] / path for name in trees for path in INCLUDES[name]]
            made[repository] = compiled(
                HARNESSES[repository], includes, tmp_path_factory.mktemp("public"), is_program=repository == "cutlass"
            )
        return made[repository]

    return of


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_the_detector_says(kernel, built, lazy):
    """Each finding in turn, with both lines; and nothing once all are mended. What is right comes out right."""
    text, host_program = built(kernel.repository)
    for finding in kernel.findings:
        with pytest.raises(EmulatorError) as error:
            kernel.run(kernel.program(text), host_program, lazy_copies=lazy)
        for part in (finding.says, *finding.lines):
            assert part in str(error.value)
        text = finding.mend(text)
    assert kernel.run(kernel.program(text), host_program, lazy_copies=lazy)


# What each may lose without harm, of what it does to that: opcode, the line that calls for it.
HINT = "setmaxnreg.inc"  # PTX ISA 9.7.19.5: "a hint"; what fewer registers are too few for is the compiler's to say
SCHEDULES = (), range(4), range(4, 8), range(8, 12)  # which warps lag
CONSUMER_WAITS = [f"sm90_mma_tma_gmma_ss_warpspecialized.hpp:{line} <" for line in (487, 533)]
HARMLESS = {
    # All threads have waited for both mbarriers just before.
    "fast.cu 2": {("bar.sync", "matmul_2.cuh:125")},
    "fast.cu 4": set(),
    "fast.cu 5": {(HINT, "matmul_5.cuh:324")},
    # A fence of an accumulator that nobody has touched since the last one; __syncwarp behind which nobody reads.
    "DeepGEMM Lj256ELj1ELb0E": {
        (HINT, "sm90_bf16_gemm.cuh:210"),
        ("setmaxnreg.dec", "sm90_bf16_gemm.cuh:150"),  # to 8 less
        ("wgmma.fence", "sm90_bf16_gemm.cuh:255"),
        ("bar.warp", "sm90_bf16_gemm.cuh:91"),
        ("bar.warp", "sm90_bf16_gemm.cuh:383"),
    },
}


@pytest.mark.parametrize("kernel", [param for param in KERNELS if param.id in HARMLESS])
def test_the_loss_of_any_synchronisation_is_reported(kernel, built, request):
    """As of the rungs (test_mutations.py)."""
    text, _ = built(kernel.repository)
    for finding in kernel.findings:
        text = finding.mend(text)
    program, missed = kernel.program(text), set()
    for mutation in mutations(program):
        if not any(is_found(kernel, program, mutation, lagging) for lagging in SCHEDULES):
            instruction = mutation.instruction
            file, line = instruction.source[-1]
            missed.add((".".join(instruction.opcode.split(".")[:2]), f"{Path(file).name}:{line}"))
    assert missed == HARMLESS[request.node.callspec.id]


@pytest.mark.xdist_group("cutlass")
def test_a_wait_that_another_test_comes_before(built):
    """CUTLASS tests whether a tile is there, and waits only if it is not: a loss shows where the test says no."""
    kernel = next(param.values[0] for param in KERNELS if param.id == "cutlass Cooperative")
    text, host_program = built("cutlass")
    program = kernel.program(text)
    waits = [
        mutation
        for mutation in mutations(program)
        if mutation.change == "removed" and any(line in mutation.instruction.described() for line in CONSUMER_WAITS)
    ]
    assert len(waits) == 2
    for mutation in waits:
        assert not is_found(kernel, program, mutation, (), host_program)
        assert is_found(kernel, program, mutation, range(8, 12), host_program)


def is_found(kernel, program, mutation, lagging, host_program=None):
    """Whether a mutation is reported, or C is wrong."""
    try:
        return not kernel.run(mutated(program, mutation), host_program, lagging=lagging)
    except EmulatorError:
        return True
