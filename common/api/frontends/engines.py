"""Engines that find attention by the entry points of installed packages: setup.py names these functions.

An engine calls them in each of its processes, maybe twice. They only tell it a name; a user chooses it. An engine of a
release that they do not fit goes on without it, and is told.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

from flashladder.common.errors import ToolchainError

VLLM, SGLANG = "FLASHLADDER", "flashladder"  # as `--attention-backend` of each has it
TRIED = {"vllm": "0.33.0", "sglang": "0.5.23"}


def register_with_vllm() -> None:
    """Makes `--attention-backend FLASHLADDER` work in vLLM, which does this itself where both are installed.

    vLLM asks the backend what it takes, and refuses the rest by name when it starts.

    Raises ToolchainError without vLLM, or for one whose backends are kept in another way.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if VLLM not in AttentionBackendEnum.__members__:
            register_backend(VLLM, f"{__package__}.vllm_backend.LadderBackend")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _lacking("vllm", error) from None


def register_with_sglang() -> None:
    """Makes `--attention-backend flashladder` work in SGLang, which does this itself where both are installed.

    The backend refuses what it does not take by name, when it is made or at a layer's first call.

    Raises ToolchainError without SGLang, or for one whose backends are kept in another way.
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        if SGLANG not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([SGLANG])
            register_attention_backend(SGLANG)(_sglang_backend)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _lacking("sglang", error) from None


def plug_into_vllm() -> None:
    """vLLM's entry point, whose errors would end vLLM."""
    _plug_in(register_with_vllm)


def plug_into_sglang() -> None:
    """SGLang's entry point."""
    _plug_in(register_with_sglang)


def _plug_in(register: Callable[[], None]) -> None:
    try:
        register()
    except ToolchainError as error:
        warnings.warn(f"no attention backend of flashladder: {error}", stacklevel=2)


def _sglang_backend(runner: object) -> object:
    return importlib.import_module(f"{__package__}.sglang_backend").LadderBackend(runner)


def _lacking(engine: str, error: Exception) -> ToolchainError:
    return ToolchainError(f"{engine} is missing, or keeps backends in another way ({error}); {TRIED[engine]} was tried")
