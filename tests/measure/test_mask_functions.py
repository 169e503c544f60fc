"""Masks by expressions as other people's kernels take them."""

import sys
from types import SimpleNamespace

import pytest
import torch

from flashladder.common.expression import Mods
from flashladder.common.measure import baselines
from flashladder.common.measure.baselines import mask_functions
from flashladder.common.measure.cells import cells
from flashladder.common.problem import modified
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem

TORCH = {"sqrt": torch.sqrt, "whole": torch.Tensor.int, "real": torch.Tensor.float}
MASKS = sorted({cell.problem.mods for cell in cells("forward", ["masks"])})


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.parametrize(
    "mask", [*MASKS, "mask=!(q%3<k/2)||~k<-9", "mask=h==1&&float(k)<5.5", "mask=b==k-q"], ids=lambda mask: mask[5:]
)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_expression(mask, causal):
    problem = Problem(batch=2, num_heads=2, seqlen_q=40, seqlen_k=64, mods=mask, causal=causal)
    assert mask_functions.refusal(problem) is None
    visible = mask_functions.function(problem, TORCH)
    b, h, q, k = (torch.arange(count) for count in (2, 2, 40, 64))
    found = visible(b[:, None, None, None], h[:, None, None], q[:, None], k).expand(2, 2, 40, 64)
    scores, lengths = torch.zeros(2, 40, 64), (40, 64)
    within = (k <= q[:, None] + 24) if causal else torch.ones(40, 64, dtype=torch.bool)
    for sequence in range(2):
        shown = modified.modified(Mods.parse(mask), {}, scores, sequence, 0, lengths, within)
        assert torch.equal(found[sequence], (shown > -torch.inf) & within)
    assert mask_functions.sizes(problem) == (2 if "b=" in mask else None, 2 if "h=" in mask else None)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mods": "score=s*2.0"}, "no score"),
        ({"mods": "far:int32;mask=q-k<far", "extents": ((),)}, "no mask that reads tensors"),
        ({"mods": "mask=exp(k)>2.0"}, "operators and sqrt, int, float alone"),
        ({"mods": "mask=q>3?k<9:k>9"}, "operators and sqrt, int, float alone"),
        ({"mods": "mask=k<=q", "window_left": 9}, "no window beside a mask"),
    ],
)
def test_refusals(values, reason):
    assert reason in mask_functions.refusal(Problem(seqlen_q=64, **values))


@pytest.mark.parametrize("name", ["fa4", "flex"])
def test_a_score_is_refused(on_hopper, name):
    refused = baselines.find(name, "forward").refusal(Problem(seqlen_q=64, mods="score=s*2.0"))
    assert refused.endswith("is given no score, and no mask that reads tensors, here")


def test_others_are_given_no_mask(on_hopper):
    refused = baselines.find("fa2", "forward").refusal(Problem(seqlen_q=64, mods="mask=k<=q"))
    assert refused == "FlashAttention-2 (torch) is asked for no expressions here"


def test_flex_attention_has_a_block_mask(on_hopper, monkeypatch):
    problem = Problem(seqlen_q=256, seqlen_k=256, mods="mask=k<=q||4*k<seqlen_k")
    told = {}
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: lambda q, *_, block_mask, **__: told.update(m=block_mask) or q
    )
    baselines.find("flex", "forward").prepare(problem, make_inputs(problem))()
    assert told["m"].shape == (1, 1, 256, 256)
    q, k = torch.arange(256)[:, None], torch.arange(256)
    assert torch.equal(told["m"].mask_mod(0, 0, q, k), (k <= q) | (k < 64))


@pytest.fixture
def words_of_4(monkeypatch):
    """The packages whose functions its masks are written in."""
    cute = SimpleNamespace(math=SimpleNamespace(sqrt=torch.sqrt))
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(Int32=torch.int32, Float32=torch.float32, cute=cute))
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)


