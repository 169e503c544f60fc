"""Every kind of missing synchronisation is reported, with both source lines, even where the result is right."""

from pathlib import Path

import numpy as np
import pytest
from lanes import run_lanes

from flashladder.common import emulator
from flashladder.common.emulator.errors import MemoryAccessError, RaceError

THREADS, TILES, CTAS = 128, 3, 4
SOURCE = Path(__file__).with_name("kernels.cu").read_text().splitlines()


def line_of(text):
    """Where a text first stands in kernels.cu."""
    return f"kernels.cu:{next(n for n, line in enumerate(SOURCE, 1) if text in line)}"


def run_kernel(ptx, entry, n=TILES, **options):
    """One of kernels.cu: its output and what it would be without races."""
    memory = emulator.GlobalMemory()
    data = np.random.default_rng(0).normal(size=(TILES, THREADS, 4)).astype(np.float32)
    out = np.zeros(CTAS * THREADS, np.float32)
    pointers = memory.add("in", data, readonly=True), memory.add("out", out, initialised=False)
    params = np.array(pointers, np.uint64).tobytes() + np.int32(n).tobytes()
    emulator.run(ptx, params, (CTAS, 1, 1), THREADS, 0, memory, entry=entry, **options)
    return memory.read("out").view(np.float32).reshape(CTAS, THREADS), data


def pipeline_result(data):
    return np.roll(data[:, :, 0], -32, axis=1).sum(axis=0, dtype=np.float32)


def test_a_right_pipeline_passes(kernels):
    found, data = run_kernel(kernels, "pipeline_none")
    np.testing.assert_allclose(found, np.tile(pipeline_result(data), (CTAS, 1)), rtol=1e-6)


IN_FLIGHT = "target of a copy in flight, and no wait of its issuer lies between"


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    ("entry", "reason", "later", "earlier"),
    [
        ("pipeline_no_wait", IN_FLIGHT, "reads", "issued the copy"),
        ("pipeline_no_commit", IN_FLIGHT, "reads", "issued the copy"),
        ("pipeline_no_barrier", "no barrier orders the two", "issues a copy to it", "read it"),
        ("pipeline_early_prefetch", "no barrier orders the two", "issues a copy to it", "read it"),
    ],
)
def test_defect_is_caught(kernels, entry, reason, later, earlier, lazy):
    """Whether copies land late or at once: the report does not depend on it."""
    with pytest.raises(RaceError) as error:
        run_kernel(kernels, entry, lazy_copies=lazy)
    first, second, third, mend = str(error.value).splitlines()
    assert first.startswith("race on shared memory: CTA (0, 0, 0), shared memory offset ")
    assert first.endswith(reason)
    assert f" {later}, at kernels.cu:" in second
    assert f" {earlier}, at kernels.cu:" in third
    assert mend.startswith("  mend: ")
    copy = third if later == "reads" else second
    assert f"{line_of('asm volatile')} < {line_of('copy_16(tile')} < kernels.cu:" in copy
    assert "`cp.async.cg.shared.global [" in copy


@pytest.mark.parametrize(
    ("entry", "lazy", "is_seen"),
    [
        ("pipeline_no_wait", True, True),
        ("pipeline_no_wait", False, False),
        ("pipeline_no_commit", True, True),
        ("pipeline_no_barrier", True, True),
        ("pipeline_no_barrier", False, True),
        ("pipeline_early_prefetch", True, False),
        ("pipeline_early_prefetch", False, True),
    ],
)
def test_without_the_detector_the_order_decides(kernels, entry, lazy, is_seen):
    """Why there is a detector: one order of execution shows some defects in the result and hides others."""
    found, data = run_kernel(kernels, entry, lazy_copies=lazy, race=False)
    is_right = np.allclose(found, pipeline_result(data), rtol=1e-6)
    assert is_right != is_seen


