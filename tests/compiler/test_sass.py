"""Taking machine code apart, on what nvdisasm printed of a small kernel (data/nvdisasm_sm_90a.cu)."""

import dataclasses
from pathlib import Path

import pytest

from flashladder.common.compiler.sass import bounds, disassemble, loads, occupancy_of, parse, throughput
from flashladder.common.compiler.sass.diff import normalised
from flashladder.common.compiler.sass.flow import Graph
from flashladder.common.compiler.sass.instruction import Control, Position
from flashladder.common.compiler.sass.opcodes import access_width, bank_wavefronts, histogram, kind_of, mma, reads_a
from flashladder.common.compiler.sass.pipes import tensor_peak, work
from flashladder.common.compiler.sass.registers import live_registers, operands_of, results_of
from flashladder.common.errors import ConfigError, ToolchainError
from flashladder.common.problem.config import load_gpu

LISTING = (Path(__file__).parents[1] / "data" / "nvdisasm_sm_90a.txt").read_text()


@pytest.fixture(scope="module")
def code():
    return parse(LISTING)


@pytest.fixture(scope="module")
def at(code):
    return {instruction.address: instruction for instruction in code}


def test_instructions_come_whole_and_without_the_padding(code):
    assert [i.address for i in code] == list(range(0, 0x560, 16))
    assert code[-1].opcode == "EXIT"


def test_an_instruction_is_taken_apart(at):
    copy = at[0x260]
    assert (copy.guard, copy.opcode, copy.base) == ("", "LDGSTS.E.BYPASS.128", "LDGSTS")
    assert copy.operands == ("[R18]", "desc[UR6][R2.64]")
    assert copy.text == "LDGSTS.E.BYPASS.128 [R18], desc[UR6][R2.64]"
    branch = at[0x300]
    assert (branch.guard, branch.target) == ("!P0", 0x3F0)
    assert at[0x230].is_filler
    assert not at[0x350].is_filler


@pytest.mark.parametrize(
    ("address", "control"),
    [
        (0x010, "B------:R-:W1:-:S08"),  # S2UR: its result will release scoreboard 1 ...
        (0x030, "B-1----:R-:W-:Y:S13"),  # ... which the comparison waits for
        (0x260, "B------:R2:W-:-:S04"),  # LDGSTS: scoreboard 2 tells when its registers may change
        (0x2C0, "B----45:R-:W-:Y:S15"),  # HMMA: waits for both LDS, and yields
    ],
)
def test_control_words(at, address, control):
    assert str(at[address].control) == control


def test_reuse_flags_agree_with_the_text(code):
    for instruction in code:
        in_text = [".reuse" in operand for operand in instruction.operands]
        assert bool(instruction.control.reuse) == any(in_text), instruction.text


def test_every_field_of_a_control_word_has_its_bits():
    word = (5 << 41) | (1 << 45) | (2 << 46) | (3 << 49) | (0b100001 << 52) | (0b1010 << 58)
    assert Control.decode(word) == Control(5, False, 2, 3, 0b100001, 0b1010)


def test_source_lines_follow_the_inlining(at):
    assert at[0x2C0].source == (Position("kernel.cu", 4), Position("kernel.cu", 18))
    assert at[0x2D0].source == at[0x2C0].source
    assert [str(place) for place in at[0x2F0].source] == ["sm_30_intrinsics.hpp:122", "kernel.cu:19"]
    assert at[0x300].source == (Position("kernel.cu", 19),)


def test_operands_are_split_between_and_not_within_addresses():
    (store,) = parse(listing("@P1 STG.E.128 desc[UR6][R2.64+0x10], R8"))
    assert store.operands == ("desc[UR6][R2.64+0x10]", "R8")
    assert store.source == ()


def test_loops_are_found_with_the_branches_in_them(code):
    graph = Graph.of(code)
    outer, inner = graph.loops()
    assert inner < outer
    assert [i.address for i in graph.body(inner)] == list(range(0x1F0, 0x440, 16))  # the seldom taken part too
    assert graph.body(outer)[0].address == 0x150


