"""The table of first calls: public functions and their options, forward and backward.

A row's function takes a problem and its tensors by name, makes one call, and gives all that the call wrote, by name.
What a row does beside that is in `fields`: those of a Problem.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flashladder.common.problem import dropout
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import DTYPES, Problem, operation_named
from flashladder.tests.first_calls import calls

GPU, EMULATOR = "cuda", "cpu"
_SIZES: dict[str, dict[str, Any]] = {
    GPU: {"batch": 2, "num_heads": 4, "num_heads_k": 2, "seqlen_q": 333, "seqlen_k": 450},
    EMULATOR: {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 40, "seqlen_k": 70, "head_dim": 64},
}
_LENGTHS: dict[str, dict[str, Any]] = {
    GPU: {"num_heads": 4, "num_heads_k": 2, "seqlens_q": (200, 0, 333, 1), "seqlens_k": (200, 5, 450, 77)},
    EMULATOR: {"num_heads": 2, "num_heads_k": 1, "seqlens_q": (20, 0, 33), "seqlens_k": (20, 5, 40), "head_dim": 64},
}
_CACHE: dict[str, dict[str, Any]] = {  # room for more keys than there are
    GPU: {"num_heads": 8, "num_heads_k": 2, "seqlen_q": 2, "seqlens_k": (0, 1, 70, 700), "seqlen_k": 768},
    EMULATOR: {"num_heads": 4, "num_heads_k": 2, "seqlen_q": 2, "seqlens_k": (1, 70), "seqlen_k": 128, "head_dim": 64},
}
_ABSORBED = {"num_heads_k": 1, "head_dim": 576, "head_dim_v": calls.HIDDEN_WIDTH}
_LATENTS: dict[str, dict[str, Any]] = {
    GPU: {"num_heads": 16, "seqlen_q": 2, "seqlens_k": (1, 70, 700), "seqlen_k": 768, **_ABSORBED},
    EMULATOR: {"num_heads": 16, "seqlen_q": 1, "seqlens_k": (5,), "seqlen_k": 64, **_ABSORBED},
}
_OF_OPERATION = {"packed": _LENGTHS, "decode": _CACHE, "mla": _LATENTS}
_CACHE_OPTIONS = {option.name for option in operation_named("decode").options}


@dataclass(frozen=True)
class Row:
    """A call that is the first of a process."""

    name: str
    function: calls.Function
    fields: dict[str, Any] = field(default_factory=dict)
    emulated: bool = False  # also in the tests that need no GPU
    packed: bool = False  # of the backward pass
    exact: Callable[[Problem, calls.Tensors, torch.dtype], dict[str, torch.Tensor]] | None = None  # the operation's

    def problem(self, device: str) -> Problem:
        """What is asked for on a device."""
        sizes = _LENGTHS if self.packed else _OF_OPERATION.get(self.fields.get("operation", ""), _SIZES)
        return Problem(**{**sizes[device], **self.fields})

    def draw(self, device: str) -> tuple[Problem, dict[str, torch.Tensor]]:
        """The problem and its inputs. The random state of dropout is the one that a call draws after `calls.SEED`."""
        problem = self.problem(device)
        tensors = dict(make_inputs(problem, device).by_name)
        if problem.dropout_p:
            torch.manual_seed(calls.SEED)
            tensors[dropout.RNG_STATE].copy_(dropout.drawn(torch.device(device)))
        return problem, tensors

    def expected(self, problem: Problem, tensors: calls.Tensors) -> dict[str, tuple[torch.Tensor, float]]:
        """The exact outputs, and how far a call may be from each."""
        asked = problem.asked
        compute = self.exact or asked.compute
        exact, rounded = (compute(problem, tensors, dtype) for dtype in (torch.float64, DTYPES[problem.dtype]))
        near = {
            name: asked.tolerance(problem, name, exact[name], rounded[name]) for name in exact.keys() & problem.tensors
        }
        found = {name: (values, near.get(name, 0.0)) for name, values in exact.items()}  # torch sums those of sinks
        if self.exact:  # sums over rows that nearly cancel out
            found = {
                name: (values, max(near, float(values.abs().max()) / 100)) for name, (values, near) in found.items()
            }
        return found


def _rows() -> list[Row]:
    rows: list[Row] = []

    def add(name: str, function: calls.Function, emulated: bool = False, **fields: Any) -> None:
        more = {each: fields.pop(each) for each in ("packed", "exact") if each in fields}
        rows.append(Row(name, function, fields, emulated, **more))

    def add_gradients(name: str, function: calls.Function, emulated: bool = False, **fields: Any) -> None:
        add(
            f"gradients of {name}",
            functools.partial(calls.gradients_of, function),
            emulated,
            operation="backward",
            **fields,
        )

    by = functools.partial
    in_order = {"deterministic": True}

    add("attention", calls.attend, True)
    add("attention, without the log-sum-exp", calls.attend, lse=False)
    add("attention, causal", calls.attend, causal=True)
    add("attention, causal, without the log-sum-exp", calls.attend, causal=True, lse=False)
    add("attention, fp16", calls.attend, dtype="fp16")
    add("attention, causal, fp16, head_dim 64", calls.attend, dtype="fp16", causal=True, head_dim=64)
    add("attention, long keys", calls.attend, seqlen_k=2300, causal=True)
    add("attention, one row", calls.attend, seqlen_q=1, causal=True)
    add("attention, 8 heads of Q to one of K", calls.attend, num_heads=8, num_heads_k=1)
    add("attention, heads before rows", calls.attend, layout="bhsd", causal=True)
    for head_dim in (80, 96, 192, 256):
        add(f"attention, head_dim {head_dim}", calls.attend, head_dim == 80, head_dim=head_dim, causal=True)
    add("attention, head_dim 192, 128 of V", calls.attend, head_dim=192, head_dim_v=128, causal=True)
    add("attention, a window", calls.attend, window_left=100, window_right=20)
    add("attention, causal window", calls.attend, True, window_left=30, causal=True)
    add("attention, a softcap", calls.attend, softcap=20.0, causal=True)
    add("attention, ALiBi", calls.attend, alibi=True, causal=True)
    add("attention, sinks and a window", calls.attend, True, sinks=True, window_left=60, causal=True)
    add("attention, dropout", calls.attend, True, dropout_p=0.25)
    add("attention, a whole number as softmax_scale", by(calls.attend, softmax_scale=1), softmax_scale=1.0)
    add("attention, out=", calls.attend_into, True, causal=True)
    add("attention, out=, a window", calls.attend_into, window_left=50, causal=True)
    add("attention, on a side stream", by(calls.on_a_side_stream, calls.attend), causal=True)
    add("attention, in a thread", by(calls.in_a_thread, calls.attend), causal=True)
    add("attention, captured from the second call on", calls.captured_later(calls.attend), causal=True)
    add("attention, compiled", by(calls.attend, by=calls.compiled), causal=True)

    add("packed_attention", calls.attend_packed, True, operation="packed", causal=True)
    add("packed_attention, head_dim 64, fp16", calls.attend_packed, operation="packed", head_dim=64, dtype="fp16")
    add("packed_attention, sinks and a window", calls.attend_packed, operation="packed", sinks=True, window_left=60)
    add("packed_attention, ALiBi and a softcap", calls.attend_packed, operation="packed", alibi=True, softcap=20.0)
    add("packed_attention, dropout", calls.attend_packed, operation="packed", dropout_p=0.25)
    add(
        "packed_attention, 192 and 128",
        calls.attend_packed,
        operation="packed",
        head_dim=192,
        head_dim_v=128,
        causal=True,
    )

    alike = {"num_heads_k": None, "seqlen_k": None}
    add("flash_attn_func", calls.flash_attn, causal=True)
    add("flash_attn_func, a window and a softcap", calls.flash_attn, window_left=50, window_right=9, softcap=20.0)
    add("flash_attn_qkvpacked_func", calls.flash_attn_qkvpacked, True, **alike, causal=True)
    add("flash_attn_kvpacked_func", calls.flash_attn_kvpacked, causal=True)
    add("flash_attn_varlen_func", calls.flash_attn_varlen, operation="packed", causal=True)
    add(
        "flash_attn_varlen_func, compiled",
        by(calls.flash_attn_varlen, by=calls.compiled),
        operation="packed",
        causal=True,
    )
    packed_alike = {"operation": "packed", "num_heads_k": None, "seqlens_k": ()}
    add("flash_attn_varlen_qkvpacked_func", calls.flash_attn_varlen_qkvpacked, **packed_alike, causal=True)
    add("flash_attn_varlen_kvpacked_func", calls.flash_attn_varlen_kvpacked, operation="packed", causal=True)

    def add_cache(
        name: str, function: calls.Function = calls.with_kvcache, emulated: bool = False, **fields: Any
    ) -> None:
        options = {each: fields.pop(each) for each in tuple(fields) if each in _CACHE_OPTIONS}
        add(f"flash_attn_with_kvcache{name}", function, emulated, operation="decode", options=options, **fields)

    pages = {"paged": True, "page_size": 64}
    new = {"new_keys": True, "seqlen_new": 2}
    add_cache("", emulated=True, causal=True)
    add_cache(", 4 parts", num_splits=4, causal=True)
    add_cache(", fp16, head_dim 256", dtype="fp16", head_dim=256)
    add_cache(", head_dim 80", head_dim=80, causal=True)
    add_cache(", pages", **pages, causal=True)
    add_cache(", padding to the left", leftpad=True, causal=True)
    add_cache(", a window and a softcap", window_left=50, softcap=20.0, causal=True)
    add_cache(", ALiBi", alibi=True, causal=True)
    add_cache(", new keys", **new, causal=True)
    add_cache(", new keys, pages and rotary", emulated=True, **new, **pages, rotary=True, causal=True)
    add_cache(", new keys, interleaved rotary", **new, rotary=True, rotary_interleaved=True, causal=True)
    add_cache(", FP8", fp8_cache=True, causal=True)
    add_cache(", FP8, pages", fp8_cache=True, **pages, causal=True)
    add_cache(", cache_batch_idx", calls.with_kvcache_of_more, causal=True)
    add_cache(", a whole number as softmax_scale", by(calls.with_kvcache, softmax_scale=1), softmax_scale=1.0)
    add_cache(", one sequence", seqlens_k=(700,), num_heads_k=8, seqlen_q=1, causal=True)
    add_cache(", on a side stream", by(calls.on_a_side_stream, calls.with_kvcache), num_splits=4, causal=True)
    add_cache(", captured from the second call on", calls.captured_later(calls.with_kvcache), causal=True)
    add_cache(", compiled", by(calls.with_kvcache, by=calls.compiled), causal=True)

    packed_q = {"operation": "decode", "options": {**pages, "packed_q": True}, "causal": True}
    lengths = {"seqlens_q": (200, 0, 3, 333), "sinks": True, "window_left": 60, "head_dim": 80}
    add("flash_attn_varlen_func, pages", calls.with_pages, True, seqlens_q=(33, 7), seqlens_k=(1, 70), **packed_q)
    in_8_bits = {**packed_q, "options": {**pages, "packed_q": True, "fp8_cache": True}}
    add("flash_attn_varlen_func, FP8 pages", calls.with_pages, seqlens_q=(33, 7), seqlens_k=(1, 700), **in_8_bits)
    captured = calls.captured_later(calls.with_pages)
    add("flash_attn_varlen_func, pages, captured from the second call on", captured, **packed_q, **lengths)
    add("flash_mla_with_kvcache", calls.with_latents, True, operation="mla", options=pages)
    add(
        "flash_mla_with_kvcache, causal, pages of 128",
        calls.with_latents,
        operation="mla",
        options={**pages, "page_size": 128},
        causal=True,
    )
    add("merge_states", calls.merged, True)
    add("merge_states, parts of tokens", calls.merged_parts)
    add("ring_attention", calls.in_a_ring, seqlen_q=334, seqlen_k=334, causal=True)

    add_gradients("attention", calls.attend)
    add_gradients("attention, causal, deterministic", calls.attend, causal=True, options=in_order)
    add_gradients("attention, causal, head_dim 64", calls.attend, causal=True, head_dim=64)
    add_gradients("attention, head_dim 64, deterministic", calls.attend, True, head_dim=64, options=in_order)
    add_gradients("attention, head_dim 80, fp16", calls.attend, head_dim=80, dtype="fp16")
    add_gradients("attention, head_dim 256", calls.attend, head_dim=256, causal=True)
    add_gradients("attention, of the log-sum-exp too", calls.attend, causal=True, options={"dlse": True})
    add_gradients("attention, a window and a softcap", calls.attend, window_left=60, softcap=20.0, options=in_order)
    add_gradients("attention, ALiBi", calls.attend, alibi=True, causal=True, options=in_order)
    add_gradients("attention, dropout", calls.attend, dropout_p=0.25, options=in_order)
    add(
        "gradients of attention, sinks",
        calls.gradients_beside_sinks,
        operation="backward",
        causal=True,
        options=in_order,
        exact=calls.exact_beside_sinks,
    )
    add_gradients("attention, compiled", by(calls.attend, by=calls.compiled), causal=True, options=in_order)
    add_gradients("packed_attention, deterministic", calls.attend_packed, packed=True, causal=True, options=in_order)
    add_gradients("flash_attn_varlen_func", calls.flash_attn_varlen, packed=True, causal=True)
    return rows


ROWS = _rows()
