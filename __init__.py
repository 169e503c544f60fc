"""FlashLadder: a laboratory for attention kernels. See README.md."""

__version__ = "0.1.0"  # setup.py reads it
TYPE_CHECKING = False  # type checkers take it for True; typing has one too, which takes milliseconds to import

_API = "flashladder.common.api"
_FRONTENDS = f"{_API}.frontends"
_PUBLIC = {  # what models call, and the module that has it
    "LatentCache": f"{_FRONTENDS}.mla_layer",
    "absorb": f"{_FRONTENDS}.mla_layer",
    "attention": _API,
    "check_mask": f"{_API}.mask_check",
    "decode_blocks": f"{_API}.cache_blocks",
    "dropout_mask": f"{_API}.dropout",
    "forward": f"{_API}.timed",
    "reshape_and_cache": f"{_API}.slots",
    "tree_mask": f"{_API}.tree",
    "forward_timed": f"{_API}.timed",
    "masks": _API,
    "merge_states": f"{_API}.merge",
    "ring_attention": f"{_API}.ring",
    "zigzag_split": f"{_API}.ring",
    "zigzag_join": f"{_API}.ring",
    "packed_attention": f"{_API}.packed",
    "register_with_diffusers": f"{_FRONTENDS}.diffusers",
    "register_with_sglang": f"{_FRONTENDS}.engines",
    "register_with_torch": f"{_FRONTENDS}.torch_switch",
    "register_with_transformers": f"{_FRONTENDS}.transformers",
    "register_with_vllm": f"{_FRONTENDS}.engines",
    "create_block_mask": f"{_FRONTENDS}.flex",
    "flex_attention": f"{_FRONTENDS}.flex",
    "flash_attn_func": f"{_FRONTENDS}.flash_attn",
    "flash_attn_with_kvcache": f"{_API}.kvcache",
    "concat_and_cache_mla": f"{_FRONTENDS}.flash_mla",
    "flash_mla_with_kvcache": f"{_FRONTENDS}.flash_mla",
    "get_mla_metadata": f"{_FRONTENDS}.flash_mla",
    "flash_attn_kvpacked_func": f"{_FRONTENDS}.flash_attn",
    "flash_attn_qkvpacked_func": f"{_FRONTENDS}.flash_attn",
    "flash_attn_varlen_func": f"{_FRONTENDS}.flash_attn",
    "flash_attn_varlen_kvpacked_func": f"{_FRONTENDS}.flash_attn",
    "flash_attn_varlen_qkvpacked_func": f"{_FRONTENDS}.flash_attn",
}

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from flashladder.common.api import attention as attention
    from flashladder.common.api import masks as masks
    from flashladder.common.api.cache_blocks import decode_blocks as decode_blocks
    from flashladder.common.api.dropout import dropout_mask as dropout_mask
    from flashladder.common.api.frontends.diffusers import register_with_diffusers as register_with_diffusers
    from flashladder.common.api.frontends.engines import register_with_sglang as register_with_sglang
    from flashladder.common.api.frontends.engines import register_with_vllm as register_with_vllm
    from flashladder.common.api.frontends.flash_attn import flash_attn_func as flash_attn_func
    from flashladder.common.api.frontends.flash_attn import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from flashladder.common.api.frontends.flash_attn import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from flashladder.common.api.frontends.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
    from flashladder.common.api.frontends.flash_attn import (
        flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func,
    )
    from flashladder.common.api.frontends.flash_attn import (
        flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
    )
    from flashladder.common.api.frontends.flash_mla import concat_and_cache_mla as concat_and_cache_mla
    from flashladder.common.api.frontends.flash_mla import flash_mla_with_kvcache as flash_mla_with_kvcache
    from flashladder.common.api.frontends.flash_mla import get_mla_metadata as get_mla_metadata
    from flashladder.common.api.frontends.flex import create_block_mask as create_block_mask
    from flashladder.common.api.frontends.flex import flex_attention as flex_attention
    from flashladder.common.api.frontends.mla_layer import LatentCache as LatentCache
    from flashladder.common.api.frontends.mla_layer import absorb as absorb
    from flashladder.common.api.frontends.torch_switch import register_with_torch as register_with_torch
    from flashladder.common.api.frontends.transformers import register_with_transformers as register_with_transformers
    from flashladder.common.api.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
    from flashladder.common.api.mask_check import check_mask as check_mask
    from flashladder.common.api.merge import merge_states as merge_states
    from flashladder.common.api.packed import packed_attention as packed_attention
    from flashladder.common.api.ring import ring_attention as ring_attention
    from flashladder.common.api.ring import zigzag_join as zigzag_join
    from flashladder.common.api.ring import zigzag_split as zigzag_split
    from flashladder.common.api.slots import reshape_and_cache as reshape_and_cache
    from flashladder.common.api.timed import forward as forward
    from flashladder.common.api.timed import forward_timed as forward_timed
    from flashladder.common.api.tree import tree_mask as tree_mask
else:
    from flashladder.common import lazy

    __all__ = list(_PUBLIC)
    __getattr__ = lazy.importer(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
