"""torch's own switch: scaled_dot_product_attention runs the kernels of this project where it ran FlashAttention-2.

torch.nn.attention has a registry of flash implementations (torch/nn/attention/_registry.py): a name and a function that
overrides operators of aten, and returns a handle whose remove() takes them back. FlashAttention-3 and 4 enter by it. It
is the operators behind the flash backend of scaled_dot_product_attention that are overridden here, for CUDA.

The gradient of a call is to come from the kernels that gave its output, as their dropout is not torch's. So torch's
backward operator has to tell whose they were. It does by the random state that it is given, which was the forward
pass's output: torch's is of uint64, ours is of int64, 16 bytes in either case.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

import torch
from torch.library import Library
from torch.nn.functional import pad

from flashladder.common.api import attention, differentiable, gradients, padding, validate
from flashladder.common.api.frontends.fallback import say
from flashladder.common.api.options import Options
from flashladder.common.errors import DeviceError, ToolchainError, UnsupportedProblemError
from flashladder.common.problem.dropout import STATE_WORDS, drawn

NAME = "ladder"
_OPERATOR = "_scaled_dot_product_flash_attention"
_BACKWARD = f"{_OPERATOR}_backward"
_OURS = torch.int64  # the dtype of our random states
_device = "CUDA"  # torch's name for where the operator is overridden


def register_with_torch() -> None:
    """Makes `torch.nn.attention.activate_flash_attention_impl("ladder")` work; activates nothing.

    Once it is activated, scaled_dot_product_attention runs `attention` where it would run torch's FlashAttention-2 on
    CUDA, with its gradients and dropout. Where `attention` refuses, FlashAttention-2 runs, with one FallbackWarning for
    each kind of reason. `torch.nn.attention.restore_flash_attention_impl()` takes it back; what is left of a training
    step then still has our gradients.

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
    originals = [_original(name) for name in (_OPERATOR, _BACKWARD)]
    state = list(inspect.signature(_gradients).parameters).index("state")

    def forward(keys: Any, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        try:
            return _ours(*arguments, **options)
        except UnsupportedProblemError as error:
            say("torch's FlashAttention-2", str(error))
            return originals[0].call_boxed(keys, *arguments, **options)

    def backward(keys: Any, *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        is_ours = arguments[state].dtype == _OURS
        return _gradients(*arguments, **options) if is_ours else originals[1].call_boxed(keys, *arguments, **options)

    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that a kernel is overridden: it is meant to be
        library.impl(_OPERATOR, forward, _device, with_keyset=True)
        library.impl(_BACKWARD, backward, _device, with_keyset=True)
    return _Handle(library)


def _original(name: str) -> Any:
    """torch's kernel of an operator."""
    try:
        return torch.library.get_kernel(f"aten::{name}", _device)
    except RuntimeError:
        raise DeviceError(
            f"torch {torch.__version__} has no FlashAttention-2 for {_device}, which would run ours; a torch with CUDA "
            "works, and attention() takes tensors on the CPU"
        ) from None


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
    if return_debug_mask:
        raise UnsupportedProblemError("return_debug_mask: kernels keep no probabilities")
    gradients.refuse_forward_mode(query, key, value)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    dropout_p = validate.probability("dropout_p", dropout_p)
    options = Options(causal=is_causal, softmax_scale=scale, dropout_p=dropout_p)
    if gradients.wanted(query, key, value):  # views do not say so
        differentiable.require_rung(q, k, v, options, _columns(q, v, options))
    output = torch.empty_like(query)  # strided as torch.compile expects it
    out = output.transpose(1, 2)
    if dropout_p:
        words = pad(drawn(q.device), (0, 1))
        options = dataclasses.replace(options, rng_state=words[:STATE_WORDS])
        _, lse = differentiable.attend(q, k, v, options, True, out)
    else:
        words = query.new_empty(STATE_WORDS + 1, dtype=torch.int32)
        _, lse = attention(q, k, v, causal=is_causal, softmax_scale=scale, return_lse=True, out=out)
    beside = query.new_empty((), dtype=torch.uint64)
    return output, lse, None, None, query.shape[2], key.shape[2], words.view(_OURS), beside, query.new_empty(0)


def _columns(q: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[int, int]:
    """Those that the kernels of gradients are called with."""
    return padding.columns(q.shape[3], v.shape[3], options.dropout_p > 0, differentiable.trained_widths(q))


def _gradients(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    state: torch.Tensor,
    offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """The backward operator's outputs, of what `_ours` gave; strided as query, key and value are."""
    dout, q, k, v, o = (tensor.transpose(1, 2) for tensor in (dout, query, key, value, output))
    words = state.view(torch.int32)[:STATE_WORDS] if dropout_p else None
    options = Options(causal=is_causal, softmax_scale=scale, dropout_p=dropout_p, rng_state=words)
    head_dim = q.shape[3]
    wanted = _columns(q, v, options)
    if is_padded := wanted != (head_dim, v.shape[3]):
        q, k, v, options = padding.padded(q, k, v, options, wanted)
        dout, o = (padding.filled(x, wanted[1]) for x in (dout, o))
    found = torch.ops.flashladder.attention_backward(dout, q, k, v, o, lse, None, *options.flat(), True, True)
    made = (gradient[..., :head_dim].transpose(1, 2) for gradient in found)
    if not is_padded:
        return tuple(made)
    return tuple(torch.empty_like(x).copy_(gradient) for x, gradient in zip((query, key, value), made, strict=True))
