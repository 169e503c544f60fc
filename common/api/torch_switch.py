"""torch's own switch: scaled_dot_product_attention runs the kernels of this project where it ran FlashAttention-2.

torch.nn.attention has a registry of flash implementations (torch/nn/attention/_registry.py): a name and a function that
overrides operators of aten, and returns a handle whose remove() takes them back. FlashAttention-3 and 4 enter by it. It
is the operator behind the flash backend of scaled_dot_product_attention that is overridden here, for CUDA.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.library import Library

from flashladder.common.api import attention, gradients
from flashladder.common.api.fallback import say
from flashladder.common.errors import DeviceError, ToolchainError, UnsupportedProblemError

NAME = "ladder"
_OPERATOR = "_scaled_dot_product_flash_attention"
_device = "CUDA"  # torch's name for where the operator is overridden


def register_with_torch() -> None:
    """Makes `torch.nn.attention.activate_flash_attention_impl("ladder")` work; activates nothing.

    Once it is activated, scaled_dot_product_attention runs `attention` where it would run torch's FlashAttention-2 on
    CUDA. Where `attention` refuses, or dropout or a gradient is wanted, FlashAttention-2 runs, with one FallbackWarning
    for each kind of reason. `torch.nn.attention.restore_flash_attention_impl()` takes it back.

    Raises ToolchainError for a torch without the registry (before 2.11).
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise ToolchainError(
            f"torch {torch.__version__} has no registry of flash implementations; torch 2.11 or later works"
        ) from None
    register_flash_attention_impl(NAME, register_fn=_activate)


class _Handle:
    """What the registry keeps, and how it takes the implementation back."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def remove(self) -> None:
        self._library._destroy()


def _activate() -> _Handle:
    try:
        original = torch.library.get_kernel(f"aten::{_OPERATOR}", _device)
    except RuntimeError:
        raise DeviceError(
            f"torch {torch.__version__} has no FlashAttention-2 for {_device}, which would run ours; a torch with CUDA "
            "works, and attention() takes tensors on the CPU"
        ) from None

    def run(keys: Any, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        try:
            return _ours(*arguments, **options)
        except UnsupportedProblemError as error:
            say("torch's FlashAttention-2", str(error))
            return original.call_boxed(keys, *arguments, **options)

    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that a kernel is overridden: it is meant to be
        library.impl(_OPERATOR, run, _device, with_keyset=True)
    return _Handle(library)


def _ours(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The operator's outputs: of q, k and v (batch, heads, seqlen, head_dim), and likewise the output."""
    if dropout_p:
        raise UnsupportedProblemError(f"dropout_p={dropout_p}: kernels drop nothing")
    if return_debug_mask:
        raise UnsupportedProblemError("return_debug_mask: kernels keep no probabilities")
    gradients.refuse(query, key, value)  # views do not say so
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output = torch.empty_like(query)  # strided as torch.compile expects it
    out = output.transpose(1, 2)
    _, lse = attention(q, k, v, causal=is_causal, softmax_scale=scale, return_lse=True, out=out)
    seed, offset = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))  # of dropout: none
    return output, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)