def test_a_warp_needs_syncwarp_between_its_lanes(kernels):
    found, data = run_kernel(kernels, "swap_none")
    expected = data[0, :, 0].reshape(-1, 2)[:, ::-1].reshape(-1)
    assert (found == expected).all()
    with pytest.raises(RaceError, match="other lanes of the warp touched it, and no __syncwarp lies between"):
        run_kernel(kernels, "swap_no_syncwarp")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_what_the_compiler_makes_of_a_source_for_different_archs(compile_kernels, arch):
    kernels = compile_kernels(arch)
    found, data = run_kernel(kernels, "pipeline_none")
    np.testing.assert_allclose(found[2], pipeline_result(data), rtol=1e-6)

    found, data = run_kernel(kernels, "local_array", n=5)
    x = data[0, :, 0]
    history = np.stack([x + np.float32(i) for i in range(8)])
    for i in range(5):
        for thread in range(THREADS):
            history[i * 3 % 8, thread] += history[(i + thread) % 8, thread]
    np.testing.assert_allclose(found[1], history[5], rtol=1e-6)

    found, _ = run_kernel(kernels, "mathematics", n=3)
    wide = x.astype(np.float64)
    y = 2 * np.exp(wide) + np.log(np.abs(wide) + 0.1) + np.tanh(wide) + 1 / np.sqrt(wide**2 + 1) + wide / 3
    y += np.fmod(x, np.float32(0.7)) + np.trunc(x * np.float32(100)) / 8 + wide**2
    np.testing.assert_allclose(found[0], y, rtol=1e-2, atol=1e-2)


# -- small cases, as text

BUFFER = ".shared .align 16 .b8 buffer[1024];"
START = "mov.u32 tid, %tid.x; mov.u32 addr, buffer; mad.lo.u32 addr, tid, 4, addr; st.shared.b32 [addr], 0; bar.sync 0;"
REGISTERS = ".reg .b32 tid, addr, x, y; .reg .pred p; .reg .b16 h;"


def run_shared(code, num_threads=64, **options):
    """Runs code in which `addr` names a word of shared memory of each thread; all words have been written."""
    run_lanes(
        START + code + "mov.u32 d, 0;", {}, {"d": "u4"}, registers=REGISTERS, declarations=BUFFER,
        num_threads=num_threads, **options,
    )  # fmt: skip


STORE, LOAD = "st.shared.b32 [addr], tid;", "ld.shared.b32 x, [addr];"
OTHER_WARP = "xor.b32 addr, tid, 32; shl.b32 addr, addr, 2; mov.u32 x, buffer; add.u32 addr, addr, x;"
OTHER_LANE = "xor.b32 addr, tid, 1; shl.b32 addr, addr, 2; mov.u32 x, buffer; add.u32 addr, addr, x;"
FIRST_WARP = "setp.lt.u32 p, tid, 32;"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (STORE + OTHER_WARP + LOAD, "no barrier orders the two"),
        (STORE + "bar.sync 0;" + LOAD + OTHER_WARP + STORE, "no barrier orders the two"),  # write after read
        (STORE + OTHER_WARP + STORE, "no barrier orders the two"),  # write after write
        (STORE + OTHER_LANE + LOAD, "no __syncwarp lies between"),
        (STORE + "bar.warp.sync -1;" + LOAD + OTHER_LANE + STORE, "no __syncwarp lies between"),
        (STORE + OTHER_LANE + STORE, "no __syncwarp lies between"),
        (STORE + "setp.lt.u32 p, tid, 2; @p bar.warp.sync 3;" + OTHER_LANE + LOAD, "warp 0, lane 2 reads"),
        (STORE + "bar.warp.sync -1;" + OTHER_WARP + LOAD, "no barrier orders the two"),  # a warp's sync is not enough
        ("st.shared.b32 [buffer], tid;", "lanes of one store write different values to it"),
        ("mov.u32 x, 1; atom.shared.add.u32 y, [addr], x;" + OTHER_WARP + LOAD, "no barrier orders the two"),
        (STORE + "bar.sync 0; ld.shared.b32 x, [buffer]; setp.eq.u32 p, tid, 5; @p st.shared.b32 [buffer], tid;",
         "no __syncwarp lies between"),  # read by several lanes
    ],
)  # fmt: skip
def test_race(code, reason):
    with pytest.raises(RaceError, match=reason):
        run_shared(code)
    run_shared(code, race=False)


