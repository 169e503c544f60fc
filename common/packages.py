"""The packages that setup.py asks for, and what brings one that this Python lacks.

setup.py and tools/bootstrap.py run this file where no package is there yet.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator

# The oldest releases that will do. Tests run transformers at both ends: this one, and that of constraints.txt.
OLDEST = {"torch": "2.9", "transformers": "5.17", "diffusers": "0.42", "kernels": "0.17"}


def requirements() -> Iterator[tuple[str, str]]:
    """The packages' names, each with the extra that brings it; "" where it is no extra's."""
    for line in importlib.metadata.requires("flashladder") or ():
        extra = re.search(r"extra == ['\"](\w+)", line)
        yield re.split(r"[^\w.-]", line)[0], extra[1] if extra else ""


def install(extra: str) -> str:
    """The command that brings the packages of an extra."""
    return f"`{sys.executable} -m pip install 'flashladder[{extra}]'`"


def brings(extra: str) -> str:
    """What brings a package of an extra, and what spares a person the same question at the next command."""
    return f"{install(extra)} brings it; 'flashladder[all]' brings what every command needs"


def lack(error: ModuleNotFoundError) -> str:
    """What lacks where an import failed, and what brings it. An error of the project's own modules is raised again."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "flashladder"):
        raise error
    try:
        extras = [extra for name, extra in requirements() if name == module and extra]
    except importlib.metadata.PackageNotFoundError:  # not installed, but found by way of PYTHONPATH
        extras = []
    if extras:
        return f"{sys.executable} has no {module}; {brings(extras[0])}"
    return f"{sys.executable} has no {module}; in a checkout `make venv` brings it, else pip install {module}"
