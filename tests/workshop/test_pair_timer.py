"""A rung of an idea is timed beside its parent, by a process that measures."""

import numpy as np
import pytest

from flashladder.common.catalog import find
from flashladder.common.errors import DeviceError, VerificationError
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.target import Target
from flashladder.common.workshop.trial import compare, make
from flashladder.tests.support import ideas
from flashladder.tuner.pair import PairTimer
from flashladder.tuner.worker import Comparison, Quarantine

PLACE = Target(on_gpu=False, arch="sm_90a", gpu=load_gpu("h100"))
PROBLEM = Problem(batch=4, num_heads=16, seqlen_q=4096)


def idea_of(rung):
    return compare(rung, find(ideas.PARENT), PROBLEM, PLACE, {})


class FakeWorker:
    """Answers as the process that measures would."""

    def __init__(self, answer):
        self.answer = answer
        self.place = {"device": "a GPU"}

    def compare(self, problems, entrants, rounds):
        assert (len(problems), [*entrants]) == (1, ["02_swizzling", "mine/00_my_idea"])
        return self.answer


def test_a_rung_is_timed_beside_its_parent(rung):
    ideas.save(rung, "longer")
    idea = idea_of(rung)
    wobble = 1 + 0.001 * np.sin(np.arange(32))
    times = {"02_swizzling": 100 * wobble, "mine/00_my_idea": 96 * wobble[::-1], "control": 100 * wobble}
    timer = PairTimer("h100", "hot", None, FakeWorker(Comparison("02_swizzling", "control", (times,), ("a note",))))
    timing = timer(idea, make(idea, print))
    assert timing.ratio.value == pytest.approx(100 / 96, rel=1e-3)
    assert (timing.verdict, timing.rounds, timing.notes) == ("faster", 32, ("a note",))
    assert (timing.parent_us, timing.time_us) == pytest.approx((100, 96), rel=1e-3)
    assert timing.place == {"device": "a GPU"}


@pytest.mark.parametrize(
    ("fault", "error"), [("wrong", VerificationError), ("hung", DeviceError), ("faulted", DeviceError)]
)
def test_what_goes_wrong_on_the_gpu_is_an_error(rung, fault, error):
    idea = idea_of(rung)
    timer = PairTimer("h100", "hot", None, FakeWorker(Quarantine(fault, "the reason")))
    with pytest.raises(error, match="the reason"):
        timer(idea, make(idea, print))
