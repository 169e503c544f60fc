"""One call of a public function: of a problem and its tensors by name, and then all that the call wrote, by name."""

import functools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

import flashladder
from flashladder.common.problem.problem import Problem
from flashladder.tests.first_calls.poison import fill_with_nan, poison

SEED = 7  # of the random state that dropout draws
HIDDEN_WIDTH = 512  # of V in multi-head latent attention
Tensors = Mapping[str, torch.Tensor]
Function = Callable[[Problem, Tensors], dict[str, torch.Tensor]]


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _options(p: Problem, t: Tensors) -> dict[str, Any]:
    """What `attention` and flash-attn's functions have in common."""
    if p.dropout_p:
        torch.manual_seed(SEED)
    found = {"causal": p.causal, "softcap": p.softcap, "alibi_slopes": t.get("alibi_slopes"), "dropout_p": p.dropout_p}
    return found | {"deterministic": getattr(p, "deterministic", False)}


def _bounds(p: Problem) -> tuple[int, int]:
    """A window as flash-attn has it."""
    left, right = (-1 if each is None else each for each in (p.window_left, p.window_right))
    return left, right


def _named(found: Any) -> dict[str, torch.Tensor]:
    return dict(zip(("o", "lse"), found if isinstance(found, tuple) else (found,), strict=False))


def attend(p: Problem, t: Tensors, by: Any = plainly, **more: Any) -> dict[str, torch.Tensor]:
    """`attention`."""
    options = {**_options(p, t), "window": (p.window_left, p.window_right), "sinks": t.get("sinks"), **more}
    return _named(by(flashladder.attention)(t["q"], t["k"], t["v"], return_lse=p.lse, **options))


