"""The CPU of this machine, and its git."""

from __future__ import annotations

import os
import platform
import shutil
from functools import cache
from pathlib import Path

from flashladder.common.errors import ToolchainError


def threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


@cache
def identity() -> str:
    """The CPU's name and features: code that was compiled for one CPU is not for another."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    wanted = ("model name", "flags", "CPU part", "Features")  # the latter two on Arm
    return "\n".join(sorted(line for line in lines if line.startswith(wanted))) or platform.machine()


def title() -> str:
    """The CPU in words."""
    names = [line.partition(":")[2].strip() for line in identity().splitlines() if line.startswith("model name")]
    cores = "1 core" if threads() == 1 else f"{threads()} cores"
    return f"{names[0] if names else platform.machine()}, {cores}"


def find_git() -> str:
    """The program that applies patches and knows commits. Raises ToolchainError where there is none."""
    if found := shutil.which("git"):
        return found
    raise ToolchainError("no git, which patches and commits need: `sudo apt-get install git`")