def test_the_main_loop_is_the_innermost_with_tensor_work(code):
    loop = Graph.of(code).main_loop()
    assert (loop[0].address, loop[-1].address) == (0x1F0, 0x430)
    counts = histogram(loop)
    assert (counts["HMMA"], counts["BAR"], counts["filler"], counts["LDS"]) == (1, 2, 3, 2)


def listing(*lines):
    """What nvdisasm would print of these instructions and labels; the control words are empty."""
    printed, address, word = [], 0, f"/* 0x{0:016x} */"
    for line in lines:
        if line.endswith(":"):
            printed.append(line)
        else:
            printed += [f"\t/*{address:04x}*/    {line} ;    {word}", f"\t{word}"]
            address += 16
    return "\n".join(printed)


MMA = "HMMA.16816.F32.BF16 R8, R4, R2, R8"


def test_a_peeled_block_in_an_outer_loop_is_not_the_main_loop():
    tiles = listing(".tile:", MMA, MMA, ".block:", MMA, "@P0 BRA `(.block)", "@P1 BRA `(.tile)", "EXIT")
    assert [i.address for i in Graph.of(parse(tiles)).main_loop()] == [0x20, 0x30]


def test_of_a_masked_and_an_unmasked_loop_the_shorter_is_the_main_one():
    masked, unmasked = (
        (".masked:", MMA, "FSEL R1, R1, R2, P0", "@P0 BRA `(.masked)"),
        (".plain:", MMA, "@P1 BRA `(.plain)"),
    )
    for loops in ((*masked, *unmasked), (*unmasked, *masked)):
        assert len(Graph.of(parse(listing(*loops, "EXIT"))).main_loop()) == 2


def test_of_equal_loops_the_one_that_copies_is_the_main_one():
    part, whole = (".part:", MMA, "@P0 BRA `(.part)"), (".whole:", MMA, "LDGSTS [R1], [R2]", "@P1 BRA `(.whole)")
    for loops in ((*part, *whole), (*whole, *part)):
        assert len(Graph.of(parse(listing(*loops, "EXIT"))).main_loop()) == 3


def test_what_a_branch_seldom_does_is_not_in_the_usual_loop():
    rescale = ("@P2 BRA `(.kept)", "FMUL R1, R1, R2", ".kept:")
    copy = ("@P3 BRA `(.last)", "LDGSTS [R1], [R2]", ".last:")
    graph = Graph.of(parse(listing(".loop:", MMA, *rescale, *copy, "@P0 BRA `(.loop)", "EXIT")))
    assert [i.base for i in graph.main_loop()] == ["HMMA", "BRA", "FMUL", "BRA", "LDGSTS", "BRA"]
    assert [i.base for i in graph.usual_loop()] == ["HMMA", "BRA", "BRA", "LDGSTS", "BRA"]


def test_a_jump_spelled_as_a_call_and_a_branch_with_its_predicate_as_operand():
    code = parse(
        listing(
            ".loop:",
            MMA,
            "BRA UP0, `(.out)",
            "@P0 CALL.REL.NOINC `(.L_x_1)",
            "BRA `(.loop)",
            ".out:",
            ".L_x_1:",
            "EXIT",
        )
    )
    graph = Graph.of(code)
    assert [block.successors for block in graph.blocks] == [(3, 1), (3, 2), (0,), ()]
    assert len(graph.main_loop()) == 4


def test_a_kernel_without_loops_has_no_main_loop(code):
    assert Graph.of(code[:4]).main_loop() == []


def test_kinds_of_opcodes():
    kinds = {
        "LDSM.16.M88.4": "LDSM",
        "IMAD.MOV.U32": "IMAD.MOV",
        "IMAD.WIDE.U32": "IMAD.WIDE",
        "IMAD": "IMAD",
        "IMAD.U32": "IMAD",
        "IADD3.X": "IADD3",
    }
    assert {opcode: kind_of(opcode) for opcode in kinds} == kinds


def test_tensor_core_instructions():
    hmma = mma("HMMA.16816.F32.BF16")
    assert (hmma.flops, hmma.a, hmma.b, hmma.result) == (4096, 4, 2, 4)
    assert (mma("HMMA.16816.F16").result, mma("HMMA.1688.F32.BF16").a) == (2, 2)
    hgmma = mma("HGMMA.64x128x16.F32.BF16")
    assert (hgmma.flops, hgmma.a, hgmma.result, hgmma.is_warpgroup) == (2 * 16 * 128 * 16, 4, 64, True)
    assert mma("FFMA") is None


