"""Loads and stores of every space and width, atomics, and the reports of accesses that are wrong."""

import numpy as np
import pytest
from lanes import run_lanes

from flashladder.common import emulator
from flashladder.common.emulator.errors import MemoryAccessError
from flashladder.common.errors import EmulatorError

LANES = 32
THREAD = np.arange(LANES, dtype=np.uint32)
GLOBAL = "ld.param.u64 at, [pointer_a]; mul.wide.u32 wide, i, 4; add.u64 at, at, wide;"
REGISTERS = ".reg .b64 at, wide; .reg .b32 x, y, z, w; .reg .pred p;"


def run_memory(code, inputs=None, outputs=None, **options):
    return run_lanes(
        code, inputs, outputs or {"d": "u4"}, registers=REGISTERS + options.pop("registers", ""), **options
    )


@pytest.mark.parametrize(
    "modifiers", ["global", "global.nc", "global.cg", "global.L1::no_allocate", "global.L2::128B", "volatile.global",
                  "relaxed.gpu.global", "global.L1::evict_last.L2::256B", "weak.global", ""],
)  # fmt: skip
def test_forms_of_load(modifiers):
    words = [word for word in modifiers.split(".") if word]
    opcode = ".".join(["ld", *words, "b32"])
    outputs, _ = run_memory(f"{GLOBAL} {opcode} d, [at];", {"a": THREAD + 5, "i": THREAD[::-1].copy()})
    assert (outputs["d"] == (THREAD + 5)[::-1]).all()


def test_local_memory_belongs_to_a_thread():
    code = """
        mov.u64 at, array; cvt.u64.u32 wide, i; and.b64 wide, wide, 3; shl.b64 wide, wide, 2; add.u64 at, at, wide;
        st.local.b32 [at], i; mov.u64 generic, array; cvta.local.u64 generic, generic; add.u64 generic, generic, wide;
        ld.b32 d, [generic];
    """
    array = ".local .align 8 .b8 array[16]; .reg .b64 generic;"
    outputs, _ = run_memory(code, {"i": THREAD}, registers=array)
    assert (outputs["d"] == THREAD).all()


def test_constants_and_module_variables():
    declarations = """
        .const .align 4 .b32 table[4] = {10, 20, 0x1E, -40};
        .global .align 4 .b32 counter = 5;
    """
    code = """
        mov.u64 at, table; and.b32 x, i, 3; mul.wide.u32 wide, x, 4; add.u64 at, at, wide; ld.const.b32 d, [at];
        ld.const.b32 e, [table+4]; ld.global.b32 f, [counter];
    """
    outputs, _ = run_memory(code, {"i": THREAD}, {"d": "u4", "e": "u4", "f": "u4"}, declarations=declarations)
    assert outputs["d"].view(np.int32).tolist() == [10, 20, 30, -40] * 8
    assert (outputs["e"] == 20).all()
    assert (outputs["f"] == 5).all()


def test_generic_addresses_of_shared_memory():
    code = """
        mov.u32 x, buffer; cvt.u64.u32 at, x; cvta.shared.u64 at, at; mul.wide.u32 wide, i, 4; add.u64 at, at, wide;
        st.b32 [at], i; bar.warp.sync -1; ld.b32 d, [at]; isspacep.shared p, at; selp.b32 e, 1, 0, p;
        cvta.to.shared.u64 at, at; ld.shared.b32 f, [at];
    """
    buffer = ".shared .align 4 .b8 buffer[128];"
    outputs, _ = run_memory(code, {"i": THREAD}, {"d": "u4", "e": "u4", "f": "u4"}, declarations=buffer)
    assert (outputs["d"] == THREAD).all()
    assert (outputs["e"] == 1).all()
    assert (outputs["f"] == THREAD).all()


