"""Architectures of transformers that run on the ladder, as tiny random models, and what of them does not.

`sizes` are beside those of SIZES. `elsewhere` says which cases fall back or are refused, and by which words: the same
that docs/models.md explains.
"""

from dataclasses import dataclass, field
from typing import Any

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,  # of each kind: further ones see the same code
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
CASES = ("prefill", "left", "right", "packed", "generate", "compile")
_TWO_KINDS = {"num_hidden_layers": 2}  # with a window, and without
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}  # all of two: no choice that a rounding turns over


@dataclass(frozen=True)
class Architecture:
    """A row of the table."""

    sizes: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)  # case: words of the reason
    lacks: tuple[str, ...] = ()  # cases that the architecture itself does not have
    head: str = "{}ForCausalLM"


_ENCODER: dict[str, Any] = {"lacks": ("packed", "generate"), "head": "{}Model"}
_LOCAL = {"compile": "a mask under torch.compile"}


ARCHITECTURES = {
    "Llama": Architecture({"num_hidden_layers": 2}),  # a cache of several
    "Mistral": Architecture({"sliding_window": 8}),
    "Mixtral": Architecture({"sliding_window": 8, "num_local_experts": 2}),
    "Ministral3": Architecture(),
    "Qwen2": Architecture(),
    "Qwen2Moe": Architecture({"num_experts": 2, **_EXPERTS}),
    "Qwen3": Architecture({"head_dim": 64}),
    "Qwen3Moe": Architecture({"head_dim": 64, "num_experts": 2, **_EXPERTS}),
    "Gemma": Architecture({"head_dim": 64}),
    "Gemma2": Architecture({"head_dim": 64, "sliding_window": 8, "query_pre_attn_scalar": 64, **_TWO_KINDS}),
    "Gemma3Text": Architecture({"head_dim": 64, "sliding_window": 8}, head="Gemma3ForCausalLM"),
    "VaultGemma": Architecture({"head_dim": 64, "sliding_window": 8, "query_pre_attn_scalar": 64, **_TWO_KINDS}),
    "Phi": Architecture(),
    "Phi3": Architecture({"sliding_window": 8}),
    "Olmo": Architecture(),
    "Olmo2": Architecture(),
    "Olmo3": Architecture({"sliding_window": 8}),
    "Olmoe": Architecture({"num_experts": 2, "num_experts_per_tok": 2}),
    "Cohere": Architecture(),
    "Cohere2": Architecture({"sliding_window": 8}),
    "Granite": Architecture(),
    "GraniteMoe": Architecture({"num_local_experts": 2, "num_experts_per_tok": 2}),
    "Glm": Architecture({"head_dim": 64}),
    "Glm4": Architecture({"head_dim": 64}),
    "SmolLM3": Architecture(),
    "Starcoder2": Architecture({"sliding_window": 8}),
    "StableLm": Architecture(),
    "GPTNeoX": Architecture(),
    "Nemotron": Architecture(),
    "Helium": Architecture({"head_dim": 64}),
    "Exaone4": Architecture({"sliding_window": 8}),
    "Arcee": Architecture({"head_dim": 64}),
    "SeedOss": Architecture({"head_dim": 64}),
    "Ernie4_5": Architecture({"head_dim": 64}),
    "HunYuanDenseV1": Architecture({"head_dim": 64}),
    "Apertus": Architecture(),
    "Llama4Text": Architecture(
        {"head_dim": 64, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 64},
        _LOCAL,
        head="Llama4ForCausalLM",
    ),
    "Bert": Architecture(**_ENCODER),
    "ModernBert": Architecture(
        {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 1, **_TWO_KINDS}, _LOCAL, **_ENCODER
    ),
    "GPT2": Architecture({"n_embd": 128, "n_head": 2, "n_layer": 1}, head="GPT2LMHeadModel"),
    "OPT": Architecture({"ffn_dim": 64, "word_embed_proj_dim": 128}),
    "GptOss": Architecture(
        {"head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 2, **_TWO_KINDS}, {}, ("compile",)
    ),
    "DeepseekV3": Architecture(
        {"num_key_value_heads": 2, "n_routed_experts": 2, "n_group": 1, "topk_group": 1, **_EXPERTS}
    ),
}
