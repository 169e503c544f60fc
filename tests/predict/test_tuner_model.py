"""The cost model: a simulated sub-core on made-up loops, and real kernels in the order that an H100 gave them."""

import dataclasses

import pandas as pd
import pytest

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.sass import throughput
from flashladder.common.compiler.sass.instruction import NO_BARRIER
from flashladder.common.paths import ROOT
from flashladder.common.predict import cost
from flashladder.common.predict.agreement import rank_correlation
from flashladder.common.predict.cost import MainLoop, Workload
from flashladder.common.predict.subcore import BARRIER_LATENCY, GLOBAL_LATENCY, LATENCY, Step, cycles
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.tuner.candidates import Candidate, Stock, predict
from flashladder.tuner.space import Space

H100 = load_gpu("h100")
RATES = throughput(H100)
HMMA = 6  # cycles that one occupies a sub-core of an H100


def step(opcode, stall=1, waits=(), sets=NO_BARRIER, pending=0):
    return Step(opcode, False, stall, sum(1 << scoreboard for scoreboard in waits), sets, pending)


def passes(steps, ctas=1, warps=1, factor=1.0):
    return cycles(steps, ctas, warps, RATES, factor)


def test_a_warp_alone_takes_its_stall_cycles():
    assert passes([step("IADD3", 4), step("MOV", 2), step("BRA", 5)]) == pytest.approx(11)


def test_a_warp_alone_waits_for_what_it_reads():
    steps = [step("LDSM.16.M88.4", sets=0), step("IADD3", waits=(0,))]
    assert passes(steps) == pytest.approx(LATENCY["LDSM"] + 1, abs=1)


def test_other_warps_fill_the_waits():
    steps = [step("LDSM.16.M88.4", sets=0), step("FADD", waits=(0,)), *[step("FADD", 2)] * 20]
    alone, four = passes(steps), passes(steps, ctas=4)
    assert four < 2.5 * alone
    assert four >= 4 * 21, "each warp still issues its instructions"


def test_the_tensor_cores_are_the_limit_of_many_warps():
    steps = [step("HMMA.16816.F32.BF16", 2)] * 8 + [step("FMUL", 1)] * 8
    assert passes(steps, ctas=4) == pytest.approx(4 * 8 * HMMA, rel=0.06)


def test_conflicts_lengthen_shared_memory_accesses():
    steps = [step("LDSM.16.M88.4")] * 4
    slow, fast = (passes(steps, ctas=2, factor=factor) for factor in (8.0, 1.0))
    assert slow == pytest.approx(8 * fast, rel=0.05)


@pytest.mark.parametrize("opcode", ["LDGSTS.E.BYPASS.128", "SHFL.BFLY", "STG.E.128", "LDL"])
def test_conflicts_leave_alone_what_is_no_load_or_store_of_shared_memory(opcode):
    steps = [step(opcode)] * 4
    assert passes(steps, ctas=2, factor=8.0) == passes(steps, ctas=2)


def test_copies_are_waited_for_as_far_as_they_may_not_be_pending():
    steps = [step("LDGSTS.E.BYPASS.128"), step("LDGDEPBAR"), *[step("FADD")] * 10]
    assert passes([*steps, step("DEPBAR.LE")]) == pytest.approx(GLOBAL_LATENCY, rel=0.05)
    assert passes([*steps, step("DEPBAR.LE", pending=1)]) < 0.7 * GLOBAL_LATENCY


def test_the_warps_of_a_cta_meet_at_barriers():
    steps = [step("FADD", 10), step("BAR.SYNC", 1)]
    assert passes(steps, warps=2) >= 10 + BARRIER_LATENCY


def test_rank_correlation():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [8, 4, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)


PROBLEM = Problem(batch=4, num_heads=16, seqlen_q=4096)
# Rung, tile and fragments, and TFLOP/s on an H100 SXM.
MEASURED = (
    ("02", {"block_m": 64, "q_fragments": 0, "k_fragments": 0, "v_fragments": 0}, 284),
    ("02", {"block_m": 64, "q_fragments": 2, "k_fragments": 2, "v_fragments": 2}, 300),
    ("02", {"block_m": 128, "num_warps": 8, "q_fragments": 0, "k_fragments": 2, "v_fragments": 2}, 246),
    ("09", {"block_m": 64, "block_n": 128, "q_fragments": 0, "k_fragments": 2, "v_fragments": 2}, 337),
    ("09", {"block_m": 64, "block_n": 128, "q_fragments": 2, "k_fragments": 2, "v_fragments": 2}, 277),
    ("16", {"block_m": 128, "q_fragments": 2, "k_fragments": 2, "v_fragments": 2}, 372),
)


@pytest.fixture(scope="module")
def artifacts():
    requests = []
    for number, values, _ in MEASURED:
        version = catalog.find(number)
        tile = {"block_n": 64, "num_warps": 4, **values}
        buffered = {"double_buffer": False} if "double_buffer" in version.choices else {}
        requests.append(BuildRequest(version, version.config_for(PROBLEM, **tile, **buffered), H100.arch))
    return build(requests)


