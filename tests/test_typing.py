"""What a type checker knows of the public names: their signatures, and a name or an argument that is spelled wrong."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashladder
from flashladder.common.paths import ROOT

PROGRAM = """\
import torch
import flashladder
from flashladder import *
q = torch.zeros(1)
reveal_type(flashladder.attention)
attention(q, q, q, causal=True)
attention(q, q, q, caussal=True)
flashladder.flash_attn_func(q, q)
from flashladder import atention
"""
# Signatures are read, bodies are not, nor torch: seconds instead of a minute.
SETTINGS = """\
[mypy]
follow_imports = skip
[mypy-flashladder,flashladder.common.api.*]
follow_imports = silent
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """What mypy says of each line of the program."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "flashladder").symlink_to(ROOT)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--cache-dir=/dev/null", "program.py"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    found = dict(re.findall(r"^program\.py:(\d+): (.*)$", said, re.MULTILINE)[::-1])  # the first of each line
    assert found, said
    return {PROGRAM.splitlines()[int(line) - 1]: words for line, words in found.items()}


def test_a_function_has_its_signature(verdicts):
    assert 'Revealed type is "def (q: ' in verdicts["reveal_type(flashladder.attention)"]


def test_a_wrong_call_is_an_error(verdicts):
    assert 'error: Unexpected keyword argument "caussal"' in verdicts["attention(q, q, q, caussal=True)"]
    assert "error: Missing positional argument" in verdicts["flashladder.flash_attn_func(q, q)"]
    assert 'has no attribute "atention"' in verdicts["from flashladder import atention"]
    assert len(verdicts) == 4, "a right call is none"


@pytest.mark.parametrize("package", ["flashladder", "flashladder.common.emulator"])
def test_checkers_and_the_interpreter_read_the_same_names(package):
    module = importlib.import_module(package)
    (typed,) = (node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.If))
    names = {
        alias.asname: "." * node.level + str(node.module)
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert names == module._PUBLIC


def test_the_package_says_that_it_has_types():
    assert (ROOT / "py.typed").is_file()
    assert sorted(flashladder.__all__) == sorted(flashladder._PUBLIC)
