"""A copied checkout runs its own code, or none."""

import os
import shutil
import subprocess
import sys

import pytest

from flashladder.common.paths import ROOT, mixed_checkouts


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A checkout whose rung 02 has another idea, as somebody has who edits it."""
    root = tmp_path_factory.mktemp("copied") / "checkout"
    for name in ("common", "configs", "tests", "tools", "tuner", "versions"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root)
    declared = root / "versions" / "forward" / "02_swizzling" / "version.yaml"
    declared.write_text(declared.read_text().replace("idea: ", "idea: Edited here. "))
    return root


def run(copy, *command, **environment):
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FLASHLADDER_TESTS"))}
    options = {"capture_output": True, "text": True, "cwd": copy, "env": known | environment}
    return subprocess.run([sys.executable, *command], **options)


TOOLS = [["tools/run_version.py"], ["tuner/search.py"], ["-m", "flashladder", "run"]]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda words: words[-1])
@pytest.mark.parametrize("folder", [".", "versions/forward/02_swizzling"])
def test_the_originals_code_is_refused(copy, tool, folder):
    if tool[0] != "-m":
        tool = [copy / tool[0]]
    done = run(copy / folder, *tool, "--list")
    assert done.returncode == 2
    assert f"would run the code of another checkout, {ROOT}, " in done.stderr
    assert f"run `make venv` in {copy}, or set PYTHONPATH" in done.stderr
    assert "Swizzling" not in done.stdout


def test_the_originals_code_is_not_tested(copy):
    done = run(copy, "-m", "pytest", "-q", "tests/problem/test_problem.py")
    assert done.returncode == 2
    assert "would run the code of another checkout" in done.stdout + done.stderr


def test_its_own_code_runs_by_way_of_pythonpath(copy, tmp_path):
    (tmp_path / "flashladder").symlink_to(copy)
    done = run(copy, "tools/run_version.py", "--list", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Edited here" in done.stdout


def test_what_is_of_this_checkout_or_of_none_is_not_refused(tmp_path):
    assert mixed_checkouts(ROOT / "tools" / "run_version.py") is None
    assert mixed_checkouts(ROOT) is None
    assert mixed_checkouts(tmp_path / "bin" / "flashladder") is None
