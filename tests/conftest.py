"""What must be so before any test module is imported, how many tests run at a time, and which run alone."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from flashladder.common.paths import mixed_checkouts

os.environ["TRITON_INTERPRET"] = "1"  # triton reads it once; interpreted even where there is a GPU
os.environ.pop("FLASHLADDER_FAST", None)  # both ways of a call are tested
os.environ.pop("FLASHLADDER_VERSIONS", None)  # the ladders that are tested are those of this repository
os.environ.pop("COLUMNS", None)  # tables as wide as in a pipe
# The race detector's tables are large, and little of them is touched: pages of 2 MiB would all be cleared.
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")  # numpy reads it once
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small here, and pytest's workers take the cores
settings.register_profile("same", derandomize=True, deadline=None)  # --hypothesis-profile=default: others each time
settings.load_profile("same")

MOST_WORKERS = 8  # each takes a gigabyte, and half of one on the GPU
DOOR = "FLASHLADDER_TESTS_DOOR"  # names the lock that the workers of one run share


def pytest_configure(config):
    if mixed := mixed_checkouts(Path(__file__)):
        pytest.exit(mixed, returncode=2)
    if DOOR not in os.environ:  # a worker has it from the run that began it
        folder = tempfile.TemporaryDirectory(prefix="flashladder-tests-")
        os.environ[DOOR] = str(Path(folder.name, "door"))
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A worker a core."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Of long tests some are left to other runs. What runs alone comes last."""
    from flashladder.tests.support.turns import left_out

    left = set(left_out(items))
    config.hook.pytest_deselected(items=[*left])
    kept = [item for item in items if item not in left]
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("alone") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test marked `alone` runs, fixtures and all, while no other does.

    Nothing queues behind one that waits, so that those that run alone end up behind all others.
    """
    with open(os.environ[DOOR], "a") as door:
        fcntl.flock(door, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(door, fcntl.LOCK_UN)  # closing it would not do where a test has forked


def pytest_runtest_setup(item):
    if item.get_closest_marker("git") and not shutil.which("git"):
        pytest.skip("no git: sudo apt-get install git")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch finds no NVIDIA GPU on this machine")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    if item.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()  # the GPU's memory is for all workers


@pytest.fixture
def run(capsys):
    """Calls `flashladder run` in this process, on the emulator; gives its exit code, output and errors.

    Files that are about another tool have a `run` of their own.
    """
    from flashladder.common import console
    from flashladder.tools.commands import run_version

    def call(*arguments):
        code = console.run(run_version.main, run_version.parser(), ["--device", "emulator", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a ladder of one's own, the same for all tests of a file: what its rung saves is compiled once."""
    return tmp_path_factory.mktemp("ideas") / "mine"


@pytest.fixture
def rung(folder, monkeypatch):
    """The rung mine/00_my_idea, as it was made."""
    from flashladder.tests.support import ideas

    return ideas.begin(monkeypatch, folder)
