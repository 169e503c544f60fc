"""Official kernels without a GPU: torch's operators take our arguments, and what is missing or refused is said."""

import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashladder.common.errors import ConfigError, DeviceError
from flashladder.common.measure import baselines
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem

GROUPED = Problem(num_heads=4, num_heads_k=2, seqlen_q=64)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.parametrize("name", ["fa2", "cudnn", "math"])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_takes_the_arguments(on_hopper, name, causal):
    """Meta tensors go through the operator's schema and shapes, and compute nothing."""
    problem = Problem(batch=2, num_heads=4, seqlen_q=64, causal=causal, softmax_scale=0.3)
    output = baselines.find(name, "forward").prepare(problem, make_inputs(problem, "meta"))()
    assert output.o.shape == (2, 64, 4, 128)
    assert output.lse is None if name == "math" else output.lse.shape == (2, 4, 64)


def test_the_version_of_kernels_that_were_taken_out_of_a_wheel(monkeypatch):
    """They have no metadata. Their module may say whose they are."""
    baseline = replace(baselines.find("fa3", "forward"), package="no_such_package")
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, baseline.module, module)
    assert baseline.version == "unknown"
    module.__version__ = "vllm-0.24.0"
    assert baseline.version == "vllm-0.24.0"


BOUNDED = {
    "left": ({"window_left": 9}, (9, None)),
    "left, causal": ({"window_left": 9, "causal": True}, (9, None)),
    "both": ({"window_left": 9, "window_right": 0}, (9, 0)),
    "right": ({"window_right": 63}, (None, 63)),
    "as long as all keys": ({"window_left": 64, "window_right": 2**40}, (None, None)),
}


@pytest.mark.parametrize(("bounds", "sides"), BOUNDED.values(), ids=BOUNDED)
def test_torch_is_told_of_windows(on_hopper, bounds, sides):
    problem = Problem(batch=2, num_heads=4, seqlen_q=64, softmax_scale=0.3, **bounds)
    with Told() as told:
        output = baselines.find("fa2", "forward").prepare(problem, make_inputs(problem, "meta"))()
    assert output.o.shape == (2, 64, 4, 128)
    assert output.lse.shape == (2, 4, 64)
    ((causal, options),) = told.calls
    assert causal is problem.causal
    given = dict(zip(("window_size_left", "window_size_right"), sides, strict=True))
    assert options == {"scale": 0.3} | {name: side for name, side in given.items() if side is not None}


class Told(TorchDispatchMode):
    """What the operator beneath is told."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._flash_attention_forward.default:
            self.calls.append((args[8], kwargs))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("gives_lse", [True, False])
def test_flash_attention_3_may_give_o_alone(on_hopper, monkeypatch, gives_lse):
    def flash_attn_func(q, k, v, **_):
        return (v, q[..., 0]) if gives_lse else v

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    problem = Problem(seqlen_q=64, batch=1)  # a tensor of one sequence can be unpacked, too
    tensors = make_inputs(problem, "meta")
    output = baselines.find("fa3", "forward").prepare(problem, tensors)()
    assert output.o is tensors.v
    assert (output.lse is None) != gives_lse


@pytest.mark.parametrize(("name", "everything"), [("flash-attn", -1), ("fa3", -1), ("fa4", None)])
@pytest.mark.parametrize(("bounds", "sides"), BOUNDED.values(), ids=BOUNDED)
def test_flash_attn_is_told_of_bounds(on_hopper, monkeypatch, name, everything, bounds, sides):
    """And of none that is not asked for: early releases take no softcap."""
    told = []

    def flash_attn_func(q, k, v, softmax_scale, causal, **options):
        told.append({name: options[name] for name in ("window_size", "softcap") if name in options})
        return q, None

    baseline = baselines.find(name, "forward")
    monkeypatch.setattr(type(baseline), "_import", lambda _: SimpleNamespace(flash_attn_func=flash_attn_func))
    window = {"window_size": tuple(everything if side is None else side for side in sides)}
    for problem in (Problem(seqlen_q=64, **bounds), Problem(seqlen_q=64, softcap=3.0, **bounds), Problem(softcap=3.0)):
        baseline.prepare(problem, make_inputs(problem, "meta"))()
    baseline.prepare(GROUPED, make_inputs(GROUPED, "meta"))()
    assert told == [window, {**window, "softcap": 3.0}, {"softcap": 3.0}, {}]


@pytest.mark.parametrize(
    ("name", "problem", "message"),
    [
        ("cudnn", Problem(seqlen_q=64, seqlen_k=128, causal=True), "no causal mask with seqlen_q != seqlen_k"),
        ("math", Problem(batch=4, num_heads=16, seqlen_q=8192), "would need 16 GiB for S"),
        ("flashinfer", Problem(layout="padded"), "takes contiguous tensors"),
        ("xformers", GROUPED, "takes no grouped queries"),
        ("fa2", Problem(head_dim=100), "takes no head_dim of 100"),
        ("fa2", GROUPED, None),
        ("fa2", Problem(window_left=9), None),
        ("fa2", Problem(window_left=9, softcap=3.0), "(torch) is asked for no softcap here"),
        ("cudnn", Problem(window_right=0), "cuDNN (torch) is asked for no sliding window here"),
        ("cudnn", Problem(window_left=9, softcap=3.0), "is asked for no sliding window and no softcap here"),
        ("flash-attn", Problem(window_left=9, softcap=3.0), None),
        ("flash-attn", Problem(window_left=9, alibi=True), "FlashAttention-2 is asked for no ALiBi here"),
        ("fa3", Problem(window_left=9, softcap=3.0), None),
        ("fa4", Problem(window_left=9, softcap=3.0), None),
    ],
)
def test_refusals(on_hopper, name, problem, message):
    refusal = baselines.find(name, "forward").refusal(problem)
    assert refusal is None if message is None else message in refusal


def decode(lengths=(3, 130, 64), options=(), **values):
    usual = {"num_heads": 4, "num_heads_k": 2, "seqlen_q": 1, "head_dim": 64, "seqlens_k": lengths, "seqlen_k": 192}
    return Problem(operation="decode", options=options, **(usual | values))


PAGED = {"paged": True, "page_size": 16}


class PlannedDecode:
    """FlashInfer's wrapper, by the textbook: what its plan says decides which keys are read."""

    def __init__(self, workspace, kv_layout, use_tensor_cores):
        assert (workspace.dtype, kv_layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(self, indptr, indices, last_page_len, *sizes, **options):
        assert {tensor.dtype for tensor in (indptr, indices, last_page_len)} == {torch.int32}
        self.pages = [indices[begin:end].long() for begin, end in pairwise(indptr)]
        self.last, self.sizes, self.options = last_page_len.tolist(), sizes, options

    def run(self, q, caches):
        group, size = self.sizes[0] // self.sizes[1], self.sizes[3]
        rows = []
        for row, pages, last in zip(q, self.pages, self.last, strict=True):
            keys = (len(pages) - 1) * size + last
            k, v = (cache[pages].flatten(0, 1)[:keys].repeat_interleave(group, 1).double() for cache in caches)
            weights = torch.einsum("hd,khd->hk", row.double(), k).mul(self.options["sm_scale"]).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, v))
        return torch.stack(rows).to(q.dtype)


