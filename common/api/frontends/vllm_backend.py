"""vLLM's attention by one call over pages: prompts, chunks, drafts and tokens together.

vLLM imports this module by the name that `register_with_vllm` gives it. Its classes are those of vllm/v1/attention/
backend.py (0.33): a backend says what it takes, a builder makes what all layers of a step share, and each layer has
an implementation. Lengths, tables and slots stay on the GPU, so a CUDA graph may hold any step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from flashladder.common.api.frontends.engines import VLLM
from flashladder.common.api.frontends.flash_attn import flash_attn_varlen_func
from flashladder.common.api.slots import reshape_and_cache
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.head_dims import CACHED_HEAD_DIMS

_IN_8_BITS = ("fp8", "fp8_e4m3")
_HOPPER = 9


class LadderBackend(AttentionBackend):
    """What it takes. What it does not say here vLLM takes for no: MLA, sparse, cross and non-causal attention, prefixes
    of images, and contexts in parallel."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_IN_8_BITS]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return VLLM

    @staticmethod
    def get_impl_cls() -> type[LadderImpl]:
        return LadderImpl

    @staticmethod
    def get_builder_cls() -> type[LadderBuilder]:
        return LadderBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= CACHED_HEAD_DIMS[-1]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == _HOPPER)  # the kernel that writes new keys is Hopper's

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        if kv_cache_dtype in _IN_8_BITS and head_size % 16:
            return f"head_size={head_size} with kv_cache_dtype={kv_cache_dtype}, which takes multiples of 16"
        return None


@dataclass
class LadderMetadata(AttentionMetadata):
    """Of a step, of tokens of several requests: all on the GPU but for the numbers."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class LadderBuilder(AttentionMetadataBuilder[LadderMetadata]):
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LadderMetadata:
        if common_attn_metadata.causal is not True:
            raise UnsupportedProblemError(f"causal={common_attn_metadata.causal}: {VLLM} is for causal attention")
        return LadderMetadata(
            common_attn_metadata.num_actual_tokens,
            common_attn_metadata.max_query_len,
            common_attn_metadata.query_start_loc,
            common_attn_metadata.seq_lens,
            common_attn_metadata.block_table_tensor,
        )

    def update_block_table(
        self, metadata: LadderMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> LadderMetadata:
        return replace(metadata, block_table=blk_table)


class LadderImpl(AttentionImpl[LadderMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise UnsupportedProblemError(f"attn_type={attn_type}: {VLLM} is for decoders' attention")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (-1 if sliding_window is None else sliding_window - 1, -1 if sliding_window is None else 0),
            "softcap": logits_soft_cap or 0.0,
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            "s_aux": sinks,
            "num_splits": 1 if envs.VLLM_BATCH_INVARIANT else 0,
        }

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: LadderMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """O of query, (tokens, heads, head_size), is written to output; keys are in the cache already."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedProblemError(f"output_scale: {VLLM} writes O in 16 bits")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        tokens, (k, v) = attn_metadata.num_actual_tokens, self._pages(kv_cache)
        flash_attn_varlen_func(
            query[:tokens],
            k,
            v,
            attn_metadata.query_start_loc,
            None,
            attn_metadata.max_query_len,
            attn_metadata.block_table.shape[1] * k.shape[1],
            block_table=attn_metadata.block_table,
            seqused_k=attn_metadata.seq_lens,
            out=output[:tokens],
            **self.options,
            **self._scales(layer),
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes keys and values of a step to their slots; there may be fewer slots than rows, which are padded."""
        tokens = slot_mapping.shape[0]
        reshape_and_cache(key[:tokens], value[:tokens], *self._pages(kv_cache), slot_mapping, **self._scales(layer))

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of (pages, heads, page_size, 2 * head_size), whatever way it lies: views, heads behind keys."""
        if self.kv_cache_dtype in _IN_8_BITS:
            kv_cache = kv_cache.view(FP8)
        k, v = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return k, v

    def _scales(self, layer: Any) -> dict[str, Any]:
        """A number each, or one for each head of K."""
        if self.kv_cache_dtype not in _IN_8_BITS:
            return {}
        scales = {"k_descale": layer._k_scale, "v_descale": layer._v_scale}
        return {name: scale if scale.numel() == 1 else scale.reshape(1, -1) for name, scale in scales.items()}
