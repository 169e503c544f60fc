"""The machine code of real rungs: their main loops, and that each idea shows where it should."""

import dataclasses
import re
import subprocess
from functools import cache

import pytest

from flashladder.common.catalog import find, winners
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.sass import instruction, occupancy, read
from flashladder.common.compiler.sass.diff import (
    RungPair,
    align,
    changed,
    comparable_configs,
    normalised,
    source_diff,
)
from flashladder.common.compiler.toolchain import find_tool
from flashladder.common.errors import ToolchainError, UnsupportedProblemError
from flashladder.common.paths import VERSIONS
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

pytestmark = pytest.mark.slow

ARCHES = ("sm_80", "sm_90a")
PAIRS = (("01", "02"), ("05", "06"), ("07", "08"), ("08", "09"), ("09", "10"), ("10", "11"))
ADDRESSES = (
    *("IADD3", "VIADD", "LOP3", "SHF", "LEA"),
    *("IMAD", "IMAD.SHL", "IMAD.IADD", "IMAD.X", "IMAD.WIDE"),
)


@pytest.fixture(scope="module", autouse=True)
def _built_at_once():
    """On every core, what the tests then find in the cache."""
    requests = []
    for lower, upper in PAIRS:
        versions = find(lower), find(upper)
        for version, config in zip(versions, comparable_configs(*versions), strict=True):
            requests += [
                BuildRequest(version, config, arch) for arch in (ARCHES if "09" in (lower, upper) else ARCHES[1:])
            ]
    build(requests)


@cache
def pair(lower, upper, arch="sm_90a"):
    return RungPair.of(find(lower), find(upper), arch)


def code(name, arch="sm_90a", **overrides):
    version = find(name)
    return read(build([BuildRequest(version, version.config(**overrides), arch)])[0])


def total(counts, kinds):
    return sum(counts[kind] for kind in kinds)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("name", "rows"), [("02", 64), ("09", 128)])
def test_main_loop_does_one_block_of_k_and_v(name, rows, arch):
    found = code(name, arch)
    mmas_of_a_warp = rows // 4 * 64 * 128 * 2 // (16 * 8 * 16)
    assert found.loop_counts["HMMA"] == found.counts["HMMA"] == mmas_of_a_warp
    assert (found.loop_warps, found.loop_blocks) == (4, 1)
    assert found.loop_counts["LDGSTS"] == 16  # 64 rows of K and of V, 8 rows a copy of 4 warps
    assert found.loop_counts["MUFU"] >= rows // 4 * 64 // 32  # an exponential for each of a lane's scores
    assert found.loop_counts["BAR"] == 2
    assert 600 < len(found.loop) < len(found.instructions)
    assert found.loop_issue_cycles >= len(found.loop)


def test_main_loop_of_a_kernel_without_tensor_cores():
    found = code("00")
    assert found.loop_blocks == 0
    assert found.loop_counts["FFMA"] > found.counts["FFMA"] / 2


def test_peeled_first_block_is_not_in_the_main_loop():
    found = pair("09", "10").right
    assert found.counts["HMMA"] == 2 * found.loop_counts["HMMA"]


@pytest.mark.parametrize("name", ["02", "05"])
def test_live_registers_agree_with_nvdisasm(name):
    """nvdisasm counts the stack pointer, R1, as live to the end."""
    found = code(name)
    command = [find_tool("nvdisasm"), "-c", "-plr", "-lrm", "count", found.artifact.cubin]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = {int(m[1], 16): int(m[2]) for m in re.finditer(r"/\*(\w{4,})\*/.*?// \|\s+(\d+)\s+\|", printed)}
    assert {theirs[i.address] - found.live[i.address] for i in found.loop} <= {0, 1}


def test_nvdisasm_counts_no_live_registers_where_they_matter():
    """Why they are counted here: should it ever work, its count would do."""
    artifact = code("09").artifact
    command = [find_tool("nvdisasm"), "-c", "-plr", "-lrm", "count", artifact.cubin]
    assert artifact.registers == 255
    assert subprocess.run(command, capture_output=True).returncode != 0
    assert 200 < code("09").loop_live <= 255


