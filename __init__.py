"""FlashLadder: a laboratory for attention kernels. See README.md."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`flashladder.attention`, imported when it is asked for: torch takes seconds."""
    if name == "attention":
        from flashladder.common.attention import attention

        return attention
    if name == "bounded_attention":
        from flashladder.common.attention.bounded import bounded_attention

        return bounded_attention
    if name == "packed_attention":
        from flashladder.common.attention.packed import packed_attention

        return packed_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
