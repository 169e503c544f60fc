"""Other people's kernels for MLA: FlashMLA, FlashAttention-3 with its q_v, FlashInfer.

Each is given the same cache. FlashAttention-3 and FlashInfer take two views of it, the latents and the rotated part.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashladder.common.measure.baselines import Baseline, RunOnce, by_name
from flashladder.common.measure.baselines.forward import BASELINES as OF_FORWARD
from flashladder.common.measure.baselines.forward import Output
from flashladder.common.problem.decode_sizes import seqlens
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.operations.mla import HEAD_DIM, HEAD_DIM_V, INDICES, NO_ROW
from flashladder.common.problem.problem import Problem


def _takes_flash_mla_rows(problem: Problem) -> str | None:
    """Sparse, its kernel for Hopper reads 8-bit rows, which are its own; dense, 16-bit ones."""
    if not problem.paged or problem.page_size != 64:
        return "reads pages of 64 keys alone"
    if problem.fp8_rows and problem.sparse:
        if problem.num_heads % 64 or problem.seqlen_k % 64:
            return f"takes 64 or 128 heads and lists of whole 64 keys, not {problem.num_heads} and {problem.seqlen_k}"
        return None
    return _is_asked_for_plain_latents(problem)


def _is_asked_for_plain_latents(problem: Problem) -> str | None:
    if problem.fp8_rows or problem.sparse:
        return "is asked for caches in 16 bits alone here, without lists of keys"
    if (columns := (problem.head_dim, problem.head_dim_v)) != (HEAD_DIM, HEAD_DIM_V):
        return f"is asked for {HEAD_DIM} columns and {HEAD_DIM_V} of V alone here, not {columns[0]} and {columns[1]}"
    return None


def _takes_one_head_in_pages(problem: Problem) -> str | None:
    if not problem.paged:
        return "reads pages alone"
    takes = None if problem.num_heads_k == 1 else "takes one head of K"
    return _is_asked_for_plain_latents(problem) or takes


def _flash_mla(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Its schedule is made beforehand, once for all layers of a model; it is not timed. Of lists -1 alone is no key."""
    heads_of_one = problem.seqlen_q * problem.num_heads // problem.num_heads_k
    counts = (problem.num_heads, True, problem.seqlen_k) if problem.sparse else ()
    metadata = module.get_mla_metadata(tensors.cache_seqlens, heads_of_one, problem.num_heads_k, *counts)
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
    table, lengths = (None, None) if problem.sparse else (tensors.block_table, tensors.cache_seqlens)
    if problem.sparse:
        lists = tensors.by_name[INDICES]
        is_behind = torch.arange(problem.seqlen_k, device=lists.device) >= tensors.cache_seqlens[:, None]
        options |= {"is_fp8_kvcache": True, "indices": lists.masked_fill(is_behind, NO_ROW)[:, None]}
    cache = tensors.q, tensors.k_cache, table, lengths, problem.head_dim_v

    def run() -> Output:
        return Output(*module.flash_mla_with_kvcache(*cache, *metadata, **options))

    run()  # newer releases make the schedule in the first call, and keep it in the metadata
    return run


def _fa3(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Its interface for caches; or `fwd(q, k, v, ...)` of packed q, where a module has kernels for lengths alone."""
    latent, rotated = problem.head_dim_v, slice(problem.head_dim_v, None)
    q, q_v = tensors.q[..., rotated], tensors.q[..., :latent]
    caches = tensors.k_cache[..., rotated], tensors.v_cache
    table = tensors.block_table if problem.paged else None
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
    options["num_splits"] = problem.num_splits
    if not (fwd := getattr(module, "fwd", None)):
        options |= {"qv": q_v, "cache_seqlens": tensors.cache_seqlens, "page_table": table}
        return lambda: Output(module.flash_attn_with_kvcache(q, *caches, **options))

    rows = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device) * problem.seqlen_q
    packed, packed_v = q.flatten(0, 1), q_v.flatten(0, 1)
    options |= {"q_v": packed_v, "cu_seqlens_q": rows, "seqused_k": tensors.cache_seqlens, "block_table": table}
    options |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}

    def run() -> Output:
        return Output(fwd(packed, *caches, **options)[0].view(tensors.o.shape))

    return run


def _flashinfer(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Its plan is made beforehand too. It wants the pages of all sequences one behind the other."""
    latent, rotated = slice(problem.head_dim_v), slice(problem.head_dim_v, None)
    q, cache, lengths = tensors.q.flatten(0, 1), tensors.k_cache[:, :, 0], tensors.cache_seqlens
    counts = torch.tensor([-(-length // problem.page_size) for length in seqlens(problem)], dtype=torch.int32)
    first_pages = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32))).to(q.device)
    has_page = torch.arange(tensors.block_table.shape[1]) < counts[:, None]
    rows = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device) * problem.seqlen_q
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchMLAPagedAttentionWrapper(workspace)
    wrapper.plan(
        rows,
        first_pages,
        tensors.block_table[has_page.to(q.device)],
        lengths,
        problem.num_heads,
        problem.head_dim_v,
        problem.head_dim - problem.head_dim_v,
        problem.page_size,
        problem.causal,
        problem.softmax_scale,
        q.dtype,
        cache.dtype,
    )
    parts = q[..., latent], q[..., rotated], cache[..., latent], cache[..., rotated]

    def run() -> Output:
        return Output(wrapper.run(*parts, return_lse=True)[0].view(tensors.o.shape))  # its LSE is in log2

    return run


_baseline = partial(Baseline, "mla", max_head_dim=HEAD_DIM, head_dims_apart=((HEAD_DIM, HEAD_DIM_V),))
BASELINES = by_name(
    _baseline(
        name="flashmla",
        title="FlashMLA",
        module="flash_mla",
        package="flash_mla",
        install="pip install git+https://github.com/deepseek-ai/FlashMLA",
        bind=_flash_mla,
        refuses=_takes_flash_mla_rows,
        arches=(9,),
    ),
    _baseline(
        name="fa3",
        title=OF_FORWARD["fa3"].title,
        module="flash_attn_interface",
        package="flash_attn_3",
        install=OF_FORWARD["fa3"].install,
        bind=_fa3,
        refuses=_is_asked_for_plain_latents,
        arches=(9,),
    ),
    _baseline(
        name="flashinfer",
        title=OF_FORWARD["flashinfer"].title,
        module="flashinfer.mla",
        package="flashinfer-python",
        install=OF_FORWARD["flashinfer"].install,
        bind=_flashinfer,
        refuses=_takes_one_head_in_pages,
    ),
)
