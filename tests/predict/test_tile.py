"""A tile of a kernel of warpgroup products: made-up steps on the simulated sub-core, the way through real kernels."""

import dataclasses
import json

import pytest

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build, sass
from flashladder.common.compiler.sass import throughput
from flashladder.common.compiler.sass.instruction import NO_BARRIER
from flashladder.common.predict.subcore import LAUNCH, PRODUCT_LATENCY, TMA_LATENCY, Ring, Step, cycles, tile_cycles
from flashladder.common.predict.tile import COLD, TileWork, _with_rings
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem

H200 = load_gpu("h200")
RATES = throughput(H200)
LONG = 64  # cycles of a product of 64 x 128 x 16
SMALL = {"K": Ring(1, 1), "V": Ring(1, 1)}  # copies that take their latency alone


def step(opcode, stall=1, pending=0, **more):
    return Step(opcode, False, stall, 0, NO_BARRIER, pending, **more)


def product(n=128, **more):
    return step(f"HGMMA.64x{n}x16.F32.BF16", **more)


def wait(pending=0):
    return step("WARPGROUP.DEPBAR.LE", pending=pending)


def arrival(ring):
    return step("SYNCS.PHASECHK.TRANS64.TRYWAIT", ring=ring)


def release(ring):
    return step("SYNCS.ARRIVE.TRANS64.A1T0", ring=ring)


def tile(steps, ctas=1, warps=1, rings=None, is_persistent=True):
    return tile_cycles(steps, ctas, warps, RATES, rings or {}, is_persistent=is_persistent, tiles=8)


def test_a_product_is_waited_for_where_the_machine_code_says():
    others = [step("IADD3", 10)] * 10
    last = product(commits=True)
    assert cycles([*[product()] * 3, last, wait(), *others], 1, 1, RATES, passes=8) == pytest.approx(
        4 * LONG + PRODUCT_LATENCY + 100, rel=0.05
    )
    assert cycles([*[product()] * 3, last, *others, wait()], 1, 1, RATES, passes=8) == pytest.approx(
        4 * LONG + PRODUCT_LATENCY, rel=0.05
    )
    earlier = [product(commits=True), product(commits=True), wait(1), *others, wait()]
    assert cycles(earlier, 1, 1, RATES, passes=8) == pytest.approx(LONG + PRODUCT_LATENCY + 100, rel=0.1)


def test_the_tensor_cores_are_the_limit_of_many_warps():
    steps = [*[product()] * 7, product(commits=True), wait(), *[step("IADD3", 4)] * 50]
    assert tile(steps, warps=1) > 8 * LONG + 200
    assert tile(steps, warps=3) == pytest.approx(3 * 8 * LONG, rel=0.05)


def test_other_warps_instructions_make_products_longer():
    steps = [*[product()] * 7, product(commits=True), wait()]
    beside = [*steps, *[step("FFMA")] * 100]
    assert tile(beside, warps=3) == pytest.approx(3 * (8 * LONG + 100 * 1.3), rel=0.1)


def test_copies_slow_down_products_that_read_both_operands_from_shared_memory():
    """64 x 64 x 16 reads 4 KB in 32 cycles, all that shared memory has; 64 x 128 x 16 leaves a quarter."""
    rings = {"K": Ring(1, 16384)}
    times = {}
    for n in (64, 128):
        for name, ring in (("none", ""), ("some", "K")):
            loads = [arrival(ring), release(ring)] if ring else []
            products = [product(n, from_shared=True)] * 15 + [product(n, commits=True, from_shared=True)]
            times[n, name] = tile([*loads, *products, wait()], warps=2, rings=rings)
    assert times[64, "some"] > 1.07 * times[64, "none"]
    assert times[128, "some"] < 1.03 * times[128, "none"]


def test_shuffles_go_on_while_a_product_reads_its_operands():
    """It is queued with one instruction; its way to shared memory belongs to the tensor core's time."""
    shuffles = [step("SHFL", 4)] * 30
    steps = [product(128, commits=True, from_shared=True), *shuffles, wait()]
    assert tile(steps) == pytest.approx(tile([*shuffles, wait()]), abs=8)


def test_a_tile_is_asked_for_when_all_warps_have_released_its_place():
    work = [step("IADD3", 10)] * 10
    steps = [arrival("K"), release("K"), *work]
    assert tile(steps, warps=2, rings=SMALL) == pytest.approx(TMA_LATENCY, rel=0.05)
    assert tile(steps, warps=2, rings={"K": Ring(2, 1)}) == pytest.approx(TMA_LATENCY / 2, rel=0.05)
    assert tile(steps, warps=2, rings={"K": Ring(8, 1)}) == pytest.approx(100, rel=0.1)


def test_copies_share_what_l2_gives():
    steps = [arrival("K"), release("K")]
    assert tile(steps, ctas=2, rings={"K": Ring(4, 48_000)}) == pytest.approx(2000, rel=0.05)


