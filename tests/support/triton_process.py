"""A process in which Triton compiles: conftest.py has it interpreted in the one that runs the tests."""

import os
import subprocess
import sys


def run(*arguments, **options):
    """Python with these arguments, as subprocess.run does it with these options."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], env=environment, **options)
