"""Multi-head latent attention: decode of a paged cache whose rows are K and V of all heads."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashladder.common.api import flops, operator, validate
from flashladder.common.api.caches import Cache
from flashladder.common.api.options import problem_of
from flashladder.common.problem.caches import TABLE
from flashladder.common.problem.operations.mla import INDICES
from flashladder.common.problem.problem import LSE, Problem
from flashladder.common.runtime.outputs import new_lse, new_o, new_outputs

HEAD_DIM, HEAD_DIM_V = 576, 512
PAGE = 64  # keys
COLUMNS = ((HEAD_DIM, HEAD_DIM_V), (512, 512), (160, 128))  # of K and of V, that kernels take


def compute(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
    sparse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp. Pages may overlap. A cache of uint8 has rows of 656 bytes.

    The table is a block table; if `sparse`, the lists of rows of q, each of which is a sequence of its own.
    """
    problem = _problem_of(q, k_cache, table, head_dim_v, softmax_scale, causal, sparse)
    outputs = new_outputs(problem, q)
    caches_of = {"k_cache": k_cache, "v_cache": k_cache[..., :head_dim_v]}
    where = {INDICES if sparse else TABLE: table}
    operator.launch(problem, {"q": q, **caches_of, "cache_seqlens": lengths, **where} | outputs)
    return outputs["o"], outputs[LSE]


def is_one_tensor(cache: Cache) -> bool:
    """Whether a cache of 512 columns is K and V of all heads, as of Gemma 4's global layers."""
    k, v = cache.k, cache.v
    if not (validate.surely(k.shape[3] == HEAD_DIM_V) and validate.surely(k.shape[2] == 1)):
        return False
    if k is v or not validate.has_memory(k):
        return k is v
    return k.data_ptr() == v.data_ptr() and k.shape == v.shape and k.stride() == v.stride()


def decode_of_one_tensor(
    q: torch.Tensor, cache: Cache, lengths: torch.Tensor, softmax_scale: float | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp, -inf of a row that sees no key. Without a block table a sequence has pages of 64 keys,
    which most rungs take, or is one page where it has no such."""
    pages, table = cache.k, cache.table
    if table is None:
        if pages.is_contiguous() and pages.shape[1] % PAGE == 0 and pages.numel():
            pages = pages.view(-1, PAGE, 1, HEAD_DIM_V)
        count = len(pages) // max(1, q.shape[0])
        table = torch.arange(len(pages), dtype=torch.int32, device=q.device).view(q.shape[0], count)
    o, lse = mla_decode(q, pages, table, lengths, HEAD_DIM_V, softmax_scale, causal, False)
    return o, torch.where(lse == math.inf, -math.inf, lse)


mla_decode = torch.library.custom_op("flashladder::mla_decode", compute, mutates_args=())


@mla_decode.register_fake
def _(q: torch.Tensor, k_cache: torch.Tensor, _: Any, __: Any, head_dim_v: int, *___: Any) -> tuple[torch.Tensor, ...]:
    return new_o(q, head_dim_v), new_lse(q)


@flops.formula("mla_decode")
def _(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
    sparse: bool,
) -> int:
    keys = sum(flops.lengths(lengths, (1 if sparse else k_cache.shape[1]) * table.shape[1]))
    return 2 * keys * q.shape[1] * q.shape[2] * (q.shape[3] + head_dim_v)


def _problem_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    table: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
    sparse: bool,
) -> Problem:
    num_pages, page_size = k_cache.shape[:2]
    pages: dict[str, Any] = {"paged": True, "page_size": max(1, page_size), "num_pages": num_pages}
    rows: dict[str, Any] = {"fp8_rows": k_cache.dtype == torch.uint8, "sparse": sparse}
    return problem_of(
        q,
        k_cache,
        operation="mla",
        head_dim_v=head_dim_v,
        seqlen_k=(1 if sparse else page_size) * table.shape[1],
        causal=causal,
        softmax_scale=softmax_scale,
        lse=True,
        options=tuple((pages | {name: True for name, is_so in rows.items() if is_so}).items()),
    )
