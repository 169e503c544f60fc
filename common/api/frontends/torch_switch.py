"""torch's own switch: scaled_dot_product_attention runs the kernels of this project where it ran FlashAttention-2.

torch.nn.attention has a registry of flash implementations (torch/nn/attention/_registry.py): a name and a function that
overrides operators of aten, and returns a handle whose remove() takes them back. FlashAttention-3 and 4 enter by it. It
is the operators behind the flash backend of scaled_dot_product_attention that are overridden here, for CUDA.

The gradient of a call is to come from the kernels that gave its output, as their dropout is not torch's. So torch's
backward operator has to tell whose they were. It does by the random state that it is given, which was the forward
pass's output: torch's is of uint64, ours is of int64, 16 bytes in either case.

Packed sequences, and pages of a cache, come by operators of their own: of torch.nn.attention.varlen's varlen_attn and
varlen_attn_out, and of jagged nested tensors. They have no dropout here, so their gradients may be anybody's.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.library import Library
from torch.nn.functional import pad

from flashladder.common.api import attention, backward, differentiable, gradients, padding, validate
from flashladder.common.api.frontends.fallback import say
from flashladder.common.api.frontends.flash_attn import flash_attn_varlen_func
from flashladder.common.api.options import Options
from flashladder.common.errors import DeviceError, ToolchainError, UnsupportedProblemError
from flashladder.common.problem.dropout import STATE_WORDS, drawn

NAME = "ladder"
_OPERATOR = "_scaled_dot_product_flash_attention"
_BACKWARD = f"{_OPERATOR}_backward"
_PACKED, _PACKED_OUT, _PACKED_BACKWARD = (
    f"_flash_attention_{name}" for name in ("forward", "forward_no_dropout_inplace", "backward")
)
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
    state = list(inspect.signature(_gradients).parameters).index("state")
    library = Library("aten", "IMPL")

    def override(name: str, ours: Callable[..., Any], is_torchs: Callable[[Sequence[Any]], bool]) -> None:
        """Where ours is not for some arguments, or refuses, torch's runs."""
        original = _original(name)

        def chosen(keys: Any, *arguments: Any, **options: Any) -> Any:
            if is_torchs(arguments):
                return original.call_boxed(keys, *arguments, **options)
            try:
                return ours(*arguments, **options)
            except UnsupportedProblemError as error:
                if name == _BACKWARD:  # of our own forward pass
                    raise
                say("torch's FlashAttention-2", str(error))
                return original.call_boxed(keys, *arguments, **options)

        library.impl(name, chosen, _device, with_keyset=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that a kernel is overridden: it is meant to be
        override(_OPERATOR, _ours, lambda _: False)
        override(_BACKWARD, _gradients, lambda arguments: arguments[state].dtype != _OURS)
        for name, ours in ((_PACKED, _packed), (_PACKED_OUT, _packed_out), (_PACKED_BACKWARD, _packed_gradients)):
            if hasattr(torch.ops.aten, name):
                override(name, ours, partial(_are_dense, list(inspect.signature(ours).parameters).index("cum_seq_q")))
    return _Handle(library)


def _are_dense(place: int, arguments: Sequence[Any]) -> bool:
    """Whether the cum_seq_q at this place is none: torch's own kernels call the operators of packed rows so."""
    return arguments[place] is None


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
    made, is_padded = _backward(dout, q, k, v, o, lse, options)
    made = [gradient.transpose(1, 2) for gradient in made]
    if not is_padded:
        return tuple(made)
    return tuple(torch.empty_like(x).copy_(gradient) for x, gradient in zip((query, key, value), made, strict=True))


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
) -> tuple[list[torch.Tensor], bool]:
    """Gradients of q, k and v, (batch, seqlen, heads, head_dim), and whether they are views of padded ones."""
    head_dim, wanted = q.shape[3], _columns(q, v, options)
    if is_padded := wanted != (head_dim, v.shape[3]):
        q, k, v, options = padding.padded(q, k, v, options, wanted)
        dout, o = (padding.filled(x, wanted[1]) for x in (dout, o))
    *found, _ = backward.compute_gradients(dout, q, k, v, o, lse, None, options, True, True, False)
    return [gradient[..., :head_dim] for gradient in found], is_padded


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The operator's outputs, of q, k and v (total, heads, head_dim), or pages of k and v with a block_table."""
    if dropout_p or return_debug_mask:
        raise UnsupportedProblemError(f"dropout_p={dropout_p} in packed sequences: whose gradients are these")
    if any(x.requires_grad for x in (query, key, value)):
        window = window_size_left, window_size_right
        options = _packed_options(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, *window)
        q, k, v = (x[None] for x in (query, key, value))
        differentiable.require_rung(q, k, v, options, _columns(q, v, options))
    q, k, v = (x.detach() for x in (query, key, value))
    of_pages: dict[str, Any] = (
        {} if block_table is None else {"block_table": block_table, "num_splits": num_splits or 0, "out": out}
    )
    found = flash_attn_varlen_func(
        q,
        k,
        v,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        softmax_scale=scale,
        causal=is_causal,
        window_size=_window(window_size_left, window_size_right),
        alibi_slopes=alibi_slopes,
        return_attn_probs=True,
        seqused_k=seqused_k,
        **of_pages,
    )
    output, lse = found[:2]
    if out is not None and output is not out and block_table is None:
        out.copy_(output)
    states = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return output, lse, *states, query.new_empty(0)


def _packed_out(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    *others: Any,
    **options: Any,
) -> torch.Tensor:
    """The log-sum-exp; O is written to `out`."""
    return _packed(query, key, value, cum_seq_q, *others, out=out, **options)[1]


def _packed_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The backward operator's outputs, of packed sequences."""
    if dropout_p:
        raise UnsupportedProblemError(f"dropout_p={dropout_p} in packed sequences: whose gradients are these")
    window = window_size_left, window_size_right
    options = _packed_options(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, *window)
    dout, q, k, v, o = (tensor[None] for tensor in (grad_out, query, key, value, out))
    return tuple(gradient[0] for gradient in _backward(dout, q, k, v, o, logsumexp, options)[0])


def _packed_options(
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
    left: int | None,
    right: int | None,
) -> Options:
    """What the operators say of packed sequences, as kernels of gradients take it."""
    causal, bounds = validate.mask(is_causal, _window(left, right), max_k)
    left, right = validate.window(bounds, causal)
    starts: dict[str, Any] = {
        "cu_seqlens_q": cum_seq_q,
        "cu_seqlens_k": cum_seq_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
    }
    return Options(causal=causal, softmax_scale=scale, window_left=left, window_right=right, **starts)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return (-1 if left is None else left), (-1 if right is None else right)