def test_dynamic_shared_memory_follows_static():
    declarations = ".shared .align 4 .b8 fixed[4]; .extern .shared .align 16 .b8 dynamic[];"
    outputs, _ = run_memory(
        "mov.u32 d, dynamic; mov.u32 x, fixed; sub.u32 d, d, x; mov.u32 e, %dynamic_smem_size;",
        {}, {"d": "u4", "e": "u4"}, declarations=declarations, shared_bytes=64,
    )  # fmt: skip
    assert (outputs["d"] == 16).all()
    assert (outputs["e"] == 64).all()


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(space):
    """64 threads of 2 CTAs: add to a sum, take a ticket, keep a maximum, count in a ring of 5."""
    shared = space == "shared"
    declarations = f".{space} .align 4 .b8 cells[16];" if shared else ".global .align 4 .b32 cells[4] = {0, 0, 0, 0};"
    start = "setp.eq.u32 p, tid, 0; @p st.shared.v4.b32 [cells], {0, 0, 0, 0}; bar.sync 0;" if shared else ""
    code = f"""
        mov.u32 tid, %tid.x; {start}
        atom.{space}.add.u32 ticket, [cells], 1;
        red.{space}.max.u32 [cells+4], a;
        atom.{space}.inc.u32 x, [cells+8], 4;
        atom.{space}.cas.b32 y, [cells+12], 0, a;
    """
    a = np.random.default_rng(0).permutation(64).astype(np.uint32) + 1
    finish = "bar.sync 0; ld.shared.v4.b32 {e, f, g, h}, [cells];" if shared else ""
    outputs, _ = run_memory(
        code + finish, {"a": a}, {"ticket": "u4", **(dict.fromkeys("efgh", "u4") if shared else {})},
        registers=".reg .b32 tid;", declarations=declarations, num_threads=32, grid=2,
    )  # fmt: skip
    if shared:
        assert outputs["ticket"].tolist() == [*range(32), *range(32)]
        assert (outputs["f"].reshape(2, 32) == a.reshape(2, 32).max(axis=1, keepdims=True)).all()
        assert (outputs["e"] == 32).all()
        assert (outputs["g"] == 32 % 5).all()
        assert (outputs["h"].reshape(2, 32) == a.reshape(2, 32)[:, :1]).all()
    else:
        assert sorted(outputs["ticket"].tolist()) == list(range(64))


def test_float_reduction_into_global_memory():
    a = np.arange(LANES, dtype=np.float32)
    code = """
        mov.f32 zero, 0f00000000; ld.param.u64 at, [pointer_d]; st.global.f32 [at], zero; red.global.add.f32 [at], a;
        ld.global.f32 d, [at];
    """
    outputs, _ = run_memory(code, {"a": a}, {"d": "f4"}, registers=".reg .f32 zero;")
    assert outputs["d"][5] == a.sum()


def test_float_reduction_of_four_elements_a_lane():
    a = np.arange(LANES, dtype=np.float32)
    code = """
        mov.f32 zero, 0f00000000; mov.f32 one, 0f3f800000; ld.param.u64 at, [pointer_d];
        st.global.v4.f32 [at], {zero, one, zero, zero}; red.relaxed.gpu.global.add.v4.f32 [at], {a, one, zero, a};
        ld.global.v4.f32 {d, e, f, g}, [at];
    """
    outputs, _ = run_memory(code, {"a": a}, dict.fromkeys("defg", "f4"), registers=".reg .f32 zero, one;")
    assert [outputs[name][5] for name in "defg"] == [a.sum(), 1 + LANES, 0, a.sum()]


def test_float_reduction_of_four_elements_that_no_other_lane_has():
    a = np.arange(LANES, dtype=np.float32)
    code = """
        mov.f32 zero, 0f00000000; mov.f32 one, 0f3f800000; mov.u64 at, sums; mul.wide.u32 wide, i, 16;
        add.u64 at, at, wide; st.global.v4.f32 [at], {a, one, zero, a}; setp.lt.u32 p, i, 20;
        @p red.relaxed.gpu.global.add.v4.f32 [at], {a, one, one, zero}; ld.global.v4.f32 {d, e, f, g}, [at];
    """
    options = {"declarations": ".global .align 16 .b32 sums[128];", "registers": ".reg .f32 zero, one;"}
    outputs, _ = run_memory(code, {"a": a, "i": THREAD}, dict.fromkeys("defg", "f4"), **options)
    taking_part = THREAD < 20
    for name, expected in zip("defg", (a + a * taking_part, 1 + taking_part, taking_part, a), strict=True):
        assert (outputs[name] == expected).all()


# -- what is wrong is named: tensor, offset, CTA, warp, lane, instruction

IN_THE_SECOND_CTA = "mov.u32 x, %ctaid.x; setp.eq.u32 p, x, 1; @p mov.u32 i, 200; "