def test_source_lines_lead_to_the_kernel():
    found = code("02")
    mmas = {i.source[-1].line for i in found.loop if i.base == "HMMA"}
    lines = find("02").kernel.read_text().splitlines()
    assert len(mmas) == 2
    assert all("gemm<" in lines[line - 1] for line in mmas)


def test_02_against_01_no_bank_conflicts():
    problem = Problem(seqlen_q=64)
    conflicts = {}
    for side in (pair("01", "02").left, pair("01", "02").right):
        report = on_emulator(side.artifact, problem, make_inputs(problem), race=False)
        conflicts[side.artifact.version] = report.shared_wavefronts / report.shared_wavefronts_ideal
    assert conflicts["01_base"] > 5
    assert conflicts["02_swizzling"] == 1


def test_06_against_05_one_ffma_for_a_multiplication_and_a_subtraction():
    before, after = pair("05", "06").left.loop_counts, pair("05", "06").right.loop_counts
    scores = 16 * 64 // 32  # of a lane
    assert after["FFMA"] - before["FFMA"] == scores
    assert before["FADD"] - after["FADD"] == scores
    assert before["FMUL"] - after["FMUL"] == pytest.approx(scores, abs=4)


@pytest.mark.parametrize("number", [f"{number:02}" for number in range(9, 17)])
def test_at_o1_nothing_is_spilled_as_the_page_of_spills_says(number):
    usual, plain = code(number), code(number, ptxas_level=1)
    assert usual.spill_instructions > 0 == plain.spill_instructions == plain.artifact.local_bytes
    claim = (
        f"| {number} | {usual.artifact.spill_store_bytes + usual.artifact.spill_load_bytes} → 0 "
        f"| {usual.spill_instructions} → 0 | {len(usual.loop)} → {len(plain.loop)} "
        f"| {usual.loop_issue_cycles:,} → {plain.loop_issue_cycles:,} |"
    )
    assert claim in (VERSIONS / "forward" / "SPILLS.md").read_text()


def test_winners_at_o1_gain_what_the_page_of_spills_says():
    found = {w.version[:2]: w for w in winners.of_gpu("h100") if w.kind.startswith("dtype=bf16") and "at-o1" in str(w)}
    assert [*found] == [f"{number:02}" for number in range(9, 17)]
    gains = [float(w.evidence["to_default"].split()[0]) for w in found.values() if w.values["ptxas_level"] == 1]
    assert len(gains) == len(found) - 1
    claim = f"{100 * min(gains) - 100:.1f} to {100 * max(gains) - 100:.1f} % faster than the rung's default"
    assert claim in " ".join((VERSIONS / "forward" / "SPILLS.md").read_text().split())


def test_a_level_of_ptxas_that_is_asked_for_holds_for_both_rungs():
    for config in comparable_configs(find("08"), find("09"), {"ptxas_level": 1}):
        assert config.ptxas_level == 1
    lower, upper = comparable_configs(find("20"), find("21"))
    assert "ptxas_level" not in lower.fields
    assert upper.ptxas_level == 1


@pytest.mark.parametrize("arch", ARCHES)
def test_08_against_07_less_address_arithmetic(arch):
    """On sm_90a the compiler works much of it out before the loop, spills it, and reloads it with LDL."""
    large = {"block_m": 128, "block_n": 64, "q_fragments": 2, "double_buffer": False}  # where registers are short
    before, after = (total(code(name, arch, **large).loop_counts, (*ADDRESSES, "LDL")) for name in ("07", "08"))
    assert after < 0.7 * before


@pytest.mark.parametrize("arch", ARCHES)
def test_09_against_08_fewer_moves(arch):
    compared = pair("08", "09", arch)
    before, after = (total(side.loop_counts, ("MOV", "IMAD.MOV")) for side in (compared.left, compared.right))
    assert after < before / 2
    assert compared.left.loop_counts["HMMA"] == compared.right.loop_counts["HMMA"]


def test_10_against_09_no_zeroing_of_accumulators():
    compared = pair("09", "10")
    assert compared.left.counts["CS2R"] >= 128
    assert compared.right.counts["CS2R"] == 0