@pytest.mark.parametrize("options", [{}, PAGED], ids=["in one piece", "pages"])
def test_flashinfer_is_told_which_pages_to_read(on_hopper, monkeypatch, options):
    problem = decode(options=options, softmax_scale=0.3)
    tensors, baseline = make_inputs(problem), baselines.find("flashinfer", "decode")
    fake = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=PlannedDecode)
    monkeypatch.setattr(type(baseline), "_import", lambda _: fake)
    tensors.o.copy_(baseline.prepare(problem, tensors)().o)
    verify(expect(problem, tensors), {"o": tensors.o}).require("the fake FlashInfer")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (decode(), None),
        (decode(seqlen_q=2), "FlashInfer reads one row a sequence, not 2"),
        (decode(seqlen_k=150), "pages of 64 keys; seqlen_k=150 is no multiple"),
        (decode(seqlen_k=150, options=PAGED), None),
        (decode(layout="padded"), "takes contiguous tensors, not the layout padded"),
        (decode(head_dim=96), "takes head_dim 64, 128, 256, not 96"),
        (decode((0, 3)), "takes no empty sequence"),
    ],
)
def test_what_flashinfer_does_not_decode(on_hopper, problem, message):
    refusal = baselines.find("flashinfer", "decode").refusal(problem)
    assert refusal is None if message is None else message in refusal


@pytest.mark.parametrize("name", baselines.of("decode"))
def test_nobody_is_given_a_cache_in_8_bits(on_hopper, name):
    problem = decode((192, 192), {"fp8_cache": True})
    assert "is asked for no 8-bit caches here" in baselines.find(name, "decode").refusal(problem)


