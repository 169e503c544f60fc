"""Engines that find attention by the entry points of installed packages: setup.py names these functions.

An engine calls them in each of its processes, maybe twice. They only tell it a name; a user chooses it.
"""

from __future__ import annotations

import importlib

from flashladder.common.errors import ToolchainError

VLLM, SGLANG = "FLASHLADDER", "flashladder"  # as `--attention-backend` of each has it
TRIED = {"vllm": "0.33.0", "sglang": "0.5.23"}


def register_with_vllm() -> None:
    """Makes `--attention-backend FLASHLADDER` work in vLLM, which calls this itself where both are installed.

    vLLM asks the backend what it takes, and refuses the rest by name when it starts.

    Raises ToolchainError without vLLM, or for one whose backends are kept in another way.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise _lacking("vllm", error) from None
    if VLLM not in AttentionBackendEnum.__members__:
        register_backend(VLLM, f"{__package__}.vllm_backend.LadderBackend")


def register_with_sglang() -> None:
    """Makes `--attention-backend flashladder` work in SGLang, which calls this itself where both are installed.

    The backend refuses what it does not take by name, when it is made or at a layer's first call.

    Raises ToolchainError without SGLang, or for one whose backends are kept in another way.
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        raise _lacking("sglang", error) from None
    if SGLANG not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([SGLANG])
        register_attention_backend(SGLANG)(_sglang_backend)


def _sglang_backend(runner: object) -> object:
    return importlib.import_module(f"{__package__}.sglang_backend").LadderBackend(runner)


def _lacking(engine: str, error: ImportError) -> ToolchainError:
    return ToolchainError(f"{engine} is missing, or keeps backends in another way ({error}); {TRIED[engine]} was tried")
