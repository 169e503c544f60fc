"""vLLM's and SGLang's attention by our backends, against the files of their published wheels (engine_files.py).

`make test-public` runs this, and downloads the wheels the first time. The engines themselves are not run.
"""

import importlib.metadata
import itertools
import runpy
import sys
from types import SimpleNamespace

import pytest
import setuptools
import torch
from engine_files import importable
from engine_step import COLUMNS, HEADS, HEADS_K, KEYS, PAGE, PAGES, ROOM, SCALE, SCORES, Step, normal, require_close

import flashladder
from flashladder.common.errors import ToolchainError, UnsupportedProblemError
from flashladder.common.paths import ROOT
from flashladder.common.problem.fp8 import FP8

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the engines' files need Python 3.11")


@pytest.fixture(params=[torch.bfloat16, FP8], ids=["bf16", "e4m3"])
def dtype(request):
    return request.param


@pytest.fixture
def entry_points(monkeypatch):
    """Those of setup.py, as an installation would have them."""
    said = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: said.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    found = [
        importlib.metadata.EntryPoint(*entry.split("="), group)
        for group, entries in said["entry_points"].items()
        for entry in entries
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints(found).select(group=group)
    )


# -- vLLM


@pytest.fixture
def vllm():
    with importable("vllm"):
        flashladder.register_with_vllm()
        from flashladder.common.api.frontends import vllm_backend

        yield vllm_backend


def test_vllm_finds_the_backend(entry_points):
    with importable("vllm"):
        from vllm import plugins
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        for _ in range(2):  # it may come twice
            plugins.plugins_loaded = False
            plugins.load_general_plugins()
        backend = AttentionBackendEnum["FLASHLADDER"].get_class()
        assert AttentionBackendEnum[backend.get_name()].get_class() is backend


TAKEN = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": True,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": True,
    "device_capability": SimpleNamespace(major=9, minor=0),
    "attn_type": "decoder",
    "has_sliding_window": True,
    "use_batch_invariant": True,
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"kv_cache_dtype": "fp8", "head_size": 80, "block_size": 64}, None),
        ({"head_size": 264}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8", "head_size": 72}, "head_size=72 with kv_cache_dtype=fp8, which takes multiples"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"block_size": 24}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"device_capability": SimpleNamespace(major=8, minor=0)}, "compute capability not supported"),
    ],
)
def test_vllm_names_what_the_backend_does_not_take(vllm, changed, reason):
    reasons = vllm.LadderBackend.validate_configuration(**{**TAKEN, **changed})
    assert [said[: len(reason)] for said in reasons] == [reason] if reason else not reasons


def vllms_cache(layout, dtype):
    """A layer of a cache of two, which lie as the layout says: (pages, heads, keys, 2 * columns)."""
    shape, order = (2, PAGES, HEADS_K, PAGE, 2 * COLUMNS), layout.stride_order
    cache = torch.zeros([shape[axis] for axis in order], dtype=dtype).permute(*(order.index(i) for i in range(5)))
    return cache[1]


