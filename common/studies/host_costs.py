"""Ways to call attention, ours and others', of which the host's time is compared."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from flashladder.common import catalog
from flashladder.common.api import attention
from flashladder.common.api.kvcache import flash_attn_with_kvcache
from flashladder.common.console import warn
from flashladder.common.errors import DeviceError, UnsupportedProblemError
from flashladder.common.measure import baselines
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import fast_path
from flashladder.common.runtime.gpu import CALLS

OTHERS = ("fa3", "fa4")
TORCH = "scaled_dot_product_attention"

Calls = dict[str, Callable[[], object]]


def calls_of(problem: Problem, tensors: Tensors, rungs: Sequence[catalog.Version]) -> tuple[Calls, dict[str, float]]:
    """Every call by its name, torch's the first; and the seconds that the first call of each rung took."""
    calls: Calls = {TORCH: by_torch(problem, tensors), **_others(problem, tensors)}
    first = {}
    for rung in rungs:
        ours = _ours(problem, tensors, rung)
        calls |= ours
        first[rung.address] = _seconds(next(iter(ours.values())))
    fast_path.load()
    for rung in rungs:
        calls[f"{rung.address}, in Python"] = _in_python(calls[rung.address])
        calls[f"{rung.address}, a new length"] = _new_lengths(problem, tensors, rung)
    return calls, first


def differentiable(problem: Problem, wanting: Tensors) -> Callable[[], object]:
    """attention() of inputs that want gradients."""
    return partial(attention, wanting.q, wanting.k, wanting.v, causal=problem.causal)


def by_torch(problem: Problem, tensors: Tensors) -> Callable[[], object]:
    q, k, v = (tensor.transpose(1, 2) for tensor in (tensors.q, tensors.k, tensors.v))
    grouped = problem.num_heads != problem.num_heads_k
    return partial(scaled_dot_product_attention, q, k, v, is_causal=problem.causal, enable_gqa=grouped)


def of_caches(problem: Problem, tensors: Tensors) -> Calls:
    """Decode: one row of each sequence against K and V as a cache, by torch, by attention, and in the ways of
    flash_attn_with_kvcache that the GPU runs."""
    q, k, v = tensors.q[:, :1].contiguous(), tensors.k, tensors.v
    one_row = Tensors({"q": q, "k": k, "v": v}, problem)
    batch, room = k.shape[:2]
    page_size = math.gcd(room, 64)
    k_pages, v_pages = (cache.unflatten(1, (-1, page_size)).flatten(0, 1) for cache in (k, v))
    lengths = torch.full((batch,), room - 1, dtype=torch.int32, device=q.device)
    table = torch.arange(len(k_pages), dtype=torch.int32, device=q.device).view(batch, -1)
    call = partial(flash_attn_with_kvcache, q, cache_seqlens=lengths)
    in_one_piece, paged = {"k_cache": k, "v_cache": v}, {"k_cache": k_pages, "v_cache": v_pages, "block_table": table}
    new = {"k": k[:, :1].clone(), "v": v[:, :1].clone()}  # a cache is not its own new keys
    scales = torch.ones((batch, k.shape[2]), device=q.device)
    in_8_bits = {name: cache.to(FP8) for name, cache in in_one_piece.items()}
    ways: dict[str, dict[str, Any]] = {
        "": in_one_piece,
        ", return_softmax_lse=True": {**in_one_piece, "return_softmax_lse": True},
        ", num_splits=4": {**in_one_piece, "num_splits": 4},
        ", paged": paged,
        ", new keys": {**in_one_piece, **new},
        ", paged, new keys": {**paged, **new},
        ", 8-bit floats": {**in_8_bits, "k_descale": scales, "v_descale": scales},
        ", a length of the host": {**in_one_piece, "cache_seqlens": room - 1},
    }
    calls: Calls = {TORCH: by_torch(problem, one_row), "attention": partial(attention, q, k, v)}
    for name, given in ways.items():
        try:
            partial(call, **given)()
        except UnsupportedProblemError as error:
            warn(str(error))
            continue
        calls[f"flash_attn_with_kvcache{name}"] = partial(call, **given)
    return calls


def _others(problem: Problem, tensors: Tensors) -> Calls:
    """The official kernels that are here."""
    found: Calls = {}
    for name in OTHERS:
        try:
            official = baselines.find(name, problem.operation)
            found[official.title] = official.prepare(problem, tensors)
        except DeviceError as error:
            warn(str(error))
    return found


def _ours(problem: Problem, tensors: Tensors, rung: catalog.Version) -> Calls:
    """The ways to call a rung."""
    inputs = tensors.q, tensors.k, tensors.v
    call = partial(attention, *inputs, causal=problem.causal, version=rung.name)
    operator = torch.ops.flashladder.attention.default
    return {
        f"{rung.address}": call,
        f"{rung.address}, out=": partial(call, out=torch.empty_like(tensors.q)),
        f"{rung.address}, return_lse=True": partial(call, return_lse=True),
        f"{rung.address}, as torch.compile calls it": partial(
            operator, *inputs, problem.causal, None, rung.name, False
        ),
    }


def _in_python(call: Callable[[], object]) -> Callable[[], object]:
    """The same call where there is no C++ compiler; that itself costs some 0.1 us."""

    def slowly() -> None:
        kept, fast_path.extension = fast_path.extension, None
        try:
            call()
        finally:
            fast_path.extension = kept

    return slowly


def _new_lengths(problem: Problem, tensors: Tensors, rung: catalog.Version) -> Callable[[], object]:
    """A call whose length no call had before, as each in generation."""
    room = tensors.k.new_zeros((problem.batch, problem.seqlen_k + CALLS, problem.num_heads_k, problem.head_dim))
    grown = iter([room[:, : problem.seqlen_k + more] for more in range(1, CALLS + 1)])

    def call() -> None:
        keys = next(grown)
        attention(tensors.q, keys, keys, causal=problem.causal, version=rung.name)

    return call


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
