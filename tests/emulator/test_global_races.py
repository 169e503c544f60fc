"""Races between CTAs in global memory: the classic patterns are silent, and each of their defects is named."""

from pathlib import Path

import numpy as np
import pytest
from lanes import Emulated, run_lanes

from flashladder.common import emulator
from flashladder.common.emulator.errors import DeadlockError, EmulatorError, RaceError
from flashladder.common.emulator.mutate import mutated, mutations

SOURCE = Path(__file__).with_name("global_memory.cu").read_text().splitlines()
CTAS = 6


def line_of(text):
    """Where a text stands in global_memory.cu."""
    return f"global_memory.cu:{next(n for n, line in enumerate(SOURCE, 1) if text in line)}"


@pytest.fixture(scope="module")
def global_memory(compile_kernels):
    return compile_kernels("sm_90a", "global_memory.cu")


def run_kernel(ptx, entry, **options):
    """What one of global_memory.cu leaves in `out`."""
    memory = emulator.GlobalMemory()
    sizes = {"work": 64 * 11, "flag": 1, "out": 64}
    pointers = [memory.add(name, np.zeros(size, np.int32)) for name, size in sizes.items()]
    params = np.array(pointers, np.uint64).tobytes()
    emulator.run(ptx, params, (CTAS, 1, 1), 64, 0, memory, entry=entry, **options)
    return memory.read("out").view(np.int32)


PARTS = sum(range(CTAS)) + CTAS * np.arange(64)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("last_block_none", [21]),
        ("last_block_volatile_data", [21]),
        ("split_k_none", PARTS),
        ("split_k_all_fence", PARTS),
        ("in_turn_none", [21]),
        ("drawn_none", [640]),
    ],
)
@pytest.mark.parametrize("chunk", [64, 4])
def test_the_right_kernel_is_silent(global_memory, entry, expected, chunk):
    if chunk < CTAS and entry.startswith("in_turn"):
        pytest.skip("CTAs that wait for later ones have to run together")
    assert (run_kernel(global_memory, entry, chunk=chunk)[: len(expected)] == expected).all()


NOTHING, NOT_ACQUIRED = "nothing that the other CTA published orders the two", "but no acquire lies between"
NARROW, NOT_THESE = "the scope of one does not hold both CTAs", "orders some of what the two CTAs do, but not these"


@pytest.mark.parametrize("chunk", [64, 4])
@pytest.mark.parametrize(
    ("entry", "says", "lines"),
    [
        ("last_block_no_fence", NOTHING, ["// left", "// collected"]),
        ("last_block_narrow_fence", NOTHING, ["// left", "// collected"]),
        ("last_block_no_acquire", NOT_ACQUIRED, ["// left", "// collected"]),
        ("last_block_narrow_atomic", NARROW, []),
        ("split_k_no_barrier", NOT_THESE, ["= threadIdx.x + blockIdx.x;  // left", "work[64 * i + threadIdx.x]"]),
        ("split_k_relaxed", NOTHING, ["= threadIdx.x + blockIdx.x;  // left", "work[64 * i + threadIdx.x]"]),
        ("in_turn_no_wait", NOTHING, ["// added"]),
        ("in_turn_relaxed_wait", NOT_ACQUIRED, ["// added"]),
        ("in_turn_no_barrier", NOT_THESE, ["// added"]),
        ("in_turn_relaxed", NOTHING, ["// added"]),
        ("in_turn_narrow_release", NARROW, ["// released narrowly"]),
        ("drawn_overlap", NOTHING, ["// written"]),
        ("drawn_read_early", NOTHING, ["// read early"]),
    ],
)
def test_a_defect_is_named(global_memory, entry, says, lines, chunk):
    """The report says why, names the lines of global_memory.cu, both CTAs, and the mend."""
    if chunk < CTAS and entry.startswith("in_turn") and "no_wait" not in entry:
        pytest.skip("CTAs that wait for later ones have to run together")
    with pytest.raises(RaceError) as error:
        run_kernel(global_memory, entry, chunk=chunk)
    message = str(error.value)
    assert says in message
    for text in lines:
        assert line_of(text) in message
    assert message.startswith("race on global memory: tensor ")
    assert message.count("  CTA (") == 2
    assert message.splitlines()[-1].startswith("  mend: ")


@pytest.mark.parametrize("entry", ["after_prior_none", "after_prior_one_for_all"])
def test_what_an_earlier_grid_wrote_is_read_behind_its_end(global_memory, entry):
    assert (run_kernel(global_memory, entry, prior={"work": "before"})[:64] == 0).all()


@pytest.mark.parametrize("entry", ["after_prior_no_grid_wait", "after_prior_one_thread_waits"])
def test_what_an_earlier_grid_may_still_write(global_memory, entry):
    with pytest.raises(RaceError) as error:
        run_kernel(global_memory, entry, prior={"work": "before"})
    assert f"before, before which {entry} may begin, may still write it" in str(error.value)
    assert line_of("// left by the earlier grid") in str(error.value)
    assert "mend: griddepcontrol.wait" in str(error.value)
    run_kernel(global_memory, entry)


def test_a_semaphore_that_nobody_releases_is_a_deadlock(global_memory):
    with pytest.raises(DeadlockError) as error:
        run_kernel(global_memory, "in_turn_no_release")
    message = str(error.value)
    assert "deadlock in CTA (0, 0, 0)" in message
    assert "warp 0 waits at a change of tensor flag, byte offset 0 of 4, where it finds 1 and nobody writes" in message
    assert "warp 1 waits at barrier 0 (32 of 64 threads)" in message


def test_a_cta_that_waits_for_one_that_does_not_run_beside_it(global_memory):
    with pytest.raises(DeadlockError, match="2 CTAs have not begun"):
        run_kernel(global_memory, "in_turn_none", chunk=4)


@pytest.mark.parametrize("entry", ["last_block_none", "split_k_none", "in_turn_none", "drawn_none"])
def test_the_loss_of_any_synchronisation_is_reported(global_memory, entry):
    """Every barrier and fence taken out, every order and scope weakened; or the output changes."""
    program = emulator.compile_ptx(global_memory, entry)
    expected, missed = run_kernel(program, entry), []
    for mutation in mutations(program):
        try:
            if (run_kernel(mutated(program, mutation), entry) == expected).all():
                missed.append((mutation.change, mutation.instruction.described()))
        except EmulatorError:
            continue
    assert not missed


def test_without_the_race_detector_defects_pass(global_memory):
    assert run_kernel(global_memory, "last_block_no_fence", race=False)[0] == 21


def test_ctas_may_copy_the_same_words():
    """To shared memory: that reads them, also where they lie in a tensor that is written elsewhere."""
    machine, lane = Emulated(), np.arange(64) % 32
    words = machine.add("words", np.arange(32, dtype=np.uint32))
    place = "mov.u32 to, buffer; mov.u32 x, %tid.x; mad.lo.u32 to, x, 4, to;"
    copy = "cp.async.ca.shared.global [to], [at], 4; cp.async.wait_all; ld.shared.u32 d, [to];"
    outputs, _ = run_lanes(
        place + copy, {"at": (words + 4 * lane).astype(np.uint64)}, {"d": "u4"}, grid=2, machine=machine,
        registers=".reg .b32 to, x;", declarations=".shared .align 4 .b8 buffer[128];",
    )  # fmt: skip
    assert (outputs["d"] == lane).all()
