"""SGLang's attention by one call over pages, for prompts, chunks and tokens.

`register_with_sglang` gives SGLang this class, which is of sglang/srt/layers/attention/base_attn_backend.py (0.5.23).
What a step needs is computed on the GPU, by operators that a CUDA graph captures with the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch.nn.functional import pad

from flashladder.common.api.frontends.engines import SGLANG
from flashladder.common.api.frontends.flash_attn import flash_attn_varlen_func
from flashladder.common.api.slots import reshape_and_cache
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.problem import DTYPES

_POOL = "MHATokenToKVPool"


class Metadata(NamedTuple):
    """Of a step, on the GPU: where rows of each request begin, how many keys it has, and in which pages."""

    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


class LadderBackend(AttentionBackend):
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.pool, self.page_size = model_runner.token_to_kv_pool, model_runner.page_size
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        for name, is_refused in {
            "speculative decoding": model_runner.spec_algorithm.is_speculative(),
            "latent attention (MLA)": model_runner.use_mla_backend,
            "cross attention": model_runner.model_config.is_encoder_decoder,
        }.items():
            if is_refused:
                raise _refusal(name)
        if type(self.pool).__name__ != _POOL or self.pool.get_key_buffer(self.pool.start_layer).dim() != 3:
            raise _refusal(
                f"a cache that is a {type(self.pool).__name__}",
                f"a {_POOL} of (keys, heads, head_dim), as --disable-hybrid-swa-memory makes for models with windows,",
            )
        if (dtype := model_runner.kv_cache_dtype) not in (*DTYPES.values(), FP8):
            raise _refusal(f"a cache of {dtype}", listing((*DTYPES.values(), FP8)))
        if self.req_to_token.is_cuda and torch.cuda.get_device_capability(self.req_to_token.device)[0] != 9:
            raise _refusal("this GPU", "Hopper, which the kernel that writes new keys needs,")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """For all layers of a step. A CUDA graph captures this, and reads the batch's tensors anew each time."""
        mode, requests = forward_batch.forward_mode, forward_batch.req_pool_indices
        if mode.is_decode_or_idle():
            starts = torch.arange(requests.shape[0] + 1, dtype=torch.int32, device=requests.device)
        elif mode.is_extend_without_speculative() and not mode.is_dllm_extend():
            starts = pad(forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        else:
            raise _refusal(f"forward_mode {mode.name}", "EXTEND, MIXED or DECODE")
        table = self.req_to_token[:, :: self.page_size][requests] // self.page_size
        self.forward_metadata = Metadata(starts, forward_batch.seq_lens.int(), table.int())

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """There is none: what a graph reads is of its own."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """O, (tokens, heads * head_dim); new keys are written first."""
        _check(layer, others)
        heads, room = (layer.tp_k_head_num, layer.head_dim), self.forward_metadata.table.shape[1] * self.page_size
        k_pages, v_pages = (x.view(-1, self.page_size, *heads) for x in self.pool.get_kv_buffer(layer.layer_id))
        scales: dict[str, Any] = {}
        if k_pages.dtype == FP8:
            scales = {"k_descale": _scale(layer.k_scale), "v_descale": _scale(layer.v_scale)}
        if save_kv_cache and k is not None and v is not None:
            k, v = (x.view(-1, *heads) for x in (k, v))
            reshape_and_cache(k, v, k_pages, v_pages, forward_batch.out_cache_loc.long(), **scales)
        starts, lengths, table = self.forward_metadata
        rows, window = q.view(-1, layer.tp_q_head_num, layer.head_dim), layer.sliding_window_size
        o = flash_attn_varlen_func(
            rows,
            k_pages,
            v_pages,
            starts,
            None,
            len(rows),
            room,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=(-1, -1) if window is None or window < 0 else (window, 0),
            softcap=layer.logit_cap or 0.0,
            block_table=table,
            seqused_k=lengths,
            s_aux=sinks,
            **scales,
        )
        assert isinstance(o, torch.Tensor)
        return o.flatten(1)

    forward_decode = forward_extend


def _check(layer: Any, others: dict[str, Any]) -> None:
    """UnsupportedProblemError for a layer, or an argument of its call, that kernels do not take."""
    if layer.v_head_dim != layer.head_dim:
        raise _refusal(f"v_head_dim={layer.v_head_dim} with head_dim={layer.head_dim}", "V as wide as K")
    if layer.is_cross_attention or layer.attn_type.value != "decoder":
        raise _refusal(f"attention of type {layer.attn_type.value}", "a decoder's")
    if layer.xai_temperature_len > 0:
        raise _refusal(f"xai_temperature_len={layer.xai_temperature_len}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise _refusal(f"logit_capping_method={layer.logit_capping_method!r}", "tanh")
    for name, value in others.items():
        if value is not None and value is not False:
            raise _refusal(name)


def _scale(scale: torch.Tensor | None) -> torch.Tensor | None:
    """Of a layer, (1,), fp32."""
    return None if scale is None else scale.reshape(1).float()


def _refusal(what: str, instead: str = "") -> UnsupportedProblemError:
    works = f"; {instead} works" if instead else ""
    return UnsupportedProblemError(f"the attention backend {SGLANG!r} does not take {what}{works}")
