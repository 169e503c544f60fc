"""Long tests of rungs that no call launches are asked in thirds, each third of some of the files that they are of."""

import types

import pytest

from flashladder.common import catalog
from flashladder.tests.support import thirds


def item(rung, *marks):
    return types.SimpleNamespace(
        name=f"test_it[{rung.number}]",
        path=__file__,
        callspec=types.SimpleNamespace(params={"rung": rung, "seqlen": 3}),
        get_closest_marker=lambda name: name in marks,
    )


@pytest.fixture(autouse=True)
def _in_thirds(monkeypatch):
    monkeypatch.delenv("FLASHLADDER_TESTS", raising=False)


def test_each_test_is_in_a_third_which_moves_with_the_files():
    parts = {thirds.part("test_it[02]", str(digest)) for digest in range(30)}
    assert parts == {*range(thirds.PARTS)}
    of_names = {thirds.part(f"test_it[{number}]", "digest") for number in range(30)}
    assert of_names == parts


def test_of_what_no_call_launches_a_third_is_asked(monkeypatch):
    rungs = [rung for rung in catalog.versions(ladder="forward") if rung not in thirds.launched()]
    asked = [rung for rung in rungs if thirds.is_asked(item(rung))]
    assert 0 < len(asked) < len(rungs) * 2 / 3
    left = next(rung for rung in rungs if rung not in asked)
    assert thirds.is_asked(item(left, "every_time"))
    monkeypatch.setenv("FLASHLADDER_TESTS", "all")
    assert all(thirds.is_asked(item(rung)) for rung in rungs)


def test_what_calls_launch_is_asked_whole():
    assert catalog.find("49") in thirds.launched()
    assert all(thirds.is_asked(item(rung)) for rung in thirds.launched())
    assert not all(thirds.is_asked(item(rung, "in_turn")) for rung in thirds.launched())


def test_a_rung_may_be_named():
    """By its number, or with its ladder; a number that is something else is no rung."""
    asked = item(catalog.find("49"))
    for given, rungs in [
        ({"rung": "24", "seqlen": 33}, [catalog.find("24")]),
        ({"rung": "decode/08", "other": catalog.find("49")}, [catalog.find("49"), catalog.find("decode/08")]),
        ({"rung": "plain", "number": "64", "seqlen": 24}, []),
    ]:
        asked.callspec.params = given
        assert thirds.rungs_of(asked) == rungs
    assert thirds.rungs_of(types.SimpleNamespace()) == []
