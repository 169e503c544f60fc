"""Attention under the names, and in the places, of other libraries.

flash_attn     flash-attn's functions of sequences; that of caches is a call of its own: kvcache, in the room above
flash_mla      FlashMLA's functions
torch_switch   torch's own attention, replaced
transformers   an implementation of attention for transformers' models, with its masks
mla_layer      DeepSeek's layers of transformers, decoded in their latents
diffusers      a backend of attention for diffusers
engines        the names by which vLLM and SGLang find their backends
vllm_backend   vLLM's, of classes that vLLM has
sglang_backend SGLang's
flex           torch's flex_attention: masks and scores as functions, expressions by flex_trace and flex_tree
fallback       where kernels refuse, somebody else's go on, and say so
"""