def test_flash_attention_4_has_a_function_and_lists(on_hopper, words_of_4, monkeypatch):
    problem = Problem(num_heads=4, seqlen_q=64, mods="mask=k<=q&&h<2", causal=True)
    told, listed = {}, []

    def flash_attn_func(q, *_, **options):
        told.update(options)
        return q, None

    lists = SimpleNamespace(compute_block_sparsity=lambda *given: listed.append(given) or "lists")
    monkeypatch.setitem(sys.modules, "flash_attn.cute.compute_block_sparsity", lists)
    baseline = baselines.find("fa4", "forward")
    monkeypatch.setattr(type(baseline), "_import", lambda _: SimpleNamespace(flash_attn_func=flash_attn_func))
    baseline.prepare(problem, make_inputs(problem, "meta"))()
    assert (told["causal"], told["block_sparse_tensors"]) == (False, "lists")
    ((*sizes, mask, _, device),) = listed
    assert sizes == [128, 128, 1, 4, 64, 64]
    assert device.type == "meta"
    assert mask is told["mask_mod"]
    assert mask.__cute_hash__ == "lambda b, h, q, k, *_: (k <= q) & ((k <= q) & (h < 2))"


OF_GRADIENTS = {"operation": "backward", "num_heads": 4, "num_heads_k": 2, "seqlen_q": 200, "seqlen_k": 256}


def test_flex_attentions_backward_pass_runs_alone(on_hopper, monkeypatch):
    """Twice, and without its forward pass."""
    problem = Problem(**OF_GRADIENTS, head_dim=64, softmax_scale=0.2, mods="mask=k<=q||4*k<seqlen_k")
    forward_passes = []

    def by_textbook(q, k, v, *, block_mask, scale, enable_gqa):
        assert enable_gqa
        forward_passes.append(block_mask.shape)
        hidden = ~block_mask.mask_mod(0, 0, torch.arange(200)[:, None], torch.arange(256))
        q, k, v = q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v))
        return ((scale * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v).to(torch.bfloat16)

    monkeypatch.setattr(torch, "compile", lambda *_, **__: by_textbook)
    tensors = make_inputs(problem)
    run = baselines.find("flex", "backward").prepare(problem, tensors)
    for _ in range(2):
        verify(expect(problem, tensors), run()._asdict()).require("flex")
    assert forward_passes == [(1, 1, 200, 256)]


def test_flash_attention_4s_backward_pass_has_the_rows_of_each_block_of_keys(on_hopper, words_of_4, monkeypatch):
    problem, told = Problem(**OF_GRADIENTS | {"seqlen_q": 256}, mods="mask=k<=q&&k<128"), {}

    def flash_attn_bwd(q, k, v, *_, **options):
        told.update(options)
        return q, k, v

    lists = SimpleNamespace(BlockSparseTensorsTorch=lambda *given, block_size: (given, block_size))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", lists)
    baseline = baselines.find("fa4", "backward")
    module = SimpleNamespace(_flash_attn_bwd=flash_attn_bwd)
    usual = type(baseline)._import
    monkeypatch.setattr(type(baseline), "_import", lambda each: module if each.name == "fa4" else usual(each))
    baseline.prepare(problem, make_inputs(problem))()
    (in_part, which, whole, which_whole), block_size = told["block_sparse_tensors"]
    assert (told["causal"], block_size) == (False, (128, 128))
    # The first 128 rows see the first 128 keys in part, and the others see them whole.
    assert (in_part.tolist(), whole.tolist()) == ([[[1, 0]]], [[[1, 0]]])
    assert (int(which[0, 0, 0, 0]), int(which_whole[0, 0, 0, 0])) == (0, 1)


def test_no_order_is_asked_for_beside_a_mask(on_hopper):
    problem = Problem(**OF_GRADIENTS, mods="mask=k<=q", options={"deterministic": True})
    for name in ("fa4", "flex"):
        assert "the same bits each time" in baselines.find(name, "backward").refusal(problem)
