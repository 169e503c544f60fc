"""Who knows whom in the emulator: each room only those before it, no circle, and of the house nothing but its errors.

Every import counts, also one for the type checker and one within a function.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashladder.common.paths import ROOT

EMULATOR = ROOT / "common" / "emulator"
HOUSE, HERE, ERRORS = "flashladder", "flashladder.common.emulator", "flashladder.common.errors"
LAZY = "flashladder.common.lazy"  # imports that wait
ORDER = ["errors", "tensor_map", "parse", "compile", "execute", "races", "launch", "mutate", "__init__"]


def modules_in(folder: Path) -> dict[str, Path]:
    """By dotted name within the emulator."""
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in sorted(folder.rglob("*.py"))}


def imports(module: str, path: Path) -> Iterator[str]:
    """The full names of what a module imports of the house."""
    package = f"{HERE}.{module}".split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == HOUSE)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = [*base, *(node.module.split(".") if node.module else [])]
            if full[0] == HOUSE:
                yield from (".".join([*full, alias.name]) for alias in node.names)


def graph_of(folder: Path) -> tuple[dict[str, set[str]], set[str]]:
    """The modules that each module of a folder imports; and the names of the house outside that any imports."""
    modules, outside = modules_in(folder), set[str]()
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name in imports(module, path):
            within = name.removeprefix(f"{HERE}.") if name.startswith(f"{HERE}.") else None
            if within is None:
                outside.add(name)
                continue
            parts = within.split(".")
            places = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            found = next(each for place in places for each in (place, f"{place}.__init__") if each in modules)
            graph[module].add(found)
    return graph, outside


def faults(folder: Path) -> list[str]:
    """What is wrong with the arrows of a folder."""
    graph, outside = graph_of(folder)
    found = [f"outside: {name}" for name in sorted(outside) if not name.startswith((f"{ERRORS}.", LAZY))]
    room = {module: ORDER.index(module.split(".")[0]) for module in graph}
    found += [f"{a} -> {b}" for a, known in graph.items() for b in sorted(known) if room[b] > room[a]]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"circle: {' -> '.join(error.args[1])}")
    return found


def test_each_room_knows_only_those_before_it():
    graph, _ = graph_of(EMULATOR)
    assert {name.split(".")[0] for name in graph} == set(ORDER)
    assert sum(map(len, graph.values())) > 200
    assert faults(EMULATOR) == []


def test_only_the_launch_knows_who_watches():
    graph, _ = graph_of(EMULATOR)
    knowing = {a for a, known in graph.items() if any(b.startswith("races.") for b in known)}
    assert {name for name in knowing if not name.startswith("races.")} == {"launch"}


@pytest.mark.parametrize(
    ("module", "code", "fault"),
    [
        ("parse/text", "from ..execute import memory", "parse.text -> execute.memory"),
        ("execute/chunk", "def f():\n    from ..races.order import Order", "execute.chunk -> races.order"),
        ("execute/chunk", "if TYPE_CHECKING:\n    from ..races import order", "execute.chunk -> races.order"),
        ("execute/memory", f"from {HERE}.execute.chunk import Chunk", "circle: "),
        ("execute/memory", "from .chunk import Chunk", "circle: "),
        ("races/order", "from flashladder.common import problem", "outside: flashladder.common.problem"),
        ("races/order", "import flashladder.common.run", "outside: flashladder.common.run"),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path, module, code, fault):
    sound = {
        "parse/text": f"from {ERRORS} import EmulatorError",
        "execute/memory": "from ..parse.text import parse",
        "execute/chunk": "from . import memory",
        "races/order": "from ..execute.chunk import Chunk",
    }
    for name, text in sound.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert faults(tmp_path) == []
    (tmp_path / f"{module}.py").write_text(f"{sound[module]}\n{code}")
    assert any(each.startswith(fault) for each in faults(tmp_path))