def test_read_past_the_end():
    zeros = np.zeros(128, np.uint32)
    with pytest.raises(MemoryAccessError) as error:
        run_memory(
            f"{IN_THE_SECOND_CTA} {GLOBAL} ld.global.b32 d, [at];", {"a": zeros, "i": zeros}, num_threads=64, grid=2
        )
    problem, place = str(error.value).splitlines()
    assert problem == "4-byte read out of bounds: tensor a, byte offset 800 of 512"
    assert place.startswith("  CTA (1, 0, 0), warp 0, lane 0, at PTX line")
    assert place.endswith("`ld.global.b32 d, [at]`")


def test_access_before_the_start():
    with pytest.raises(MemoryAccessError, match="out of bounds: 4 bytes before tensor a"):
        run_memory(f"sub.u32 i, i, i; {GLOBAL} ld.global.b32 d, [at+-4];", {"a": THREAD, "i": THREAD})


def test_access_before_the_start_of_a_later_tensor():
    code = "ld.param.u64 at, [pointer_i]; ld.global.b32 d, [at+-16];"
    with pytest.raises(MemoryAccessError, match="out of bounds: 16 bytes before tensor i"):
        run_memory(code, {"a": THREAD, "i": THREAD})


def test_a_fault_in_one_of_several_tensors():
    """Lanes 0 to 15 read an input, the others an output that nobody has written."""
    code = """
        setp.lt.u32 p, i, 16; ld.param.u64 at, [pointer_a]; @!p ld.param.u64 at, [pointer_d];
        mul.wide.u32 wide, i, 4; add.u64 at, at, wide; ld.global.b32 d, [at];
    """
    with pytest.raises(MemoryAccessError, match=r"never written: tensor d, byte offset 64 of 128\n.*warp 0, lane 16"):
        run_memory(code, {"a": THREAD, "i": THREAD})


def test_access_to_nothing():
    with pytest.raises(MemoryAccessError, match="out of bounds: address 0x10, which belongs to no tensor"):
        run_memory("mov.u64 at, 16; ld.global.b32 d, [at];")


def test_straddling_the_end():
    """The last element of a tensor of 6 bytes is not whole."""
    code = "ld.param.u64 at, [pointer_small]; ld.global.b32 d, [at+4];"
    small = np.zeros(3, np.uint16)
    memory = emulator.GlobalMemory()
    params = np.array([memory.add("small", small), memory.add("d", np.zeros(4, np.uint8))], np.uint64).tobytes()
    text = f""".version 8.7
        .target sm_90
        .visible .entry kernel(.param .u64 pointer_small, .param .u64 pointer_d)
        {{ .reg .b64 at; .reg .b32 d; {code} ret; }}"""
    with pytest.raises(MemoryAccessError, match="4-byte read out of bounds: tensor small, byte offset 4 of 6"):
        emulator.run(text, params, (1, 1, 1), 32, 0, memory, entry="kernel")


def test_misaligned():
    with pytest.raises(MemoryAccessError, match=r"misaligned 8-byte read: tensor a, byte offset 4 of 128\n.*lane 1"):
        run_memory(f"{GLOBAL} ld.global.v2.b32 {{d, x}}, [at];", {"a": THREAD, "i": THREAD})


def test_write_to_an_input():
    with pytest.raises(
        MemoryAccessError, match=r"write to a read-only tensor: tensor a, byte offset 12 of 128\n.*lane 3"
    ):
        run_memory(f"{GLOBAL} setp.eq.u32 p, i, 3; mov.u32 d, 0; @p st.global.b32 [at], d;", {"a": THREAD, "i": THREAD})


def test_output_read_before_it_is_written():
    with pytest.raises(MemoryAccessError, match="read of memory that was never written: tensor d, byte offset 0"):
        run_memory("ld.param.u64 at, [pointer_d]; ld.global.b32 d, [at];")


def test_inactive_lanes_may_hold_any_address():
    a = np.where(THREAD < 4, 10, 1 << 30).astype(np.uint32)
    code = f"setp.lt.u32 p, a, 11; mov.u32 d, 77; {GLOBAL} @p ld.global.b32 d, [at];"
    outputs, _ = run_memory(code, {"a": a, "i": a})
    assert outputs["d"].tolist() == [1 << 30] * 4 + [77] * 28


