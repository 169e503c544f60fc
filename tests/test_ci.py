"""Continuous integration counts the tests that passed, whatever the environment makes of pytest and make."""

import os
import re
import subprocess
import sys

import pytest

from flashladder.common.paths import ROOT

FOUND = "def test_one(): pass\ndef test_two(): pass\n"


@pytest.fixture
def code(tmp_path):
    """The exit code of a count of two, in a folder where `make test` runs these tests."""
    outer = ("ARGS", "MAKE", "MFLAGS", "GNUMAKE", "PYTEST")
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    cleaned["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds
    (tmp_path / "Makefile").write_text(f"test:\n\t{sys.executable} -m pytest -p no:cacheprovider $(ARGS)\n")

    def run(tests, **environment):
        (tmp_path / "test_it.py").write_text(tests)
        command = [ROOT / ".ci" / "at_least", "2", "make", "test"]
        return subprocess.run(command, cwd=tmp_path, env=cleaned | environment, capture_output=True).returncode

    return run


def test_all_tests_pass(code):
    assert code(FOUND, PYTEST_ADDOPTS="--color=yes") == 0


@pytest.mark.parametrize(
    "environment",
    [
        {"ARGS": "--collect-only"},
        {"PYTEST_ADDOPTS": "-k one"},
        {"MAKEFLAGS": "-n"},
    ],
    ids=str,
)
def test_fewer_are_too_few(code, environment):
    assert code(FOUND, **environment) != 0


def test_what_make_ignores_is_no_pass(code):
    assert code(f"{FOUND}def test_three(): assert False\n", MAKEFLAGS="-i") != 0
    error = "import pytest\n@pytest.fixture\ndef broken(): assert False\ndef test_four(broken): pass\n"
    assert code(f"{FOUND}{error}", MAKEFLAGS="-i") != 0


def test_ci_counts_what_each_command_of_the_readme_runs():
    counted = re.findall(r"^\.ci/at_least (\d+) make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert [command for _, command in counted] == ["test", "test-long"]
    assert all(int(least) > 500 for least, _ in counted)
    assert all(f"`make {command}`" in (ROOT / "README.md").read_text() for _, command in counted)