def test_a_cta_that_is_not_persistent_begins_anew():
    steps = [arrival("K"), *[step("IADD3", 10)] * 10]
    assert tile(steps, rings=SMALL, is_persistent=False) == pytest.approx(LAUNCH + TMA_LATENCY + 100, rel=0.02)
    two = tile(steps, ctas=2, rings=SMALL, is_persistent=False)
    assert two == pytest.approx(LAUNCH + TMA_LATENCY + 100, rel=0.05), "another CTA runs meanwhile"


@pytest.fixture(scope="module")
def tiles():
    """Of rungs of each structure, in their defaults."""
    problem = Problem(batch=4, num_heads=16, seqlen_q=4096)
    rungs = [catalog.find(number) for number in ("16", "25", "26", "29", "30", "33", "36")]
    built = build([BuildRequest(rung, rung.config_for(problem, H200), H200.arch) for rung in rungs])
    return {rung.name[:2]: TileWork.of(sass.read(artifact)) for rung, artifact in zip(rungs, built, strict=True)}


def rings_of(steps):
    return " ".join(("+" if step.is_arrival else "-") + step.ring for step in steps if step.ring)


@pytest.mark.slow
def test_whose_tiles_are_waited_for_follows_from_their_order(tiles):
    """+ waits for a tile, - gives its place back."""
    found = {name: tuple(map(rings_of, (t.before, t.loop, t.after))) for name, t in tiles.items() if t}
    assert found == {
        "25": ("", "", ""),  # its copies are no TMA
        "26": ("+Q", "+K -K +V -V", ""),
        "29": ("+Q", "+K -K +V -V", ""),
        "30": ("+Q +K -K", "+K +V -K -V", "+V"),
        "33": ("+K -K", "+K +V -K -V", "+V -V"),  # Q comes in time
        "36": ("+Q +K -K", "+K +V -K -V", "+V -V -Q"),  # Q waits until O has left its place
    }


@pytest.mark.slow
def test_a_tile_knows_its_kernel(tiles):
    assert tiles["16"] is None, "it has no warpgroup products"
    assert {name for name, t in tiles.items() if t and t.is_persistent} == {"33", "36"}
    assert {t.warps for name, t in tiles.items() if name in ("29", "30", "33", "36")} == {8}
    assert (tiles["25"].warps, tiles["25"].places, tiles["29"].places) == (4, 1, 2)
    assert all(t.blocks == pytest.approx(1) for t in tiles.values() if t)


@pytest.mark.slow
def test_a_place_that_is_never_given_back_is_not_waited_for(tiles):
    of_33 = tiles["33"]
    parts = (of_33.before, of_33.loop, of_33.after)
    bare = [tuple(dataclasses.replace(step, ring="") for step in part) for part in parts]
    kept = tuple(step for step in bare[2] if not step.is_release)
    assert set(map(rings_of, _with_rings(*bare, True))) != {""}
    assert set(map(rings_of, _with_rings(bare[0], bare[1], kept, True))) == {""}


@pytest.mark.slow
def test_a_tile_survives_json(tiles):
    values = json.loads(json.dumps(dataclasses.asdict(tiles["33"])))
    assert TileWork.of_values(values) == tiles["33"]


@pytest.mark.slow
def test_a_longer_tile_follows_from_two_short_ones(tiles):
    spent = tiles["33"].cycles(1, RATES)
    assert spent.of(20) - spent.of(10) == pytest.approx(10 * spent.a_block)
    assert 2 * 16 * LONG < spent.a_block < 1.3 * 2 * 16 * LONG, "the products alone, and what slows them down"


@pytest.mark.slow
def test_code_outside_the_loop_costs_what_fetching_it_takes(tiles):
    of_33 = tiles["33"]
    longer = dataclasses.replace(of_33, after=of_33.after + (step("IADD3"),) * 500)
    assert longer.cycles(1, RATES).fixed - of_33.cycles(1, RATES).fixed > 0.5 * 500 * COLD


def test_what_a_warp_multiplies_by_itself_beside_warpgroup_products_is_left_out():
    """Rung 37 computes a block anew by mma.sync where its sums left fp32's range."""
    rung, problem = catalog.find("37"), Problem(batch=4, num_heads=16, seqlen_q=4096)
    (artifact,) = build([BuildRequest(rung, rung.config_for(problem, H200), H200.arch)])
    code = sass.read(artifact)
    assert any(instruction.base == "HMMA" for instruction in code.loop)
    tile = TileWork.of(code)
    assert not any(step.base in ("HMMA", "LDSM") for step in tile.loop)
    assert (tile.warps, tile.blocks) == (8, pytest.approx(1))
    assert rings_of(tile.loop) == "+K +V -K -V"
