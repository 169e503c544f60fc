"""Races of Hopper's asynchronous units, by class: the right kernel is silent, the wrong one is named, with both lines.

A class is one of bugs that real kernels shipped; classes.yaml says which. Each is found whether copies land as late as
PTX allows or as early.
"""

from pathlib import Path

import numpy as np
import pytest
import races_page
import yaml

from flashladder.common import emulator
from flashladder.common.emulator.errors import (
    DeadlockError,
    EmulatorError,
    MemoryAccessError,
    RaceError,
    SynchronisationError,
)

SOURCE = Path(__file__).with_name("proxies.cu").read_text().splitlines()
CLASSES = yaml.safe_load(Path(__file__).with_name("classes.yaml").read_text())
ERRORS = {each.__name__: each for each in (RaceError, SynchronisationError, DeadlockError, MemoryAccessError)}
WORDS, TILES, CTAS = 1024, 5, 2


def line_of(text):
    """Where a text first stands in proxies.cu."""
    return f"proxies.cu:{next(n for n, line in enumerate(SOURCE, 1) if text in line)}"


def run_kernel(ptx, entry, **options):
    """The output of one of proxies.cu, and its input."""
    memory = emulator.GlobalMemory()
    data = np.random.default_rng(0).integers(0, 100, (TILES, WORDS)).astype(np.int32)
    pointers = memory.add("in", data, readonly=True), memory.add("out", np.zeros(CTAS * 3 * WORDS, np.int32))
    params, has_warpgroup = np.array(pointers, np.uint64).tobytes(), entry.startswith(("product", "held_tile"))
    emulator.run(ptx, params, (CTAS, 1, 1), 160 if has_warpgroup else 128, 0, memory, entry=entry, **options)
    return memory.read("out").view(np.int32), data


@pytest.fixture(scope="module")
def proxies(compile_kernels):
    return compile_kernels("sm_90a", "proxies.cu")


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("written_tile_none", lambda data: np.concatenate([data[0], data[0] + 1])),
        ("ring_none", lambda data: data.reshape(-1, 64).sum(axis=0)),
        ("shared_tile_none", lambda data: 2 * data[:3].reshape(-1, 4, 32)[:, [1, 0, 3, 2]].reshape(-1)),
        ("product_none", None),
        ("held_tile_none", None),
        ("held_tile_read_fence", None),
        ("three_warps_none", lambda data: np.roll(data[0, :96], -32)),
    ],
)
def test_the_right_kernel_is_silent(proxies, entry, expected, lazy):
    found, data = run_kernel(proxies, entry, lazy_copies=lazy)
    if expected is not None:
        assert (found[: len(expected(data)) * CTAS].reshape(CTAS, -1) == expected(data)).all()


CASES = [(number, case) for number, each in CLASSES.items() for case in each["cases"]]


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(("number", "case"), CASES, ids=[f"{number}-{case['entry']}" for number, case in CASES])
def test_a_defect_is_named(proxies, number, case, lazy):
    """The error is of its kind, says why, and names both lines of proxies.cu."""
    with pytest.raises(EmulatorError) as error:
        run_kernel(proxies, case["entry"], lazy_copies=lazy)
    assert type(error.value) is ERRORS[case.get("error", "RaceError")]
    message = str(error.value)
    assert case["says"] in message
    for text in case["lines"]:
        assert line_of(text) in message
    if type(error.value) is RaceError and "register" not in message:
        assert message.splitlines()[-1].startswith("  mend: ")


def test_ctas_of_a_cluster_hand_values_to_each_other(proxies):
    found, data = run_kernel(proxies, "exchange_none")
    expected = data[0, :128].reshape(4, 32)[[1, 0, 3, 2]].reshape(-1)
    assert (found[:256].reshape(2, 128) == [expected + 1, expected]).all()


def test_every_class_has_a_case_and_the_page_has_them_all():
    assert sorted(CLASSES) == list(range(1, 14))
    assert all(each["cases"] for each in CLASSES.values())
    assert races_page.PAGE.read_text() == races_page.page(), "run tests/emulator/races_page.py"
