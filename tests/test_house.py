"""Where things are, and who knows whom: the map in common/__init__.py is held against the imports.

Every import counts, also within functions, under TYPE_CHECKING, and relative ones.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import flashladder
from flashladder import common, tuner
from flashladder.common.paths import ROOT

COMMON = ROOT / "common"
ROOMS = re.findall(r"^(\w+) {2,}", common.__doc__, re.MULTILINE)  # in the order of the map
MOST_MODULES = 16  # at the top of common/
DOORS = ("search", "plots", "replay")  # of tuner/: scripts that are typed


def imports(code: str, package: str) -> Iterator[str]:
    """What code in a package imports of this one: "common.compiler.Artifact"."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [above, node.module]))
            if is_ours(module):
                yield from (f"{module}.{alias.name}".partition(".")[2] for alias in node.names)


@cache
def imported(path: Path) -> list[str]:
    """The same of a file."""
    package = ".".join([flashladder.__name__, *path.parent.relative_to(ROOT).parts])
    return list(imports(path.read_text(), package))


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == flashladder.__name__


def name_of(path: Path) -> str:
    """The module that a file is: "common.compiler" of common/compiler/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(*tops: str) -> dict[str, Path]:
    return {name_of(path): path for top in tops for path in sorted((ROOT / top).rglob("*.py"))}


def arrows(*tops: str) -> Iterator[tuple[str, str]]:
    """Each module with each name that it imports."""
    for module, path in modules(*tops).items():
        yield from ((module, name) for name in imported(path))


def graph(*tops: str) -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules(*tops)
    found: dict[str, set[str]] = {module: set() for module in known}
    for module, name in arrows(*tops):
        target = name if name in known else name.rpartition(".")[0]
        found[module] |= {target} & known.keys() - {module}
    return found


def circles(known: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules of which each is reached from each."""
    reached = {module: reachable(module, known) for module in known}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in known}
    return sorted(sorted(group) for group in groups if group)


def reachable(start: str, known: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = known[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def room(name: str) -> str:
    """The room of common/ that a module or a name is in, or the module beside the rooms."""
    return name.split(".")[1] if "." in name else ""


def test_the_map_names_every_room():
    rooms = {path.parent.name for path in COMMON.glob("*/*") if path.suffix in (".py", ".cuh")}
    assert rooms == set(ROOMS)
    assert len(ROOMS) == len(set(ROOMS))


def test_few_modules_lie_beside_the_rooms():
    beside = sorted(path.name for path in COMMON.glob("*.py") if path.name != "__init__.py")
    assert len(beside) <= MOST_MODULES, beside


def test_common_knows_neither_tools_nor_tuner():
    assert {name.partition(".")[0] for _, name in arrows("common")} == {"common"}
    assert {name.partition(".")[0] for _, name in arrows("versions")} == {"common", "versions"}
    assert {name.partition(".")[0] for _, name in arrows("tuner")} == {"common", "tuner"}


def test_a_room_knows_only_those_above_it():
    between = {(room(module), room(name)) for module, name in arrows("common")}
    between = {(a, b) for a, b in between if a != b and {a, b} <= set(ROOMS)}
    assert len(between) > len(ROOMS)
    assert not [f"{a} -> {b}" for a, b in sorted(between) if ROOMS.index(b) > ROOMS.index(a)]


def test_a_module_of_the_tuner_knows_only_those_above_it():
    """A folder is one of them."""
    order = re.findall(r"^(\w+) {2,}", tuner.__doc__, re.MULTILINE)
    assert {*order} == {room(name) for name in modules("tuner")} - {"", *DOORS}
    known = [(module, other) for module, others in graph("tuner").items() for other in others - {"tuner"}]
    places = {pair: [order.index(room(name)) for name in pair] for pair in known}
    assert places
    assert not [pair for pair, (place, of_other) in places.items() if of_other > place]


def test_no_module_imports_itself_by_way_of_others():
    known = graph("common", "tuner", "tools", "versions")
    assert len(known) > 200
    assert not circles(known)


def test_no_circle_goes_through_the_modules_beside_the_rooms():
    known: dict[str, set[str]] = {}
    for module, name in arrows("common"):
        known.setdefault(room(module), set()).add(room(name))
    known = {place: {other for other in others if other in known and other != place} for place, others in known.items()}
    assert {"problem", "console"} <= known.keys()
    assert not circles(known)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f():\n    from flashladder.common.runtime import gpu", ["common.runtime.gpu"]),
        ("from flashladder import attention, common", ["attention", "common"]),
        ("if TYPE_CHECKING:\n    from flashladder.common.compiler import Artifact", ["common.compiler.Artifact"]),
        ("from . import copies\nfrom .ops import mma", ["common.emulator.copies", "common.emulator.ops.mma"]),
        ("from .. import errors", ["common.errors"]),
        ("import flashladder.common.paths", ["common.paths"]),
        ("import torch\nfrom torch import nn", []),
    ],
)
def test_what_counts_as_an_import(code, found):
    assert list(imports(code, "flashladder.common.emulator")) == found


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_two_test_files_have_one_name():
    """pytest imports a test file under its bare name: of two, it cannot collect the second."""
    paths: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        paths.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert len(paths) > 100
    assert not [alike for alike in paths.values() if len(alike) > 1]


def test_what_tests_share_lies_in_support():
    assert [path.name for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")] == ["conftest.py"]


def test_make_names_tests_that_exist():
    """One name that is gone, and pytest runs none of the others."""
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"tests/[\w/]+\.py", makefile)
    for folder, names in re.findall(r"addprefix tests/([\w/]*),([^)]*)\)", makefile):
        named += [f"tests/{folder}{name}" for name in names.split()]
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).exists()]
