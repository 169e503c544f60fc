"""The same as test_mutations.py for the backward rungs that have synchronisation of Hopper's, kernel by kernel."""

from collections import Counter

import pytest
from one_kernel import OneKernel
from test_mutations import once_a_line

from flashladder.common.problem.problem import Problem

pytestmark = pytest.mark.slow

# These have no synchronisation that one of the others has not, instruction by instruction, and are not asked. Of the
# others rungs 20 and 22 are asked for everything, and these for what they have beside rung 20.
ASKED, AS_IN = ("backward/13", "backward/16"), ("backward/14", "backward/15")
# Three panels of dQ, of which one warpgroup has two and the other one, which are both ways of rung 21's loop.
WIDE = {"head_dim": 192, "head_dim_v": 128, "seqlen_k": 100}
# Two tiles of 96 keys. With a V of 128 columns calls launch rung 22 with three places of Q and dO, else with two.
NINETY_SIX = {"head_dim": 192, "head_dim_v": 128, "seqlen_k": 130}
TWO_PLACES = NINETY_SIX | {"head_dim_v": 192}
COMMIT = "wgmma.commit_group.sync.aligned"


def kernel(name, tiles=2, entry="attention_backward", sizes=None, config=None, **options):
    """Its main kernel, and a problem whose loop goes round: twice so many tiles of Q, of which the last one is cut.

    Two tiles of keys: of what is added to dQ, two numbers and zero, the order does not matter. So it is with heads that
    add to dK and dV.
    """
    usual = {"seqlen_q": tiles * 64 - 20, "seqlen_k": 200, "head_dim": 128, "num_heads": 2, "num_heads_k": 1}
    problem = Problem(**usual | (sizes or {}), options=options, operation="backward")
    return OneKernel(name, entry, problem, **(config or {}))


def in_order():
    """Rung 20, whose additions have an order."""
    return kernel("backward/20", tiles=3, deterministic=True)


def wide(tiles=3, **more):
    """Rung 21, whose Q may have three places as well."""
    return kernel("backward/21", tiles, sizes=WIDE, **more)


def ninety_six(tiles=3, sizes=NINETY_SIX, num_stages=3, **more):
    """Rung 22, whose rings come round with six tiles."""
    return kernel("backward/22", tiles, sizes=sizes, config={"num_stages": num_stages}, **more)


def products_of(kernel, listed):
    """Requires what `is_exact` does, of what orders lanes and products alone: other products stand before and behind
    them than where the rest is asked."""
    others = {kind: n for kind, n in kernel.counted().items() if not kind[0].startswith(("wgmma.", "bar.warp"))}
    kernel.is_exact(listed, Counter(others))


def split(tiles=3, **more):
    """Rung 20 where a CTA has one head of Q, which calls launch for groups under a causal mask."""
    return kernel("backward/20", tiles, sizes={"causal": True}, config={"split_heads": True}, **more)


def listed():
    """Rung 24 with a mask that hides a tile, and shows one whole, others in part; lists: test_list_mutations.py."""
    return kernel("backward/24", tiles=3, sizes={"mods": "mask=k<=q"})


@pytest.mark.parametrize("rung", AS_IN)
def test_what_is_not_asked_has_no_synchronisation_of_its_own(rung):
    asked = kernel(ASKED[0]).counted() | kernel(ASKED[1]).counted()
    assert kernel(rung).counted() <= asked


def test_the_last_pass_of_ninety_six_keys_has_no_synchronisation_of_its_own():
    """Beside that of rung 21, which is asked."""
    assert ninety_six(entry="backward_finish").counted() <= wide(entry="backward_finish").counted()


@pytest.mark.parametrize("rung", ASKED)
def test_the_loss_of_any_synchronisation_is_reported(rung):
    kernel(rung).is_exact(rung, in_order().reported("backward/20"))


def test_the_loss_of_any_part_of_an_order_of_additions_is_reported():
    """What rung 19 has beside rung 18: a place for dQ that is given and taken, how a warp is told that its turn to add
    has come, and warps that each wait for the kernel before."""
    in_order = kernel("backward/19", deterministic=True)
    more = in_order.counted() - kernel("backward/18").counted()
    asked = {name: each for name, each in in_order.mutations() if (*name[:2], name[3]) in more}
    assert {name[0].split(".")[0] for name in asked} == {"ld", "red", "cp", "mbarrier", "griddepcontrol"}
    _, outputs = in_order.run(in_order.program)
    assert in_order.missed(asked, (), outputs) == []


def test_the_loss_of_any_synchronisation_of_a_ring_of_three_is_reported():
    """Of rung 20, whose Q has three places, which come round with six tiles."""
    in_order().is_exact("backward/20")


