"""Long tests of rungs that no call launches take turns, which follow from the files that they are of."""

import types

import pytest

from flashladder.common import catalog
from flashladder.common.workshop import exercises
from flashladder.tests.support import turns


def item(rung, *marks, params=None):
    return types.SimpleNamespace(
        name=f"test_it[{rung.number}]",
        path=__file__,
        callspec=types.SimpleNamespace(params=params or {"rung": rung, "seqlen": 3}),
        get_closest_marker=lambda name: types.SimpleNamespace(args=()) if name in marks else None,
    )


@pytest.fixture(autouse=True)
def _taking_turns(monkeypatch):
    monkeypatch.delenv("FLASHLADDER_TESTS", raising=False)


def test_each_test_is_in_a_part_which_moves_with_the_files():
    parts = {turns.part("test_it[02]", str(digest)) for digest in range(30)}
    assert parts == {*range(turns.PARTS)}
    of_names = {turns.part(f"test_it[{number}]", "digest") for number in range(30)}
    assert of_names == parts


def test_of_what_no_call_launches_a_part_is_asked(monkeypatch):
    rungs = [rung for rung in catalog.versions(ladder="forward") if rung not in turns.launched()]
    asked = [rung for rung in rungs if turns.is_asked(item(rung))]
    assert 0 < len(asked) < len(rungs) / 2
    left = next(rung for rung in rungs if rung not in asked)
    assert turns.is_asked(item(left, "every_time"))
    monkeypatch.setenv("FLASHLADDER_TESTS", "all")
    assert all(turns.is_asked(item(rung)) for rung in rungs)


def test_what_calls_launch_is_asked_whole():
    assert catalog.find("49") in turns.launched()
    assert all(turns.is_asked(item(rung)) for rung in turns.launched())
    assert not all(turns.is_asked(item(rung, "in_turn")) for rung in turns.launched())


def test_a_rung_may_be_named():
    """By its number, or with its ladder; a number that is something else is no rung."""
    for given, rungs in [
        ({"rung": "24", "seqlen": 33}, [catalog.find("24")]),
        ({"rung": "decode/08", "other": catalog.find("49")}, [catalog.find("49"), catalog.find("decode/08")]),
        ({"rung": "plain", "number": "64", "seqlen": 24}, []),
    ]:
        assert turns.rungs_of(item(catalog.find("49"), params=given)) == rungs


def test_exercises_and_marks_name_rungs(request):
    exercise = exercises.exercises()[0]
    assert turns.rungs_of(item(exercise.version, params={"exercise": exercise})) == [exercise.version]
    assert turns.rungs_of(request.node) == []
    request.node.add_marker(pytest.mark.in_turn("backward/23"))
    assert turns.rungs_of(request.node) == [catalog.find("backward/23")]


def test_of_each_function_one_case_is_asked():
    asked = item(next(rung for rung in catalog.versions(ladder="forward") if rung not in turns.launched()), "slow")
    cases = [types.SimpleNamespace(**{**vars(asked), "name": f"test_it[{number}]"}) for number in range(60)]
    for case in cases:
        case.originalname = "test_it"
    assert 0 < len(turns.left_out(cases)) < 60
    unasked = [case for case in cases if not turns.is_asked(case)]
    for few in (unasked[:1], unasked[:5]):
        assert len(turns.left_out(few)) == len(few) - 1
