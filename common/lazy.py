"""Names of a package that are imported when somebody asks for them: torch takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def importer(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package, by the module of each name; a module that begins with a dot lies in the package.

    As in `from module import name`, a name may be a module itself.
    An AttributeError inside an import becomes an ImportError: `from package import name` hides the former.
    """

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(modules[name], package)
            return getattr(module, name) if hasattr(module, name) else import_module(f".{name}", module.__name__)
        except AttributeError as error:
            raise ImportError(f"{package}.{name} cannot be imported: {error}", name=modules[name]) from error

    return load