def test_lanes_that_reach_different_tensors():
    code = """
        setp.lt.u32 p, i, 16; ld.param.u64 at, [pointer_a]; @!p ld.param.u64 at, [pointer_b];
        mul.wide.u32 wide, i, 4; add.u64 at, at, wide; ld.global.b32 d, [at];
    """
    outputs, _ = run_memory(code, {"a": THREAD, "b": THREAD + 100, "i": THREAD})
    assert (outputs["d"] == np.where(THREAD < 16, THREAD, THREAD + 100)).all()


BUFFER = ".shared .align 16 .b8 buffer[128];"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("mov.u32 x, buffer; mad.lo.u32 x, i, 8, x; ld.shared.b32 d, [x];",
         r"4-byte access to shared memory out of bounds: offset 128 of 128 bytes\n  CTA \(0, 0, 0\), warp 0, lane 16"),
        ("mov.u32 x, buffer; mad.lo.u32 x, i, 2, x; ld.shared.b32 d, [x];",
         r"4-byte access to shared memory misaligned: offset 2\n.*lane 1"),
        ("ld.shared.b32 d, [buffer+-4];", r"out of bounds: offset -4 of 128 bytes"),
        ("ld.shared.b32 d, [buffer+8];",
         r"shared memory that nobody has written yet: CTA \(0, 0, 0\), shared memory offset 8\n  warp 0, lane 0 reads"),
        ("mov.u32 x, buffer; mad.lo.u32 x, i, 12, x; atom.shared.add.u32 d, [x], 1;",
         r"offset 132 of 128 bytes\n.*lane 11"),
        ("mov.u64 at, array; cvt.u64.u32 wide, i; add.u64 at, at, wide; ld.local.b32 d, [at];",
         r"4-byte access to local memory out of bounds or misaligned\n.*lane 1"),
    ],
)  # fmt: skip
def test_wrong_access_to_shared_or_local_memory(code, message):
    with pytest.raises(MemoryAccessError, match=message):
        run_memory(code, {"i": THREAD}, declarations=BUFFER, registers=".local .align 4 .b8 array[16];")


def test_parameters_of_another_size():
    memory = emulator.GlobalMemory()
    text = ".version 8.7\n.target sm_90\n.visible .entry kernel(.param .align 8 .b8 p[24]) { ret; }"
    with pytest.raises(EmulatorError, match="kernel takes 24 bytes of parameters, not 8"):
        emulator.run(text, bytes(8), (1, 1, 1), 32, 0, memory, entry="kernel")


def test_parameters_are_read_lane_by_lane_and_by_generic_address():
    """Lanes of two CTAs read different parameters, as pairs of words: an array of a struct is indexed so."""
    values = np.arange(64, dtype=np.uint32)
    code = """
        mov.b64 at, pointer_x; and.b32 n, tid_, 1; mul.wide.u32 wide, n, 8; add.u64 at, at, wide; cvta.param.u64 at, at;
        isspacep.param p, at; selp.b32 inside, 1, 0, p; ld.v2.b32 {low, high}, [at];
        mov.b64 at, pointer_x; add.u64 at, at, wide; ld.param.b64 whole, [at];"""
    outputs, _ = run_lanes(
        code, {"x": values}, {"low": "u4", "high": "u4", "whole": "u8", "inside": "u4"},
        registers=".reg .b64 at, wide; .reg .b32 n; .reg .pred p;", grid=2,
    )  # fmt: skip
    whole = outputs["low"].astype(np.uint64) | outputs["high"].astype(np.uint64) << np.uint64(32)
    assert (whole == outputs["whole"]).all()
    assert outputs["inside"].all()
    assert len(set(whole.tolist())) == 2  # two pointers, in turn
    assert (whole[::2] == whole[0]).all()


def test_ctas_store_from_lanes_of_their_own():
    """To one address, so that only the masks tell their accesses apart."""
    a, p = np.arange(64, dtype=np.uint32) + 1, np.arange(64) % 48 < 16  # the first half of CTA 0, the second of CTA 1
    place = "mov.u32 at, words; mov.u32 x, %tid.x; mad.lo.u32 at, x, 4, at;"
    outputs, _ = run_lanes(
        f"{place} st.shared.u32 [at], 0; @p st.shared.u32 [at], a; ld.shared.u32 d, [at];",
        {"a": a, "p": p}, {"d": "u4"}, grid=2,
        registers=".reg .b32 at, x;", declarations=".shared .align 4 .b8 words[128];",
    )  # fmt: skip
    assert (outputs["d"] == np.where(p, a, 0)).all()