def of_vllm(backend, step, kv_cache, padding=0, scale=SCALE, **options):
    """O of a step, as vLLM's layer calls the backend: keys first, then attention, with rows that pad a CUDA graph."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    def padded(x):
        return torch.cat((x, x.new_zeros(padding, *x.shape[1:])))

    implementation = backend.get_impl_cls()(HEADS, COLUMNS, SCORES, HEADS_K, **options)
    slots = torch.cat((step.slots_of(step.new), torch.full((padding,), -1)))
    metadata = CommonAttentionMetadata(
        query_start_loc=torch.cat((step.starts, step.starts[-1:].expand(padding))),
        query_start_loc_cpu=step.starts,
        seq_lens=padded(step.lengths),
        num_reqs=len(KEYS) + padding,
        num_actual_tokens=sum(step.rows) + padding,
        max_query_len=max(step.rows),
        max_seq_len=ROOM,
        block_table_tensor=padded(step.table),
        slot_mapping=slots,
    )
    made = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, metadata)
    layer = SimpleNamespace(_k_scale=torch.tensor(scale), _v_scale=torch.tensor(scale))
    q, k, v = padded(step.q), padded(step.k[step.new]), padded(step.v[step.new])
    implementation.do_kv_cache_update(layer, k, v, kv_cache, slots)
    output = torch.full_like(q, torch.nan)
    assert implementation.forward(layer, q, k, v, kv_cache, made, output) is output
    assert not output[sum(step.rows) :].any()
    return output[: sum(step.rows)]


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BHLNC"])
def test_a_step_of_vllm(vllm, name, dtype):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    step = Step()
    cache = vllms_cache(KVCacheLayout[name], dtype if dtype == torch.bfloat16 else torch.uint8)
    step.fill(*cache.view(dtype).transpose(1, 2).split(COLUMNS, -1))
    options = {"kv_cache_dtype": "auto" if dtype == torch.bfloat16 else "fp8"}
    require_close(of_vllm(vllm.LadderBackend, step, cache, padding=2, **options), step.output(dtype))


def test_options_of_vllm(vllm):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    step, sinks, cache = Step(), normal(HEADS, seed=3), vllms_cache(KVCacheLayout.LBHNC, torch.bfloat16)
    step.fill(*cache.transpose(1, 2).split(COLUMNS, -1))
    found = of_vllm(vllm.LadderBackend, step, cache, sliding_window=9, logits_soft_cap=2.0, sinks=sinks)
    require_close(found, step.output(torch.bfloat16, window=8, softcap=2.0, sinks=sinks))


def test_alibi_in_vllm(vllm):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    step, slopes, cache = Step(), [0.5, 0.25, 0.1, 0.01], vllms_cache(KVCacheLayout.LBHNC, torch.bfloat16)
    step.fill(*cache.transpose(1, 2).split(COLUMNS, -1))
    found = of_vllm(vllm.LadderBackend, step, cache, alibi_slopes=slopes)
    require_close(found, step.output(torch.bfloat16, slopes=slopes))


@pytest.mark.parametrize("asked", [False, True])
def test_batch_invariance_in_vllm_is_keys_in_one_part(vllm, asked, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(asked)))
    assert vllm.LadderImpl(HEADS, COLUMNS, 1.0).options["num_splits"] == asked


def test_scales_of_heads_in_vllm(vllm):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    step, cache = Step(), vllms_cache(KVCacheLayout.LBHNC, torch.uint8)
    step.fill(*cache.view(FP8).transpose(1, 2).split(COLUMNS, -1))
    found = of_vllm(vllm.LadderBackend, step, cache, scale=[SCALE, SCALE], kv_cache_dtype="fp8_e4m3")
    require_close(found, step.output(FP8))


def test_what_vllm_would_ask_in_vain(vllm):
    with pytest.raises(UnsupportedProblemError, match="attn_type=encoder"):
        vllm.LadderImpl(HEADS, COLUMNS, 1.0, attn_type="encoder")
    builder, implementation = vllm.LadderBuilder(None, [], None, None), vllm.LadderImpl(HEADS, COLUMNS, 1.0)
    with pytest.raises(UnsupportedProblemError, match="causal=False"):
        builder.build(0, SimpleNamespace(causal=False))
    with pytest.raises(UnsupportedProblemError, match="output_scale"):
        implementation.forward(*[None] * 7, output_scale=torch.ones(1))
    assert not implementation.forward(*[None] * 6, torch.ones(3)).any()  # vLLM measures memory


def test_tables_of_vllm_are_replaced(vllm):
    builder = vllm.LadderBuilder(None, [], None, None)
    assert builder.supports_update_block_table
    metadata, table = vllm.LadderMetadata(3, 3, *[torch.zeros(1)] * 3), torch.ones(1, 1)
    assert builder.update_block_table(metadata, table, None).block_table is table


# -- SGLang


@pytest.fixture
def sglang():
    with importable("sglang"):
        flashladder.register_with_sglang()
        from flashladder.common.api.frontends import sglang_backend

        yield sglang_backend


def test_sglang_finds_the_backend(entry_points):
    with importable("sglang"):
        from sglang.srt import plugins
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        for _ in range(2):
            plugins._plugins_loaded = False
            plugins.load_plugins()
        assert ATTENTION_BACKEND_CHOICES.count("flashladder") == 1
        assert (
            ATTENTION_BACKENDS["flashladder"](runner(Step(), torch.bfloat16)).get_cuda_graph_seq_len_fill_value() == 1
        )


class MHATokenToKVPool:
    """A stand-in for SGLang's, which needs Triton: a layer's keys, (tokens, heads, columns)."""

    start_layer = 0

    def __init__(self, step, dtype):
        self.kv = torch.zeros(2, PAGES * PAGE, HEADS_K, COLUMNS, dtype=dtype)
        step.fill(*self.kv.view(2, PAGES, PAGE, HEADS_K, COLUMNS))

    def get_key_buffer(self, layer):
        return self.kv[0]

    def get_kv_buffer(self, layer):
        return self.kv.unbind()


def runner(step, dtype, page_size=PAGE, **changed):
    """What a backend asks of SGLang's ModelRunner."""
    tokens = torch.full((9, ROOM), 10**9, dtype=torch.int32)
    for request, (first, last) in enumerate(itertools.pairwise(step.ends)):
        tokens[2 * request, : last - first] = torch.tensor(step.slots[first:last])
    asked = {
        "token_to_kv_pool": MHATokenToKVPool(step, dtype),
        "page_size": page_size,
        "req_to_token_pool": SimpleNamespace(req_to_token=tokens),
        "spec_algorithm": SimpleNamespace(is_speculative=lambda: False),
        "use_mla_backend": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "kv_cache_dtype": dtype,
    }
    return SimpleNamespace(**{**asked, **changed})