@pytest.mark.parametrize(
    ("opcode", "words", "banks"),
    [
        ("LDSM.16.M88.4", 4, 4),
        ("LDSM.16.MT88.2", 2, 2),
        ("LDGSTS.E.BYPASS.LTC128B.128", 4, 4),
        ("LDS.64", 2, 2),
        ("STS", 1, 1),
        ("LDG.E.128", 4, 8),
        ("STL", 1, 2),
        ("LDL.LU", 1, 1),
        ("SHFL.BFLY", 1, 0),
    ],
)
def test_memory_accesses(opcode, words, banks):
    assert (access_width(opcode), bank_wavefronts(opcode)) == (words, banks)


def test_registers_that_instructions_read_and_write(at):
    hmma = at[0x2C0]
    assert results_of(hmma) == {8, 9, 10, 11}
    assert operands_of(hmma) == {4, 5, 6, 7, 14, 15, 8, 9, 10, 11}
    address = at[0x4C0]  # IMAD.WIDE.U32 R14, R15, 0x4, R22
    assert (results_of(address), operands_of(address)) == ({14, 15}, {15, 22, 23})
    assert (results_of(at[0x260]), operands_of(at[0x260])) == (set(), {18, 2, 3})
    assert (results_of(at[0x1F0]), operands_of(at[0x1F0])) == ({3}, {17, 12})  # IADD3 R3, P0, R17, R12, RZ
    assert (results_of(at[0x2E0]), operands_of(at[0x2E0])) == (set(), {8})  # FSETP
    assert (results_of(at[0x160]), operands_of(at[0x160])) == ({10, 11}, set())  # CS2R
    assert operands_of(at[0x230]) == set()  # a filler


def test_registers_of_warpgroup_instructions():
    operands = "R24, gdesc[UR8], R24", "R24, R4, gdesc[UR8], R24, gsb0", "R24, gdesc[UR8], !UPT"
    both_shared, a_in_registers, first = parse(listing(*(f"HGMMA.64x16x16.F32.BF16 {text}" for text in operands)))
    accumulator = set(range(24, 32))
    assert results_of(both_shared) == results_of(first) == accumulator
    assert operands_of(both_shared) == accumulator
    assert operands_of(a_in_registers) == accumulator | {4, 5, 6, 7}
    assert operands_of(first) == set()


def test_a_value_lives_from_its_result_to_its_last_use(code):
    live = live_registers(Graph.of(code))
    assert live[0x000] == 1  # R1
    assert live[0x550] == 0
    assert live[0x0C0] - live[0x090] == 3  # three more words of A
    assert max(live.values()) == 22


def test_registers_and_labels_have_no_names_in_a_comparison():
    pairs = [
        ("FFMA R12, R5.reuse, UR4, -R3", "FFMA R1, R2, UR9, -R30.reuse"),
        ("ISETP.GE.AND P0, PT, R5, RZ, PT", "ISETP.GE.AND P3, PT, R7, RZ, PT"),
        ("@P0 BRA `(.L_x_1)", "@P2 BRA `(.L_x_33)"),
    ]
    for texts in pairs:
        left, right = parse(listing(*texts))
        assert normalised(left) == normalised(right)
    for texts in [("@P0 EXIT", "@!P0 EXIT"), ("LDS R1, [R2+0x10]", "LDS R1, [R2+0x20]"), ("MOV R1, RZ", "MOV R1, R2")]:
        left, right = parse(listing(*texts))
        assert normalised(left) != normalised(right)


def test_products_that_read_a_from_shared_memory():
    assert reads_a("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24], R24, gsb0")
    assert reads_a("@P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], RZ, !UPT")
    assert not reads_a("HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR8].tnspB, R88")
    assert not reads_a("LDSM.16.M88.4 R4, [R2]")


