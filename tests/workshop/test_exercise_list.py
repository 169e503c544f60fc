"""Which rungs have an exercise, and that the others say why they have none."""

from collections import Counter

import pytest

from flashladder.common import catalog
from flashladder.common.errors import ConfigError
from flashladder.common.workshop import exercises
from flashladder.common.workshop.exercises import page
from flashladder.common.workshop.scaffold import inherited

ALL = exercises.exercises()
FIRST_RUNGS = 20  # of the forward ladder


def test_each_of_the_first_rungs_has_an_exercise_or_a_reason():
    have = {exercise.version.name for exercise in ALL}
    for version in catalog.versions()[:FIRST_RUNGS]:
        assert (version.name in have) != bool(version.no_exercise), version.name


def test_each_ladder_has_some_and_backward_has_two_for_hopper():
    of_ladder = Counter(exercise.version.ladder for exercise in ALL)
    assert of_ladder["backward"] >= 3
    assert of_ladder["decode"] >= 3
    assert of_ladder["mla"] >= 1
    backward = [exercise.version for exercise in ALL if exercise.version.ladder == "backward"]
    assert [version.instruction_set for version in backward].count("hopper") == 2


def test_who_asks_for_an_exercise_that_makes_no_sense_is_told_why():
    rung = catalog.find("04")
    with pytest.raises(ConfigError, match="There are those of 00") as raised:
        exercises.find("04")
    assert rung.no_exercise in str(raised.value)
    assert "no_exercise" not in inherited((rung.directory / "version.yaml").read_text()), "a reason is its rung's own"


def test_the_page_lists_them_all():
    assert page.section().is_current(), "`flashladder dashboard` brings it up to date"