def layer_of(dtype, **options):
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = RadixAttention(HEADS, COLUMNS, SCORES, HEADS_K, layer_id=0, **options)
    if dtype == FP8:
        layer.k_scale = layer.v_scale = torch.tensor(SCALE)
    return layer


def of_sglang(backend, step, layer, is_decode=False, **arguments):
    """O of a step, as SGLang's model runner and layer call the backend."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.MIXED,
        req_pool_indices=2 * torch.arange(len(KEYS)),
        seq_lens=step.lengths.long(),
        extend_seq_lens=torch.tensor(step.rows, dtype=torch.int32),
        out_cache_loc=step.slots_of(step.new),
    )
    backend.init_forward_metadata(batch)
    k, v = step.k[step.new], step.v[step.new]
    return backend.forward(step.q.flatten(1), k, v, layer, batch, **arguments).unflatten(-1, (HEADS, -1))


@pytest.mark.parametrize("page_size", [PAGE, 1])
def test_a_step_of_sglang(sglang, page_size, dtype):
    step = Step()
    backend = sglang.LadderBackend(runner(step, dtype, page_size))
    require_close(of_sglang(backend, step, layer_of(dtype)), step.output(dtype))


def test_tokens_alone_in_sglang(sglang):
    step = Step(new=(1,) * len(KEYS))
    backend = sglang.LadderBackend(runner(step, torch.bfloat16))
    require_close(of_sglang(backend, step, layer_of(torch.bfloat16), is_decode=True), step.output(torch.bfloat16))


def test_options_of_sglang(sglang):
    step, sinks = Step(), normal(HEADS, seed=3)
    backend = sglang.LadderBackend(runner(step, torch.bfloat16))
    found = of_sglang(
        backend, step, layer_of(torch.bfloat16, logit_cap=2.0, sliding_window_size=8), sinks=sinks, return_lse=False
    )
    require_close(found, step.output(torch.bfloat16, window=8, softcap=2.0, sinks=sinks))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"spec_algorithm": SimpleNamespace(is_speculative=lambda: True)}, "speculative decoding"),
        ({"use_mla_backend": True}, "latent attention"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "cross attention"),
        ({"kv_cache_dtype": torch.float8_e5m2}, r"a cache of torch.float8_e5m2; .* works"),
        ({"token_to_kv_pool": SimpleNamespace()}, "a cache that is a SimpleNamespace; .*--disable-hybrid-swa-memory"),
    ],
)
def test_sglang_hears_what_the_backend_does_not_take(sglang, changed, said):
    with pytest.raises(UnsupportedProblemError, match=f"'flashladder' does not take {said}"):
        sglang.LadderBackend(runner(Step(), torch.bfloat16, **changed))


def test_layers_that_the_backend_refuses(sglang):
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    step = Step()
    backend = sglang.LadderBackend(runner(step, torch.bfloat16))
    for said, options, arguments in (
        ("v_head_dim=32 with head_dim=64", {"v_head_dim": 32}, {}),
        ("attention of type encoder_only", {"attn_type": AttentionType.ENCODER_ONLY}, {}),
        ("attention of type decoder", {"is_cross_attention": True}, {}),
        ("logit_capping_method='soft'", {"logit_cap": 1.0, "logit_capping_method": "soft"}, {}),
        ("k_rope", {}, {"k_rope": step.k}),
    ):
        with pytest.raises(UnsupportedProblemError, match=said):
            of_sglang(backend, step, layer_of(torch.bfloat16, **options), **arguments)
    with pytest.raises(UnsupportedProblemError, match="forward_mode TARGET_VERIFY"):
        backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, req_pool_indices=None))


# -- neither


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_another_release_goes_on_without_the_backend(engine, entry_points, monkeypatch):
    """Whose registry has no such function: it is told, and the entry point raises nothing."""
    with importable(engine):
        if engine == "vllm":
            from vllm import plugins
            from vllm.v1.attention.backends import registry

            monkeypatch.delattr(registry, "register_backend")
            load = plugins.load_general_plugins
        else:
            from sglang.srt import plugins
            from sglang.srt.arg_groups import choices

            monkeypatch.delattr(choices, "add_attention_backend_choices")
            load = plugins.load_plugins
        with pytest.warns(UserWarning, match=f"no attention backend of flashladder: {engine} is missing, or keeps"):
            load()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_missing(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(ToolchainError, match=f"{engine} is missing.*was tried"):
        getattr(flashladder, f"register_with_{engine}")()
