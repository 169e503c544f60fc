"""Python files that say what a name stands for: in a folder of this package, or beside the rungs of a ladder.

Nobody keeps a table of them. A ladder's file stands for the ladder's name: see common/own.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from flashladder.common import own
from flashladder.common.paths import ROOT, VERSIONS


def named(name: str, folder: Path, file: str) -> ModuleType | None:
    """The module of this name in a folder of this package, or else this file of the ladder that is called so."""
    if found := _built_in(name, folder) or _of_this_repository(name, file):
        return found
    path = own.declared(file).get(name)
    return load(path) if path else None


def names(folder: Path, file: str) -> list[str]:
    """All that `named` finds, the built-in ones first."""
    built_in = sorted(path.stem for path in folder.glob("[!_]*.py"))
    return list(dict.fromkeys([*built_in, *own.declared(file)]))


@cache
def _built_in(name: str, folder: Path) -> ModuleType | None:
    path = folder / f"{name}.py"
    return load(path) if name.isidentifier() and not name.startswith("_") and path.is_file() else None


@cache  # each call of an operation asks for it
def _of_this_repository(name: str, file: str) -> ModuleType | None:
    path = VERSIONS / name / file
    return load(path) if own.NAME.fullmatch(name) and path.is_file() else None


@cache
def load(path: Path) -> ModuleType:
    """A Python file as a module, which runs once in a process."""
    here = path.resolve()
    if here.is_relative_to(ROOT):
        return importlib.import_module(".".join(("flashladder", *here.relative_to(ROOT).with_suffix("").parts)))
    name = ".".join(("flashladder", "own", path.parent.name, path.stem))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
