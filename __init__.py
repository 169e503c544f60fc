"""FlashLadder: a laboratory for attention kernels. See README.md."""

from importlib import import_module
from typing import Any

_ROOM = "flashladder.common.api"
_PUBLIC = {  # what models call, and the module that has it
    "LatentCache": f"{_ROOM}.latents",
    "absorb": f"{_ROOM}.latents",
    "attention": _ROOM,
    "dropout_mask": f"{_ROOM}.dropout",
    "forward": f"{_ROOM}.timed",
    "forward_timed": f"{_ROOM}.timed",
    "merge_states": f"{_ROOM}.states",
    "ring_attention": f"{_ROOM}.ring",
    "zigzag_split": f"{_ROOM}.ring",
    "zigzag_join": f"{_ROOM}.ring",
    "packed_attention": f"{_ROOM}.packed",
    "register_with_diffusers": f"{_ROOM}.diffusers",
    "register_with_torch": f"{_ROOM}.torch_switch",
    "register_with_transformers": f"{_ROOM}.transformers",
    "flash_attn_func": f"{_ROOM}.flash_attn",
    "flash_attn_with_kvcache": f"{_ROOM}.kvcache",
    "flash_mla_with_kvcache": f"{_ROOM}.mla",
    "get_mla_metadata": f"{_ROOM}.mla",
    "flash_attn_kvpacked_func": f"{_ROOM}.flash_attn",
    "flash_attn_qkvpacked_func": f"{_ROOM}.flash_attn",
    "flash_attn_varlen_func": f"{_ROOM}.flash_attn",
    "flash_attn_varlen_kvpacked_func": f"{_ROOM}.flash_attn",
    "flash_attn_varlen_qkvpacked_func": f"{_ROOM}.flash_attn",
}


def __getattr__(name: str) -> Any:
    """`flashladder.attention` and its like, imported when they are asked for: torch takes seconds."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