def test_without_dq_all_is_needed_but_what_tells_groups_apart_that_are_waited_for_together():
    """Of one group may be S and dP of the first step, and dV and dK. No wait for dQ comes behind the others here."""
    without = kernel("backward/20", wants_dq=False)
    asked = {name: each for name, each in without.mutations() if name[0].startswith(("wgmma.wait", COMMIT, "bar.warp"))}
    _, outputs = without.run(without.program)
    together = [(COMMIT, "wgmma_commit();", number, "removed") for number in (1, 3)]
    assert without.missed(asked, (), outputs) == together


def test_whoever_adds_waits_for_the_tile_of_keys_that_stores():
    """Of rung 20 without an order."""
    at_once = kernel("backward/20")
    accesses = "ld.acquire.gpu.global.u32", "red.release.gpu.global.add.u32", "cp.async.bulk", "griddepcontrol"
    asked = {name: each for name, each in at_once.mutations() if name[0].startswith(accesses)}
    assert ("ld.acquire.gpu.global.u32", "while (load_acquire(added) == 0) {}", 1, "relaxed") in asked
    _, outputs = at_once.run(at_once.program)
    assert at_once.missed(asked, (), outputs) == []


def test_the_loss_of_any_synchronisation_of_unlike_warpgroups_is_reported():
    """What rung 21 has beside rung 20."""
    wide().is_exact("backward/21", in_order().reported("backward/20"))


def test_the_loss_of_any_part_of_their_order_of_additions_is_reported():
    """What `deterministic` has beside it; it need not go round the rings."""
    wide(tiles=2, deterministic=True).is_exact("backward/21, in order", wide().counted())


def test_of_a_line_that_is_unrolled_one_access_is_asked():
    """Of eight that add a panel of dQ, for three panels in the loop and three behind it; and all else."""
    at_once = wide()
    found = dict(at_once.mutations())
    left = once_a_line(found, at_once.program.blocks)
    assert [name[2] for name in left if name[0].startswith("red.")] == [1, 9, 17, 25, 33, 41]
    assert {name[0] for name in found.keys() - left.keys()} == {"red.global.add.v4.f32"}


def test_with_two_panels_of_dq_all_is_needed_that_needs_not_be_with_one():
    """At 256 columns both warpgroups have two."""
    both = kernel("backward/21", sizes=WIDE | {"head_dim": 256, "head_dim_v": 256})
    one_panel = ("wgmma_wait<decltype(pending)::value>();", 4)
    asked = {name: each for name, each in both.mutations() if name[1:3] == one_panel}
    assert len(asked) == 2
    _, outputs = both.run(both.program)
    assert both.missed(asked, (), outputs) == []


@pytest.mark.parametrize("part", ["dq", "dkv"])
def test_without_a_part_of_the_gradients_other_things_are_needed(part):
    """Of what orders lanes and products: other products stand before and behind them."""
    products_of(wide(**{f"wants_{part}": False}), f"backward/21, without {part}")


def test_the_loss_of_any_synchronisation_of_ninety_six_keys_is_reported():
    """All of rung 22, whose lines have other neighbours than in rungs 20 and 21, where Q and dO have three places."""
    ninety_six().is_exact("backward/22")


def test_the_loss_of_any_part_of_the_order_of_additions_of_ninety_six_keys_is_reported():
    """What `deterministic` has beside it; it need not go round the rings."""
    ninety_six(tiles=2, deterministic=True).is_exact("backward/22, in order", ninety_six().counted())


def test_with_two_places_products_of_ninety_six_keys_start_in_another_order():
    """Behind those of dQ, S of the next tile."""
    products_of(ninety_six(sizes=TWO_PLACES, num_stages=2), "backward/22, two places")


@pytest.mark.parametrize("part", ["dq", "dkv"])
def test_without_a_part_of_the_gradients_of_ninety_six_keys_other_things_are_needed(part):
    products_of(ninety_six(**{f"wants_{part}": False}), f"backward/22, without {part}")


def test_the_loss_of_any_synchronisation_of_heads_that_have_their_ctas_is_reported():
    """What they have beside rung 20 without an order."""
    together = kernel("backward/20", sizes={"causal": True}).counted()
    split().is_exact("backward/20, split heads", together)


def test_the_loss_of_any_synchronisation_of_a_loop_over_a_list_is_reported():
    """What rung 24 has beside rung 20."""
    listed().is_exact("backward/24", in_order().reported("backward/20"))


@pytest.mark.parametrize(
    ("name", "entry"),
    [("backward/20", "backward_finish"), ("backward/20", "backward_finish_keys"), ("backward/21", "backward_finish")],
)
def test_the_loss_of_any_synchronisation_of_a_last_pass_is_reported(name, entry):
    last = {"backward/20": split, "backward/21": wide}[name](tiles=1, entry=entry)
    last.is_exact(f"{name}, {entry}")
