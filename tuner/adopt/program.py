"""Runs a program under the recorder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flashladder.common.console import warn
from flashladder.common.errors import ConfigError, ResultsError
from flashladder.tuner.adopt.demand import Demand

RECORDER = "flashladder.tuner.adopt.recorder"
OWN_OPTIONS = ("-c", "-", "-i")  # of Python, with which there is no file or module to run


def record(words: Sequence[str]) -> Demand:
    """What a Python program asks for, run in a process of its own with this one's environment and output."""
    python, options, rest = _split(words)
    with tempfile.TemporaryDirectory(prefix="flashladder-adopt-") as folder:
        file = Path(folder, "problems.json")
        try:
            code = subprocess.run([python, *options, "-m", RECORDER, str(file), *rest]).returncode
        except OSError as error:
            raise ConfigError(f"{python} cannot be run: {error.strerror or error}") from error
        demand = Demand.load(file) if file.exists() else None
        if demand is None or not (demand.calls or demand.refused):
            raise ResultsError(
                f"nothing was recorded: {' '.join(words)} ended with exit code {code}, and its own process called "
                "neither torch's scaled_dot_product_attention nor this project's functions"
            )
        if code:
            warn(f"the program ended with exit code {code}; what it asked for until then is taken")
        return demand


def _split(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Python, options of its own, and the program with its arguments. ConfigError where that is no program."""
    python, *rest = words
    if not Path(python).name.startswith("python"):
        raise ConfigError(f"{python} is no Python: after -- goes python, and a file or -m MODULE, with arguments")
    options = []
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        if rest[0] in OWN_OPTIONS:
            raise ConfigError(f"python {rest[0]}: a file or -m MODULE can be recorded")
        options.append(rest.pop(0))
        if options[-1] in ("-W", "-X") and rest:
            options.append(rest.pop(0))
    if not rest or rest == ["-m"]:
        raise ConfigError(f"{' '.join(words)} names no program: after python goes a file or -m MODULE")
    return sys.executable if python in ("python", "python3") else python, options, rest