def test_work_of_instructions():
    assert work("HMMA.16816.F32.BF16") == {"issue": 1, "tensor": 4096}
    assert work("HGMMA.64x64x16.F32.BF16") == {"issue": 1, "wgmma": 2 * 16 * 64 * 16, "lsu": 4, "shared": 4}
    both = work("HGMMA.64x128x16.F32.BF16", from_shared=True)
    assert (both["lsu"], both["shared"]) == (8 + 4, 8 + 4)  # wavefronts of B, and of A
    assert work("IMAD.MOV.U32") == {"issue": 1, "fma": 32, "imad": 32}
    assert work("IMAD.WIDE.U32") == work("IMAD.HI.U32") == {"issue": 1, "fma": 64, "imad": 64}
    assert all(work(opcode) == {"issue": 1, "alu": 32} for opcode in ("R2UR", "ELECT", "VOTE.ANY", "VOTEU.ALL"))
    assert (work("VIADD"), work("CS2R")) == ({"issue": 1, "fma": 32}, {"issue": 1, "alu": 32})
    assert work("LDSM.16.M88.4") == {"issue": 1, "lsu": 4, "shared": 4}
    assert work("LDGSTS.E.BYPASS.LTC128B.128") == {"issue": 1, "lsu": 0, "shared": 4}
    assert work("SHFL.BFLY") == {"issue": 1, "lsu": 1, "shared": 0}
    assert work("BAR.SYNC.DEFER_BLOCKING") == {"issue": 1}
    assert work("LDS", is_filler=True) == {"issue": 1, "lsu": 1}
    assert work("IADD3", is_filler=True) == {"issue": 1}


@pytest.mark.parametrize(
    ("gpu", "cycles"), [("a100", 8), ("h100", 6), ("rtx3090", 32), ("rtx4090", 32), ("a6000", 16), ("l40s", 16)]
)
def test_cycles_of_a_sub_core_for_one_hmma(gpu, cycles):
    rates = throughput(load_gpu(gpu))
    assert 4 * 4096 / rates["tensor"].per_clock == pytest.approx(cycles)


def test_rate_of_mma_sync_is_left_out_where_nobody_measured_it():
    rates = throughput(load_gpu("b200"))
    assert "tensor" not in rates
    assert rates["wgmma"].per_clock == tensor_peak(load_gpu("b200")) == 8192


def test_bounds_are_work_by_rate_the_longest_first(code):
    asked = loads(Graph.of(code).main_loop(), times=4)
    found = bounds(asked, load_gpu("h100"))
    assert [bound.cycles for bound in found] == sorted((bound.cycles for bound in found), reverse=True)
    by_pipe = {bound.pipe: bound for bound in found}
    assert by_pipe["issue"].cycles == 37
    assert by_pipe["tensor"].cycles == pytest.approx(6)
    assert by_pipe["mufu"].cycles == 2 * 4 * 32 / 16
    assert by_pipe["tensor"].source == "measured"


def test_unknown_arch_has_no_rates():
    with pytest.raises(ConfigError, match="has no sm_75, only sm_80, sm_86"):
        throughput(dataclasses.replace(load_gpu("h100"), arch="sm_75"))


@pytest.mark.parametrize(
    ("gpu", "registers", "threads", "shared", "ctas", "limited_by"),
    [
        ("h100", 255, 128, 65536, 2, ("registers",)),  # as ncu says of a profiled kernel: block limit registers 2
        ("a100", 255, 128, 65536, 2, ("registers", "shared memory")),
        ("h100", 168, 128, 49152, 3, ("registers",)),
        ("h100", 73, 128, 0, 6, ("registers",)),  # a warp is given whole lots of 256
        ("h100", 32, 1024, 0, 2, ("registers", "threads")),
        ("h100", 168, 384, 232448, 1, ("registers", "shared memory")),
        ("rtx3090", 64, 128, 49152, 2, ("shared memory",)),
        ("a100", 16, 32, 0, 32, ("CTAs",)),
    ],
)
def test_occupancy(gpu, registers, threads, shared, ctas, limited_by):
    found = occupancy_of(registers, threads, shared, load_gpu(gpu))
    assert (found.ctas, found.limited_by) == (ctas, limited_by)
    assert found.warps == ctas * threads // 32


def test_a_file_that_is_no_cubin_is_named(tmp_path):
    file = tmp_path / "kernel.cubin"
    file.write_text("no code")
    with pytest.raises(ToolchainError, match=r"nvdisasm cannot disassemble .*kernel\.cubin: .*A whole cubin"):
        disassemble(file)
