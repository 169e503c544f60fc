"""attention with what few rungs take: packed sequences, windows, softcaps, ALiBi, dropout. One operator for all."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from flashladder.common.api import given, gradients, op, sequences
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.dropout import RNG_STATE
from flashladder.common.problem.operations.forward import ALL_KEYS
from flashladder.common.runtime.outputs import new_lse, new_o, no_lse
from flashladder.common.runtime.ready import ready_for

Window = tuple[int | None, int | None]  # keys to the left and to the right of a row's own, None: all
OPEN: Window = (None, None)
ALL = (-1, -1)  # the same, as flash-attn says it
_SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def window_of(window: Window) -> Window:
    """A window as kernels take it. UnsupportedProblemError for what is none."""
    left, right = (None if each is None else min(each, ALL_KEYS) for each in pair_of("window", window, None))
    return left, right


def slopes_of(alibi_slopes: torch.Tensor | None, q: torch.Tensor, batch: int) -> torch.Tensor | None:
    """ALiBi's slopes as kernels take them, one for each head of each of `batch` sequences, contiguous.

    q is (..., num_heads, head_dim). UnsupportedProblemError for what are no slopes of it.
    """
    if alibi_slopes is None:
        return None
    given.tensors(alibi_slopes=alibi_slopes)
    heads, shape = q.shape[-2], tuple(alibi_slopes.shape)
    if shape not in ((heads,), (batch, heads)) or alibi_slopes.dtype != torch.float32:
        raise UnsupportedProblemError(
            f"alibi_slopes is {shape} {alibi_slopes.dtype}; with q it is ({heads},) or ({batch}, {heads}) torch.float32"
        )
    if alibi_slopes.device != q.device:
        raise UnsupportedProblemError(
            f"alibi_slopes on {alibi_slopes.device}, q on {q.device}; kernels take one device"
        )
    gradients.refuse(alibi_slopes, what="alibi_slopes")
    return alibi_slopes.expand(batch, heads).contiguous()


def sinks_of(sinks: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Attention sinks as kernels take them, in fp32, contiguous.

    q is (..., num_heads, head_dim). UnsupportedProblemError for what are no sinks of it.
    """
    if sinks is None:
        return None
    given.tensors(sinks=sinks)
    heads, shape = q.shape[-2], tuple(sinks.shape)
    if shape != (heads,) or sinks.dtype not in _SINK_DTYPES:
        raise UnsupportedProblemError(
            f"sinks is {shape} {sinks.dtype}; with q it is ({heads},) torch.float32, torch.bfloat16 or torch.float16"
        )
    if sinks.device != q.device:
        raise UnsupportedProblemError(f"sinks on {sinks.device}, q on {q.device}; kernels take one device")
    gradients.refuse_forward_mode(sinks, what="sinks")
    return sinks.float().contiguous()


def pair_of(name: str, window: Any, everything: int | None) -> tuple[Any, Any]:
    """(left, right) of a window, where `everything` stands for all keys; UnsupportedProblemError for what is none.

    A tensor is read, which waits for the GPU that it may be on.
    """
    if hasattr(window, "tolist"):
        window = window.tolist()
    try:
        if not isinstance(window, (tuple, list)):
            raise ValueError
        left, right = (each if each is everything else given.whole(name, each) for each in window)
    except (ValueError, UnsupportedProblemError):
        raise UnsupportedProblemError(
            f"{name}={window!r}: it should be (left, right), each a number of keys, or {everything} for all"
        ) from None
    return left, right


def seen(causal: bool, window_size: tuple[int, int] | torch.Tensor, seqlen_k: int) -> dict[str, Any]:
    """The mask, as flash-attn reads a window: from seqlen_k on it has no bound, and none to the right is causal."""
    if window_size is ALL:  # as in most calls, which come often
        return {"causal": causal, "window": OPEN}
    window = pair_of("window_size", window_size, -1)
    left, right = (None if bound < 0 or bound >= seqlen_k else bound for bound in window)
    if causal or right == 0:
        return {"causal": True, "window": (left, None)}
    return {"causal": False, "window": (left, right)}


def softcap_of(softcap: float) -> float:
    """As flash-attn has it: none is 0 here, and 0 or less there."""
    softcap = given.number("softcap", softcap)
    return 0.0 if softcap <= 0 else softcap


