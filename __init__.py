"""FlashLadder: a laboratory for attention kernels. See README.md."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`flashladder.attention`, imported when it is asked for: torch takes seconds."""
    if name == "attention":
        from flashladder.common.attention import attention

        return attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
