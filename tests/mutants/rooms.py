"""Which tests are asked of a mutant: those of the room that the changed file is in, what is nearest to it first."""

import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from flashladder.common import catalog
from flashladder.common.compiler.sources import Sources
from flashladder.common.paths import ROOT

TESTS = ROOT / "tests"
FEW = 3  # rungs that answer for a header that more of them read


def python_files() -> list[Path]:
    """What mutants of Python are made of."""
    return sorted(path for top in ("common", "tuner") for path in (ROOT / top).rglob("*.py"))


@functools.cache
def device_files() -> dict[Path, list[catalog.Version]]:
    """What mutants of device code are made of, each file with the rungs that read it: those with most tests first."""
    found: dict[Path, list[catalog.Version]] = {}
    sources, rungs = Sources(), [rung for ladder in catalog.ladders() for rung in catalog.versions(ladder=ladder)]
    for rung in sorted(rungs, key=lambda rung: -len(_tests_of(rung))):
        for path in sources.closure(rung.kernel) if not rung.draft else ():
            found.setdefault(path, []).append(rung)
    return found


def near(path: Path) -> list[str]:
    """The tests of a file's room, as pytest takes them: first those that name the module most often, last slow ones."""
    if path.suffix != ".py":
        return _of_rungs(device_files()[path][:FEW])
    top = ROOT / "common" if path.is_relative_to(ROOT / "common") else ROOT
    room = next(TESTS / folder for folder in path.relative_to(top).parents if (TESTS / folder).is_dir())
    return _in_order(path, room.glob("test_*.py")) if room != TESTS else _naming(path)


def _naming(path: Path) -> list[str]:
    return [test for test in _in_order(path, TESTS.rglob("test_*.py")) if _count(path, test)]


def _in_order(path: Path, files: Iterable[Path]) -> list[str]:
    def place(test: str) -> tuple[bool, int, str]:
        return "pytestmark = pytest.mark.slow" in (ROOT / test).read_text(), -_count(path, test), test

    return sorted((str(test.relative_to(ROOT)) for test in files), key=place)


def _count(path: Path, test: str) -> int:
    name = path.parent.name if path.stem == "__init__" else path.stem.strip("_")
    return len(re.findall(rf"\b{name}\b", (ROOT / test).read_text()))


def _of_rungs(rungs: Sequence[catalog.Version]) -> list[str]:
    """The tests whose parameters name a rung; then the files that name one."""
    files = {str(file.relative_to(ROOT)): file.read_text() for file in sorted((TESTS / "rungs").glob("test_*.py"))}
    naming = [name for name, text in files.items() if any(f'"{rung.address}"' in text for rung in rungs)]
    return [*(test for rung in rungs for test in _tests_of(rung)), *naming]


@functools.cache
def _tests_of(rung: catalog.Version) -> list[str]:
    """Those whose parameters name a rung, or begin with its number: first those with the whole name."""
    ways = rf"[\[-]{rung.name}[-\]]", rf"[\[-]{rung.address}[-\]]" if rung.ladder else rf"\[{rung.number}[-\]]"
    return list(dict.fromkeys(test for way in ways for test in _of_the_room() if re.search(way, test)))


@functools.cache
def _of_the_room() -> list[str]:
    """All tests of the rungs' room that need no GPU."""
    command = [sys.executable, "-m", "pytest", "tests/rungs", "--collect-only", "-q", "-o", "addopts=", "-m", "not gpu"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return [line for line in listed.splitlines() if "::" in line]