class Packing(NamedTuple):
    """How sequences lie in tensors (1, total, heads, head_dim). Where they are not packed there is no cu_seqlens."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int

    def longest(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
        """No sequence has more rows of q and of k."""
        return min(self.max_seqlen_q, q.shape[1]), min(self.max_seqlen_k, k.shape[1])

    def is_blind(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether nobody sees a key."""
        return self.cu_seqlens_q is not None and not all(self.longest(q, k))

    def sizes(self, q: torch.Tensor, k: torch.Tensor) -> dict[str, int]:
        """What a problem is told of them; nothing of tensors that are not packed."""
        if self.cu_seqlens_q is None:
            return {}
        longest = self.longest(q, k)
        sizes = {"batch": len(self.cu_seqlens_q) - 1, "total_q": q.shape[1], "total_k": k.shape[1]}
        return sizes | {"seqlen_q": max(1, longest[0]), "seqlen_k": max(1, longest[1])}


def more_inputs(
    packing: Packing,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """What kernels are given beside Q, K and V, by name."""
    starts = {"cu_seqlens_q": packing.cu_seqlens_q, "cu_seqlens_k": packing.cu_seqlens_k}
    found = {**starts, "alibi_slopes": alibi_slopes, RNG_STATE: rng_state, "sinks": sinks}
    return {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}


def make_ready(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Window, softcap: float, packed: bool, sinks: bool
) -> None:
    """The kernel of a causal call with tensors like these, of other lengths or packed, which no call then waits for."""
    left, right = window_of(window)
    others: dict[str, Any] = {"window_left": left, "window_right": right, "softcap": softcap, "sinks": sinks}
    others |= op.apart_of(q, v)
    if packed:
        others |= {"operation": "packed", "batch": 1, "total_q": q.shape[1], "total_k": k.shape[1]}
    ready_for(op.problem_of(q, k, True, None, False, **others), q)


def computed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    sinks: torch.Tensor | None,
    version: str,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp of tensors as `attention` takes them; the latter has no elements unless it is asked for.

    With cu_seqlens, tensors are those of one sequence: (1, total, heads, head_dim), and (heads, total_q). Slopes are
    (batch, heads), sinks (heads,) and fp32; both contiguous. With a dropout_p there is an rng_state. `deterministic` is
    of the backward pass: this one always is.
    """
    o, sums = _new_outputs(q, v, cu_seqlens_q is not None, lse)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    bounds: dict[str, Any] = {"window_left": window_left, "window_right": window_right, "softcap": softcap}
    bounds |= {"alibi": alibi_slopes is not None, "dropout_p": dropout_p, "sinks": sinks is not None}
    bounds |= op.apart_of(q, v)
    others = dict(bounds)
    more = more_inputs(packing, alibi_slopes, rng_state, sinks)
    tensors = {"q": q, "k": k, "v": v, "o": o, **more} | ({"lse": sums} if lse else {})
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        end_q = sequences.end("q", cu_seqlens_q, q.shape[1], max_seqlen_q)
        sequences.end("k", cu_seqlens_k, k.shape[1], max_seqlen_k)
        others |= {"operation": "packed", **packing.sizes(q, k)}
        if packing.is_blind(q, k):  # what was asked for is looked at all the same
            op.problem_of(q, k, causal, softmax_scale, lse, **{**others, "total_q": 1, "total_k": 1})
            _clear(o, sums, sinks)
            return o, sums
    problem = op.problem_of(q, k, causal, softmax_scale, lse, **others)
    ready = ready_for(problem, q, version)
    if problem.packed and not ready.rung.supports.rest:
        _clear(o, sums, sinks)
    ready.launch(problem, tensors)
    if problem.packed and not q.is_cuda:  # the emulator gives all of its memory back
        _clear(o[:, end_q:], sums[:, end_q:] if lse else sums, sinks)
    if op.watch is not None:
        op.watch(q, k, causal, softmax_scale, version, lse, cu_seqlens_q, cu_seqlens_k, **bounds)
    return o, sums


forward = torch.library.custom_op("flashladder::attention_general", computed, mutates_args=())


@forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_outputs(q, v, cu_seqlens_q is not None, options[-1])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward`; where nobody looks on, without an operator, which takes less of the host's time."""
    compute = forward if op.seen(q, k, v) else computed
    return compute(q, k, v, *more)


def _clear(o: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """As of rows that see no key."""
    o.zero_()
    if sinks is None or not sums.numel():
        sums.fill_(-math.inf)
    else:
        sums.copy_(sinks[:, None])


def _new_outputs(q: torch.Tensor, v: torch.Tensor, packed: bool, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return new_o(q, v.shape[3]), (new_lse(q, packed) if lse else no_lse(q))