def attend_into(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`attention` with an `out` that holds NaN."""
    out = fill_with_nan(torch.empty((*t["q"].shape[:3], p.head_dim_v), dtype=t["q"].dtype, device=t["q"].device))
    return attend(p, t, out=out)


def attend_packed(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`packed_attention`."""
    options = {**_options(p, t), "window": (p.window_left, p.window_right), "sinks": t.get("sinks")}
    o, lse = flashladder.packed_attention(*_packed(p, t), return_lse=True, **options)
    return {"o": o[None], "lse": lse}


def _packed(p: Problem, t: Tensors) -> tuple[Any, ...]:
    inputs = (t[name][0] for name in "qkv")
    return (*inputs, t["cu_seqlens_q"], t["cu_seqlens_k"], p.seqlen_q, p.seqlen_k)


def flash_attn(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`flash_attn_func`."""
    options = {**_options(p, t), "window_size": _bounds(p), "return_attn_probs": not p.dropout_p}
    return _named(flashladder.flash_attn_func(t["q"], t["k"], t["v"], **options))


def flash_attn_varlen(p: Problem, t: Tensors, by: Any = plainly) -> dict[str, torch.Tensor]:
    """`flash_attn_varlen_func`."""
    options = {**_options(p, t), "window_size": _bounds(p), "return_attn_probs": True}
    o, lse, _ = by(flashladder.flash_attn_varlen_func)(*_packed(p, t), **options)
    return {"o": o[None], "lse": lse}


def flash_attn_qkvpacked(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`flash_attn_qkvpacked_func`."""
    qkv = torch.stack([t[name] for name in "qkv"], 2)
    return _named(flashladder.flash_attn_qkvpacked_func(qkv, causal=p.causal, return_attn_probs=True))


def flash_attn_kvpacked(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`flash_attn_kvpacked_func`."""
    kv = torch.stack([t["k"], t["v"]], 2)
    return _named(flashladder.flash_attn_kvpacked_func(t["q"], kv, causal=p.causal, return_attn_probs=True))


def flash_attn_varlen_qkvpacked(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`flash_attn_varlen_qkvpacked_func`."""
    qkv = torch.stack([t[name][0] for name in "qkv"], 1)
    options = {"causal": p.causal, "return_attn_probs": True}
    o, lse, _ = flashladder.flash_attn_varlen_qkvpacked_func(qkv, t["cu_seqlens_q"], p.seqlen_q, **options)
    return {"o": o[None], "lse": lse}


def flash_attn_varlen_kvpacked(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`flash_attn_varlen_kvpacked_func`."""
    q, k, v, *lengths = _packed(p, t)
    options = {"causal": p.causal, "return_attn_probs": True}
    o, lse, _ = flashladder.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *lengths, **options)
    return {"o": o[None], "lse": lse}


def with_kvcache(p: Problem, t: Tensors, by: Any = plainly, **more: Any) -> dict[str, torch.Tensor]:
    """`flash_attn_with_kvcache`, of caches that no call has written to."""
    caches = {name: t[name].clone() for name in ("k_cache", "v_cache")}
    names = ("cache_seqlens", "block_table", "cache_leftpad", "alibi_slopes", "k_descale", "v_descale")
    options = {name: t.get(name) for name in (*names, "rotary_cos", "rotary_sin")}
    options |= {"causal": p.causal, "window_size": _bounds(p), "softcap": p.softcap, "num_splits": p.num_splits}
    options |= {"rotary_interleaved": p.rotary_interleaved, "return_softmax_lse": True, **more}
    function = by(flashladder.flash_attn_with_kvcache)
    found = function(t["q"], *caches.values(), t.get("k_new"), t.get("v_new"), **options)
    return _named(found) | (caches if p.new_keys else {})


def with_pages(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`flash_attn_varlen_func` of rows over pages."""
    names = {
        "block_table": "block_table",
        "seqused_k": "cache_seqlens",
        "alibi_slopes": "alibi_slopes",
        "s_aux": "sinks",
        "k_descale": "k_descale",
        "v_descale": "v_descale",
    }
    options = {name: t.get(ours) for name, ours in names.items()}
    options |= {"causal": p.causal, "window_size": _bounds(p), "softcap": p.softcap, "return_attn_probs": True}
    caches, lengths = (t["k_cache"], t["v_cache"]), (t["cu_seqlens_q"], None, p.seqlen_q, p.seqlen_k)
    o, lse, _ = flashladder.flash_attn_varlen_func(t["q"][0], *caches, *lengths, **options)
    return {"o": o[None], "lse": lse[None]}


def with_kvcache_of_more(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """The same of a cache with a sequence more, which `cache_batch_idx` leaves out, in another order."""
    order = torch.arange(p.batch, 0, -1, dtype=torch.int32, device=t["q"].device)
    larger = dict(t)
    for name in ("k_cache", "v_cache"):
        larger[name] = fill_with_nan(t[name].new_empty((p.batch + 1, *t[name].shape[1:])))
        larger[name][order.long()] = t[name]
    return with_kvcache(p, larger, cache_batch_idx=order)


def with_latents(p: Problem, t: Tensors, by: Any = plainly) -> dict[str, torch.Tensor]:
    """`flash_mla_with_kvcache`."""
    tensors = (t[name] for name in ("q", "k_cache", "block_table", "cache_seqlens"))
    schedule = flashladder.get_mla_metadata(t["cache_seqlens"], p.seqlen_q * p.num_heads, 1)
    return _named(by(flashladder.flash_mla_with_kvcache)(*tensors, HIDDEN_WIDTH, *schedule, causal=p.causal))


def merged(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`merge_states` of two calls, of half of the keys each."""
    parts = _of_halves(p, t)
    return _named(flashladder.merge_states(*parts[0], *parts[1]))


def merged_parts(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """The same as FlashInfer has it."""
    outputs, sums = zip(*_of_halves(p, t), strict=True)
    tokens = torch.stack([o.flatten(0, 1) for o in outputs], 1)
    by_token = torch.stack([lse.transpose(1, 2).flatten(0, 1) for lse in sums], 1)
    o, lse = flashladder.merge_states(tokens, by_token)
    return {"o": o.unflatten(0, (p.batch, -1)), "lse": lse.unflatten(0, (p.batch, -1)).transpose(1, 2)}


def _of_halves(p: Problem, t: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    half = p.seqlen_k // 2
    halves = (slice(0, half), slice(half, None))
    return [flashladder.attention(t["q"], t["k"][:, at], t["v"][:, at], return_lse=True) for at in halves]


def in_a_ring(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """`ring_attention` of one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parts = (flashladder.zigzag_split(t[name], 0, 1) for name in "qkv")
    o, lse = flashladder.ring_attention(*parts, causal=p.causal, return_lse=True)
    return {"o": flashladder.zigzag_join([o]), "lse": flashladder.zigzag_join([lse], 2)}


def gradients_of(function: Function, p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """What a function gives, and the gradients of Q, K, V and the sinks."""
    leaves = {name: t[name].detach().requires_grad_() for name in ("q", "k", "v", "sinks") if name in t}
    found = function(p, {**t, **leaves})
    outputs = {name: found[name] for name in ("o", "lse") if name == "o" or "dlse" in t}
    given = [t[f"d{name}"] if name == "lse" else t["dout"] for name in outputs]
    made = torch.autograd.grad(list(outputs.values()), list(leaves.values()), given)
    return {**found, **{f"d{name}": gradient for name, gradient in zip(leaves, made, strict=True)}}


def gradients_beside_sinks(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """Those of `attention` with sinks, which are no input of the backward ladder."""
    return gradients_of(attend, p, {**t, **_beside(p, t)})


def _beside(p: Problem, t: Tensors) -> Tensors:
    """Sinks, one a head."""
    return {"sinks": torch.linspace(-1, 2, p.num_heads, device=t["q"].device)}


def exact_beside_sinks(p: Problem, t: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By automatic differentiation of the textbook's formula."""
    leaves = {
        name: tensor.detach().to(dtype).requires_grad_()
        for name, tensor in {**{name: t[name] for name in "qkv"}, **_beside(p, t)}.items()
    }
    q, k, v, sinks = leaves.values()
    k, v = (x.repeat_interleave(p.num_heads // p.num_heads_k, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q * p.softmax_scale, k)
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1 + p.seqlen_k - p.seqlen_q)
    scores = scores.masked_fill(hidden, -math.inf) if p.causal else scores
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., : p.seqlen_k]
    made = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", weights, v), list(leaves.values()), t["dout"].to(dtype))
    return {f"d{name}": gradient for name, gradient in zip(leaves, made, strict=True)}


def on_a_side_stream(function: Function, p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """On a stream that is new at each call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        poison(t["q"].device)  # the stream's own memory
        found = function(p, t)
    torch.cuda.current_stream().wait_stream(stream)
    return found


def in_a_thread(function: Function, p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """In a thread that is new at each call."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, p, t).result()


def captured_later(function: Function) -> Function:
    """The first call is one; further ones are captured in a CUDA graph, and replayed."""
    calls: list[None] = []

    def call(p: Problem, t: Tensors) -> dict[str, torch.Tensor]:
        calls.append(None)
        if len(calls) == 1:
            return function(p, t)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = function(p, t)
        for tensor in found.values():
            fill_with_nan(tensor)
        graph.replay()
        torch.cuda.synchronize()
        return {name: tensor.clone() for name, tensor in found.items()}

    return call
