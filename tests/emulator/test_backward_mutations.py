"""The same as test_mutations.py for the backward rungs that have synchronisation of Hopper's, kernel by kernel."""

import pytest
from one_kernel import OneKernel

from flashladder.common.problem.problem import Problem

pytestmark = pytest.mark.slow

# These have no synchronisation that one of the others has not, instruction by instruction, and are not asked.
ASKED, AS_IN = ("13", "16"), ("14", "15")


def rung(number, tiles=2, **options):
    """Its main kernel, and a problem whose loop goes round: twice so many tiles of Q, of which the last one is cut.

    Two tiles of keys: of what is added to dQ, two numbers and zero, the order does not matter.
    """
    sizes = {"seqlen_q": tiles * 64 - 20, "seqlen_k": 200, "head_dim": 128, "num_heads": 2, "num_heads_k": 1}
    return OneKernel(
        f"backward/{number}", "attention_backward", Problem(**sizes, options=options, operation="backward")
    )


@pytest.mark.parametrize("number", AS_IN)
def test_what_is_not_asked_has_no_synchronisation_of_its_own(number):
    asked = rung(ASKED[0]).counted() | rung(ASKED[1]).counted()
    assert rung(number).counted() <= asked


@pytest.mark.parametrize("number", ASKED)
def test_the_loss_of_any_synchronisation_is_reported(number):
    rung(number).is_exact(f"backward/{number}")


def test_the_loss_of_any_part_of_an_order_of_additions_is_reported():
    """What rung 19 has beside rung 18: a place for dQ that is given and taken, how a warp is told that its turn to add
    has come, and warps that each wait for the kernel before."""
    in_order = rung("19", deterministic=True)
    more = in_order.counted() - rung("18").counted()
    asked = {name: each for name, each in in_order.mutations() if (*name[:2], name[3]) in more}
    assert {name[0].split(".")[0] for name in asked} == {"ld", "red", "cp", "mbarrier", "griddepcontrol"}
    _, outputs = in_order.run(in_order.program)
    assert in_order.missed(asked, (), outputs) == []


def test_the_loss_of_any_synchronisation_of_a_ring_of_three_is_reported():
    """Of rung 20, whose Q has three places, which come round with six tiles."""
    rung("20", tiles=3, deterministic=True).is_exact("backward/20")


def test_without_dq_lanes_wait_for_each_other_before_a_tile_is_given_back():
    without = rung("20", wants_dq=False)
    asked = {name: each for name, each in without.mutations() if name[0] == "bar.warp.sync"}
    _, outputs = without.run(without.program)
    given_back, *_ = asked  # behind it are those of what is stored in the end
    assert given_back not in without.missed({given_back: asked[given_back]}, (), outputs)
