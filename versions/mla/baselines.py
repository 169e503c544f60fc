"""Other people's kernels for MLA: FlashMLA."""

from __future__ import annotations

from typing import Any

from flashladder.common.measure.baselines import Baseline, RunOnce, by_name
from flashladder.common.measure.baselines.forward import Output
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem


def _takes_pages_of_64(problem: Problem) -> str | None:
    return None if problem.paged and problem.page_size == 64 else "reads pages of 64 keys alone"


def _flash_mla(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Its schedule is made beforehand, once for all layers of a model; it is not timed."""
    heads_of_one = problem.seqlen_q * problem.num_heads // problem.num_heads_k
    metadata = module.get_mla_metadata(tensors.cache_seqlens, heads_of_one, problem.num_heads_k)
    cache = tensors.q, tensors.k_cache, tensors.block_table, tensors.cache_seqlens, problem.head_dim_v
    options = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}

    def run() -> Output:
        return Output(*module.flash_mla_with_kvcache(*cache, *metadata, **options))

    return run


BASELINES = by_name(
    Baseline(
        operation="mla",
        name="flashmla",
        title="FlashMLA",
        module="flash_mla",
        package="flash_mla",
        install="pip install git+https://github.com/deepseek-ai/FlashMLA",
        bind=_flash_mla,
        refuses=_takes_pages_of_64,
        arches=(9,),
        max_head_dim=576,
        head_dims_apart=((576, 512),),
    )
)
