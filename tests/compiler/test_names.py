"""Folders and files called as nobody would: what is in them is compiled, and no name is run as a command."""

import ctypes
import os
import subprocess
import sys

import pytest

from flashladder.common.compiler import build_one, sass, toolchain, translate
from flashladder.common.compiler.library import build_library, find_c_compiler
from flashladder.common.emulator import compile_ptx
from flashladder.common.paths import AS_NAMES
from flashladder.tests.support.tiny_ladder import make_rung

QUOTES = "a \"word\" and 'another'"
NAMES = (
    "do$x",
    "`touch run`",
    "$(touch${IFS}run)",
    "x;touch run;y & (z) | >run",
    "back\\slash \\n",
    "two\nlines",
    "-o #%*?~!{}[]=,@",
    "Bücher 日本",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Such a folder: the cache's, the compilers' and that of temporary files."""
    place = tmp_path.joinpath(*NAMES, QUOTES)
    place.mkdir(parents=True)
    (place / "bin").symlink_to(toolchain.toolchain().nvcc.parent)
    (place / "host").symlink_to(toolchain.find_host_compiler().parent)
    (place / "cc").symlink_to(find_c_compiler())
    monkeypatch.setenv("NVCC_CCBIN", str(place / "host" / toolchain.find_host_compiler().name))
    monkeypatch.setenv("CC", str(place / "cc"))
    for variable in ("FLASHLADDER_CACHE", "FLASHLADDER_CUDA", "TMPDIR"):
        monkeypatch.setenv(variable, str(place))
    monkeypatch.chdir(place)
    toolchain.toolchain.cache_clear()
    yield place
    toolchain.toolchain.cache_clear()
    assert not list(tmp_path.rglob("run")), "a name was run as a command"


def test_kernels_are_compiled(place):
    """And their lines are known, by ptxas and the emulator."""
    version = make_rung(place.parent / "ladder", "07_$(touch run)")  # ptxas reads no path with a "
    module = translate(version, version.config(), "sm_80")
    program = compile_ptx(module.ptx.read_text(errors=AS_NAMES), module.entry)
    artifact = build_one(version, version.config(), "sm_80")
    assert artifact.directory.parent == place / "artifacts"
    by_ptxas = {at.file for instruction in sass.read(artifact).instructions for at in instruction.source}
    by_emulator = {at[0] for instruction in program.kernel.instructions for at in instruction.source}
    assert by_ptxas == by_emulator == {str(version.kernel)}


def test_libraries_are_compiled(place):
    source = place / "$(touch run).c"
    source.write_text("int answer(void) { return VALUE; }\n")
    assert ctypes.CDLL(str(build_library(source, {"VALUE": "7 * 6"}))).answer() == 42


IN_ASCII = """
import sys
from pathlib import Path
from flashladder.common.compiler import build_one, sass
from flashladder.common.catalog import find
version = find("tiny", Path(sys.argv[1]))
artifact = build_one(version, version.config(), "sm_80")
assert {str(version.kernel)} == {at.file for each in sass.read(artifact).instructions for at in each.source}
"""


def test_names_beyond_ascii_where_the_locale_has_no_others(tmp_path):
    place = tmp_path / NAMES[-1]
    make_rung(place)
    environment = {**os.environ, "FLASHLADDER_CACHE": str(place), "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", IN_ASCII, place], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