def test_11_against_10_the_epilogue_alone_changes():
    compared = pair("10", "11")
    assert len(compared.left.loop) == len(compared.right.loop)
    assert compared.left.counts["LOP3"] - compared.right.counts["LOP3"] > 30


@pytest.mark.parametrize("causal", [False, True])
def test_38_with_one_place_for_q_is_37(causal):
    """So its page says that rung 37's figures are its own."""
    one, lower = code("38", head_dim=64, causal=causal, q_stages=1), code("37", head_dim=64, causal=causal)
    assert [*map(normalised, one.instructions)] == [*map(normalised, lower.instructions)]
    assert one.figures() == lower.figures()
    assert one.artifact.launch == lower.artifact.launch


def test_bounds_of_the_main_loop():
    found = {bound.pipe: bound.cycles for bound in code("09").loop_bounds(load_gpu("h100"))}
    assert found["tensor"] == pytest.approx(4 * 128 * 64 * 128 / (4096 * 2 / 3))  # FLOP by FLOP a clock
    assert found["mufu"] >= 128 * 64 / 16
    assert found["issue"] == len(code("09").loop)


def test_occupancy_of_a_rung():
    found = occupancy(code("09").artifact, load_gpu("h100"))
    assert (found.ctas, found.warps) == (2, 8)
    assert found.limits["shared memory"] == 3
    with pytest.raises(UnsupportedProblemError, match=r"09_fewer_moves .* does not fit an SM of rtx3090"):
        occupancy(code("09", block_n=128).artifact, _smaller(load_gpu("rtx3090")))


def _smaller(gpu):
    return dataclasses.replace(gpu, shared_per_sm=65536, shared_per_block=64512)


def test_two_rungs_are_compared_in_one_configuration():
    lower, upper = comparable_configs(find("07"), find("08"))
    assert lower.as_dict() == upper.as_dict() == find("08").config().as_dict()
    lower, upper = comparable_configs(find("08"), find("09"), {"block_m": 64})
    assert lower.block_m == upper.block_m == 64


def test_rungs_of_one_kernel_are_compared_in_their_own_configurations():
    lower, upper = comparable_configs(find("03"), find("04"))
    assert (lower.k_fragments, upper.k_fragments) == (4, 2)
    assert source_diff(find("03"), find("04")) == ""


def test_a_field_that_the_lower_rung_lacks_is_the_uppers_alone():
    lower, upper = comparable_configs(find("04"), find("05"))
    assert "double_buffer" not in lower.fields
    assert upper.double_buffer


def test_source_diff_names_the_rungs():
    text = source_diff(find("05"), find("06"))
    assert text.startswith("--- 05_double_buffer/kernel.cu\n+++ 06_fp32_throughput/kernel.cu")
    assert len(text.splitlines()) < 40


def test_alignment_forgives_renamed_registers_alone():
    compared = pair("10", "11")
    aligned = list(align(compared.left.loop, compared.right.loop))
    assert [each.left for each in aligned if each.left] == list(compared.left.loop)
    assert [each.right for each in aligned if each.right] == list(compared.right.loop)
    same = [each for each in aligned if each.is_same]
    assert len(same) > 0.8 * len(compared.left.loop)
    assert all(normalised(each.left) == normalised(each.right) for each in same)
    assert any(each.left.text != each.right.text for each in same)
    beside = [each for each in aligned if each.left and each.right and not each.is_same]
    assert beside  # what came instead stands beside what it replaced
    assert all(normalised(each.left) != normalised(each.right) for each in beside)


def test_changed_counts_are_the_greatest_first():
    found = changed(pair("08", "09").left.loop_counts, pair("08", "09").right.loop_counts)
    assert {kind for kind, _, _ in found[:2]} == {"MOV", "IMAD.MOV"}
    assert all(before != after for _, before, after in found)


def test_a_missing_nvdisasm_is_said_with_its_remedy(monkeypatch, tmp_path):
    def none(name):
        raise ToolchainError(f"no usable {name}")

    monkeypatch.setattr(instruction, "find_tool", none)
    with pytest.raises(ToolchainError, match="no usable nvdisasm"):
        instruction.disassemble(tmp_path / "kernel.cubin")
