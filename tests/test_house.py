"""Where things are, and who knows whom.

The map in common/__init__.py is held against the imports.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashladder
from flashladder import common
from flashladder.common.paths import ROOT

COMMON = ROOT / "common"
ROOMS = re.findall(r"^(\w+) {2,}", common.__doc__, re.MULTILINE)  # in the order of the map
MOST_MODULES = 16  # at the top of common/


def imports(node: ast.AST) -> Iterator[str]:
    """What the code imports of the package when it runs, also within functions: "common.compiler.Artifact"."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            top, _, within = child.module.partition(".")
            if top == flashladder.__name__:
                yield from (f"{within}.{alias.name}".lstrip(".") for alias in child.names)
        yield from imports(child)


def arrows(*tops: str) -> Iterator[tuple[Path, str]]:
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            for name in imports(ast.parse(path.read_text())):
                yield path, name


def place(path: Path) -> str:
    """The room of a file of common/, or the file's own name."""
    return path.relative_to(COMMON).parts[0].removesuffix(".py")


def test_the_map_names_every_room():
    rooms = {path.parent.name for path in COMMON.glob("*/*") if path.suffix in (".py", ".cuh")}
    assert rooms == set(ROOMS)
    assert len(ROOMS) == len(set(ROOMS))


def test_few_modules_lie_beside_the_rooms():
    beside = sorted(path.name for path in COMMON.glob("*.py") if path.name != "__init__.py")
    assert len(beside) <= MOST_MODULES, beside


def test_common_knows_neither_tools_nor_tuner():
    assert {name.partition(".")[0] for _, name in arrows("common")} == {"common"}
    assert {name.partition(".")[0] for _, name in arrows("versions")} == {"common"}
    assert {name.partition(".")[0] for _, name in arrows("tuner")} == {"common", "tuner"}


def test_a_room_knows_only_those_above_it():
    known = {(place(path), name.split(".")[1]) for path, name in arrows("common")}
    between = {(a, b) for a, b in known if a != b and {a, b} <= set(ROOMS)}
    assert len(between) > len(ROOMS)
    wrong = [f"{a} -> {b}" for a, b in sorted(between) if ROOMS.index(b) > ROOMS.index(a)]
    assert not wrong


def test_no_circle_goes_through_the_modules_beside_the_rooms():
    graph: dict[str, set[str]] = {}
    for path, name in arrows("common"):
        if (other := name.split(".")[1]) != place(path):
            graph.setdefault(place(path), set()).add(other)
    assert {"problem", "console"} <= graph.keys()
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f():\n    from flashladder.common.runtime import gpu", ["common.runtime.gpu"]),
        ("from flashladder import attention, common", ["attention", "common"]),
        ("if TYPE_CHECKING:\n    from flashladder.common.compiler import Artifact", []),
        ("import torch\nfrom torch import nn", []),
    ],
)
def test_what_counts_as_an_import(code, found):
    assert list(imports(ast.parse(code))) == found
