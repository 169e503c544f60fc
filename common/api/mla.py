"""Multi-head latent attention: decode of a paged cache whose rows are K and V of all heads."""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import flops, operator
from flashladder.common.api.options import problem_of
from flashladder.common.problem.problem import LSE, Problem
from flashladder.common.runtime.outputs import new_lse, new_o, new_outputs

HEAD_DIM, HEAD_DIM_V = 576, 512


def compute(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp. Pages may overlap."""
    problem = _problem_of(q, k_cache, block_table, softmax_scale, causal)
    outputs = new_outputs(problem, q)
    caches_of = {"k_cache": k_cache, "v_cache": k_cache[..., :HEAD_DIM_V]}
    inputs = {"q": q, **caches_of, "cache_seqlens": cache_seqlens, "block_table": block_table}
    operator.launch(problem, inputs | outputs)
    return outputs["o"], outputs[LSE]


mla_decode = torch.library.custom_op("flashladder::mla_decode", compute, mutates_args=())


@mla_decode.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return new_o(q, HEAD_DIM_V), new_lse(q)


@flops.formula("mla_decode")
def _(q: torch.Tensor, k_cache: torch.Tensor, table: torch.Tensor, cache_seqlens: torch.Tensor, *_: Any) -> int:
    keys = sum(flops.lengths(cache_seqlens, k_cache.shape[1] * table.shape[1]))
    return 2 * keys * q.shape[1] * q.shape[2] * (HEAD_DIM + HEAD_DIM_V)


def _problem_of(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, softmax_scale: float | None, causal: bool
) -> Problem:
    num_pages, page_size = k_cache.shape[:2]
    return problem_of(
        q,
        k_cache,
        operation="mla",
        head_dim_v=HEAD_DIM_V,
        seqlen_k=page_size * block_table.shape[1],
        causal=causal,
        softmax_scale=softmax_scale,
        lse=True,
        options=(("paged", True), ("page_size", max(1, page_size)), ("num_pages", num_pages)),
    )