@pytest.mark.parametrize(
    "code",
    [
        STORE + LOAD + STORE,  # a thread's own accesses
        STORE + "bar.sync 0;" + OTHER_WARP + LOAD + "bar.sync 0;" + STORE,
        STORE + "bar.warp.sync -1;" + OTHER_LANE + LOAD + "bar.warp.sync -1;" + STORE,
        FIRST_WARP + "@p st.shared.b32 [buffer], 7; bar.sync 0; ld.shared.b32 y, [buffer];",  # one value by many lanes
        FIRST_WARP + "@p st.shared.b32 [addr], tid; bar.sync 0; ld.shared.b32 x, [buffer+124];",
        "mov.u32 x, 0;"
        + STORE
        + "bar.sync 0; atom.shared.add.u32 y, [buffer], 1; bar.sync 0; ld.shared.b32 x, [buffer];",
    ],
)
def test_no_false_alarm(code):
    run_shared(code)


def test_halves_of_one_word_belong_to_different_threads():
    """The words of the detector are as small as the smallest access."""
    code = """
        mov.u32 addr, buffer; mad.lo.u32 addr, tid, 2, addr; cvt.u16.u32 h, tid; st.shared.b16 [addr], h;
        bar.warp.sync -1; mov.u32 addr, buffer; and.b32 x, tid, 0x3e; mad.lo.u32 addr, x, 2, addr;
        ld.shared.u32 y, [addr];
    """
    run_shared(code, num_threads=32)
    with pytest.raises(RaceError):
        run_shared(code.replace("bar.warp.sync -1;", ""), num_threads=32)


def test_order_passes_on_through_a_third_warp():
    """Warp 0 writes, meets warp 1 at barrier 1, which meets warp 2 at barrier 2, which reads."""
    code = f"""
        shr.u32 x, tid, 5;
        setp.eq.u32 p, x, 0; @p bra first;
        setp.eq.u32 p, x, 1; @p bra second;
        bar.sync 2, 64; mov.u32 addr, buffer; and.b32 x, tid, 31; mad.lo.u32 addr, x, 4, addr; {LOAD} bra.uni end;
    first:
        {STORE} bar.sync 1, 64; bra.uni end;
    second:
        bar.sync 1, 64; bar.sync 2, 64;
    end:
    """
    run_shared(code, num_threads=96)
    with pytest.raises(RaceError, match=r"warp 2, lane 0 reads.*\n  warp 0, lane 0 wrote it"):
        run_shared(code.replace("bar.sync 1, 64;", ""), num_threads=96)


def test_a_race_in_one_cta_only():
    """CTA 2 alone skips the barrier."""
    code = STORE + "mov.u32 x, %ctaid.x; setp.eq.u32 p, x, 2; @p bra skip; bar.sync 0; skip:" + OTHER_WARP + LOAD
    with pytest.raises(RaceError, match=r"CTA \(2, 0, 0\)"):
        run_shared(code, grid=5)


def test_race_in_a_later_chunk():
    code = STORE + "mov.u32 x, %ctaid.x; setp.eq.u32 p, x, 6; @p bra skip; bar.sync 0; skip:" + OTHER_WARP + LOAD
    with pytest.raises(RaceError, match=r"CTA \(6, 0, 0\)"):
        run_shared(code, grid=8, chunk=4)


def test_uninitialised_word_of_a_partial_copy():
    code = """
        ld.param.u64 base_, [pointer_d]; mov.u32 x, 5; st.global.b32 [base_], x;
        setp.eq.u32 p, tid, 0; @p cp.async.ca.shared.global [buffer+512], [base_], 4;
        cp.async.wait_all; bar.sync 0; ld.shared.v2.b32 {x, y}, [buffer+512];
    """
    with pytest.raises(MemoryAccessError, match=r"nobody has written yet: .* offset 516"):
        run_shared(code)
