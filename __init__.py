"""FlashLadder: a laboratory for attention kernels. See README.md."""

from importlib import import_module
from typing import Any

_ROOM = "flashladder.common.attention"
_PUBLIC = {  # what models call, and the module that has it
    "attention": _ROOM,
    "merge_states": f"{_ROOM}.states",
}


def __getattr__(name: str) -> Any:
    """`flashladder.attention` and its like, imported when they are asked for: torch takes seconds."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
