"""The C++ way of a call under attack, in a process that a crash ends; see tests/support/attack_fast_path.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashladder.common.compiler import library
from flashladder.common.runtime import fast_path

ATTACK = Path(__file__).parents[1] / "support" / "attack_fast_path.py"
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def attacked(built, **environment):
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", ATTACK, built],
        env={**os.environ, "FLASHLADDER_QUIET": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["survived"]), ran.stdout + ran.stderr


@pytest.mark.slow
def test_it_survives_and_drops_what_it_took():
    attacked(library.build_extension(fast_path.SOURCE))


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path):
    """AddressSanitizer and UndefinedBehaviorSanitizer, with each of Python's objects in memory of its own."""
    command, _ = library.extension_command(fast_path.SOURCE)
    preloaded = [runtime_of(command[0], name) for name in ("libasan.so", "libstdc++.so.6")]
    built = tmp_path / library.FILE
    subprocess.run([*command, *SANITIZED, "-o", built, fast_path.SOURCE], check=True)
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONMALLOC": "malloc"}
    attacked(built, LD_PRELOAD=":".join(preloaded), **options)


def runtime_of(compiler, name):
    """Where a library of the compiler's lies."""
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"{compiler} has no {name}")
    return path
