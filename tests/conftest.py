"""What must be so before any test module is imported, and how many tests run at a time."""

import os

import pytest
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"  # triton reads it once; interpreted even where there is a GPU
os.environ.pop("COLUMNS", None)  # tables as wide as in a pipe
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small here, and pytest's workers take the cores
settings.register_profile("same", derandomize=True, deadline=None)  # --hypothesis-profile=default: others each time
settings.load_profile("same")

MOST_WORKERS = 8  # each takes a gigabyte


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A worker a core; those that need a GPU, one after the other."""
    return 0 if config.option.markexpr != "not gpu" else min(len(os.sched_getaffinity(0)), MOST_WORKERS)