def workload(artifact, factor=1.0):
    rows, keys = artifact.launch.block_m, artifact.launch.block_n
    return Workload(artifact, H100, 4 * 16 * 4096 // rows // 132 + 1, 4096 / keys, factor)


@pytest.mark.slow
def test_kernels_rank_as_they_did_on_an_h100(artifacts):
    predicted = [-workload(artifact).cycles() for artifact in artifacts]
    assert rank_correlation(predicted, [rate for _, _, rate in MEASURED]) > 0.8


@pytest.mark.slow
def test_times_are_in_the_right_range(artifacts):
    for artifact, (_, _, rate) in zip(artifacts, MEASURED, strict=True):
        seconds = workload(artifact).cycles() / (H100.boost_mhz * 1e6)
        assert PROBLEM.flops / seconds / 1e12 == pytest.approx(rate, rel=0.35)


def test_what_an_instruction_costs_beside_mmas_is_the_tensor_cores_time():
    loop = [step("HMMA.16816.F32.BF16"), step("FFMA")] * 10
    assert passes(loop) == pytest.approx(10 * HMMA, rel=0.05)
    beside = cycles(loop, 1, 1, RATES, beside_mma={"FFMA": 1.5})
    assert beside == pytest.approx(10 * (HMMA + 1.5), rel=0.05)


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ({"seqlen_q": 512}, 8),
        ({"seqlen_q": 500}, 8),
        ({"seqlen_q": 512, "causal": True}, (2 + 4 + 6 + 8) / 4),
        ({"seqlen_q": 128, "seqlen_k": 512, "causal": True}, 8),
        ({"seqlen_q": 512, "seqlen_k": 128, "causal": True}, (0 + 0 + 0 + 2) / 4),
    ],
)
@pytest.mark.slow
def test_a_block_that_a_mask_cuts_is_computed_whole(artifacts, values, blocks):
    tile = artifacts[2].launch
    assert (tile.block_m, tile.block_n) == (128, 64)
    assert cost.workload(Problem(**values), artifacts[2], H100, 1.0).blocks == pytest.approx(blocks)


def test_heads_that_share_keys_are_one_tile_and_memory_is_a_bound():
    sizes = {"batch": 132, "num_heads": 128, "num_heads_k": 1, "seqlen_q": 1, "seqlen_k": 4096}
    task = Problem(operation="mla", head_dim=576, head_dim_v=512, **sizes)
    version = catalog.find("mla/00")
    (artifact,) = build([BuildRequest(version, version.config_for(task), H100.arch)])
    found = cost.workload(task, artifact, H100, 1.0)
    assert (found.ctas, found.blocks) == (128 / 16, 4096 / 64)
    fast, slow = (dataclasses.replace(H100, bandwidth_gb_s=rate) for rate in (1e6, 1.0))
    assert cost.time_us(task, artifact, fast, 1.0) == found.cycles() / H100.boost_mhz
    assert cost.time_us(task, artifact, slow, 1.0) == task.asked.bytes_moved(task) / 1e3
    assert "ladder mla" in str(cost.experience(version))


def test_a_rung_that_was_measured_at_one_length_has_one_figure_and_no_range():
    assert "took 1.58 times" in str(cost.experience(catalog.find("00")))
    assert " to " in str(cost.experience(catalog.find("02")))


@pytest.mark.slow
def test_conflicts_make_a_kernel_slower(artifacts):
    assert workload(artifacts[0], 8.0).cycles() > 1.5 * workload(artifacts[0]).cycles()


@pytest.mark.slow
def test_a_loop_is_kept_in_the_cache(artifacts, monkeypatch):
    loop = MainLoop.of(artifacts[0])
    monkeypatch.setattr(cost.sass, "read", lambda artifact: pytest.fail("disassembled again"))
    assert MainLoop.of(artifacts[0]) == loop
    assert loop.warps == 4
    assert loop.blocks == pytest.approx(1)


def test_prediction_knows_the_conflicts_of_rung_01_and_the_swizzle_of_02():
    factors = {}
    for number in ("01", "02"):
        space = Space.of(catalog.find(number), (Problem(batch=1, num_heads=2, seqlen_q=256),))
        (factors[number],) = cost.conflicts(space.version, space.problems[0], [space.default], H100).values()
    assert factors["02"] == 1
    assert 7 < factors["01"] <= 8, "eight rows of a matrix in the same banks, but for what reads O back; no copies"


def test_a_kernel_full_of_conflicts_takes_about_as_long_as_on_an_h100():
    version = catalog.find("01")
    space = Space.of(version, (PROBLEM,))
    (artifact,) = build([BuildRequest(version, version.config_for(PROBLEM), H100.arch)])
    (factor,) = cost.conflicts(space.version, space.problems[0], [space.default], H100).values()
    seconds = workload(artifact, factor).cycles() / (H100.boost_mhz * 1e6)
    assert PROBLEM.flops / seconds / 1e12 == pytest.approx(55, rel=0.35)  # at the boost clock, as all


def test_a_longer_problem_takes_longer():
    version = catalog.find("02")
    times = []
    for seqlen in (1024, 4096):
        space = Space.of(version, (Problem(batch=4, num_heads=16, seqlen_q=seqlen),))
        space = dataclasses.replace(space, configs=(space.default,))
        artifacts = build([BuildRequest(version, space.full(space.default, space.problems[0]), H100.arch)])
        stock = Stock(space, (Candidate("code", (space.default,), tuple(artifacts)),), {})
        times.append(predict(stock, H100)["code"])
    assert times[1] == pytest.approx(16 * times[0], rel=0.2)


def test_the_pages_rank_correlations_are_those_of_the_studies():
    """The logs have the times that were predicted then."""
    found = []
    for study in sorted((ROOT / "results" / "tuning").glob("??_*-h100-bf16-d128-full.csv")):
        trials = pd.read_csv(study).dropna(subset=["ratio", "predicted_us"])
        found.append(f"{rank_correlation(list(trials['predicted_us']), list(1 / trials['ratio'])):.2f}")
    assert (
        f"| all kernels of rung 02; 09; 16; 22 | H100 | | {'; '.join(found)} |"
        in (ROOT / "docs" / "cost-model.md").read_text()
    )