@pytest.mark.parametrize(
    ("missing", "problem", "message"),
    [
        ((), Problem(dtype="fp16", head_dim=256), None),
        (("FP16",), Problem(dtype="fp16"), "was built without fp16"),
        (("FP16", "HDIM192", "HDIM256"), Problem(head_dim=128), None),
        (("HDIM96",), Problem(head_dim=96), "was built without head_dim 96"),
        (("HDIM64",), Problem(head_dim=40), "was built without head_dim 64"),
        (("HDIM192", "HDIM256"), Problem(head_dim=136), "was built without head_dim 192"),
        (("LOCAL", "SOFTCAP"), Problem(), None),
        (("LOCAL",), Problem(window_left=9), "was built without sliding windows"),
        (("SOFTCAP",), Problem(softcap=3.0), "was built without softcaps"),
        (("SOFTCAP",), Problem(window_left=9), None),
        (("VARLEN",), Problem(), None),
        ((), Problem(head_dim=512), "takes no head_dim of 512"),
        ((), Problem(num_heads=72, sinks=True), "takes sinks of up to 64 heads"),
        ((), Problem(head_dim=192, head_dim_v=128, sinks=True), "where V has as many columns as K"),
    ],
)
def test_a_flash_attention_3_built_without_a_kernel_is_not_asked_for_it(
    on_hopper, monkeypatch, missing, problem, message
):
    """It would end the process, or take the slower one for wider heads."""
    built = SimpleNamespace(CONFIG={"build_flags": {f"FLASHATTENTION_DISABLE_{name}": True for name in missing}})
    monkeypatch.setitem(sys.modules, "flash_attn_config", built)
    refusal = baselines.find("fa3", "forward").refusal(problem)
    assert refusal is None if message is None else message in refusal


def test_an_arch_without_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert baselines.find("fa3", "forward").refusal(GROUPED) == "FlashAttention-3 has no kernel for sm_80"


def test_a_missing_package_is_named_with_its_install_line(on_hopper):
    with pytest.raises(DeviceError, match=r"xformers: xformers.ops cannot be imported .*: pip install xformers"):
        baselines.find("xformers", "forward").prepare(GROUPED, make_inputs(GROUPED, "meta"))


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"no baseline fa5; did you mean fa4\? There are fa2, cudnn, math"):
        baselines.find("fa5", "forward")


class PlannedRows(PlannedDecode):
    """FlashInfer's wrapper for rows of many sequences, of which each is told apart by where they begin."""

    def __init__(self, workspace, kv_layout):
        super().__init__(workspace, kv_layout, use_tensor_cores=True)

    def plan(self, starts, *cache, causal, **options):
        super().plan(*cache, **options)
        self.starts, self.causal = starts.tolist(), causal

    def run(self, q, caches):
        pages, last, found = self.pages, self.last, []
        for (begin, end), *of_sequence in zip(pairwise(self.starts), pages, last, strict=True):
            for row in range(begin, end):
                seen = (len(of_sequence[0]) - 1) * self.sizes[3] + of_sequence[1] - (end - 1 - row) * self.causal
                self.pages, self.last = [of_sequence[0]], [seen - (len(of_sequence[0]) - 1) * self.sizes[3]]
                found.append(super().run(q[row : row + 1], caches))
        return torch.cat(found)


def test_flashinfer_is_told_where_rows_begin(on_hopper, monkeypatch):
    problem = decode((90, 70), {**PAGED, "packed_q": True}, seqlens_q=(3, 2), causal=True)
    tensors, baseline = make_inputs(problem), baselines.find("flashinfer", "decode")
    fake = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PlannedRows)
    monkeypatch.setattr(type(baseline), "_import", lambda _: fake)
    tensors.o.copy_(baseline.prepare(problem, tensors)().o)
    verify(expect(problem, tensors), {"o": tensors.o}).require("the fake FlashInfer")


def test_a_build_for_lengths_alone_is_told_of_a_cache(on_hopper, monkeypatch):
    def fwd(q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table, **options):
        assert (cu_seqlens_q.tolist(), max_seqlen_q, max_seqlen_k) == ([0, 1, 2], 1, 192)
        assert (options["num_splits"], options["causal"], block_table) == (0, False, None)
        return q + 1, None

    problem = decode((192, 100))
    tensors, baseline = make_inputs(problem), baselines.find("fa3", "decode")
    monkeypatch.setattr(type(baseline), "_import", lambda _: SimpleNamespace(fwd=fwd))
    assert torch.equal(baseline.prepare(problem, tensors)().o, tensors.q + 1)


ROWS = decode(seqlens_q=(5, 0, 1), options={**PAGED, "packed_q": True})


@pytest.mark.parametrize("name", baselines.of("decode"))
def test_two_libraries_are_given_rows_of_many_sequences(on_hopper, name):
    refusal = baselines.find(name, "decode").refusal(ROWS)
    if name in ("fa3", "flashinfer"):
        assert refusal is None
    else:
        assert "is asked for no rows that lie one behind the other" in refusal


def test_it_is_told_where_rows_begin(on_hopper, monkeypatch):
    def with_kvcache(q, k, v, *, cache_seqlens, cu_seqlens_q, max_seqlen_q, page_table, **options):
        assert (cu_seqlens_q.tolist(), max_seqlen_q, options["num_splits"]) == ([0, 5, 5, 6], 5, 0)
        return q + 1

    tensors, baseline = make_inputs(ROWS), baselines.find("fa3", "decode")
    monkeypatch.setattr(type(baseline), "_import", lambda _: SimpleNamespace(flash_attn_with_kvcache=with_kvcache))
    assert torch.equal(baseline.prepare(ROWS, tensors)().o, tensors.q + 1)
