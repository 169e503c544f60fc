"""Others' kernels for MLA, on stand-ins that compute what they are told: both of FlashMLA's conventions, and views."""

from types import SimpleNamespace

import pytest
import torch

from flashladder.common.measure import baselines
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import LSE, Problem

LENGTHS = (70, 130, 64)


def problem(**values):
    options = {"paged": values.pop("paged", True), "page_size": values.pop("page_size", 64)}
    options |= values.pop("options", {})
    usual = {"num_heads": 4, "num_heads_k": 1, "head_dim": 576, "head_dim_v": 512, "seqlen_q": 1}
    return Problem(operation="mla", options=options, **({"seqlens_k": LENGTHS} | usual | values))


def attend(q, k, v, scale):
    """O and LSE of a sequence: q (seqlen_q, heads, columns), k and v (keys, columns)."""
    scores = scale * torch.einsum("qhc,kc->hqk", q.float(), k.float())
    return torch.einsum("hqk,kc->qhc", scores.softmax(-1), v.float()).to(q.dtype), scores.logsumexp(-1)


def attend_all(q, k, v, pages, lengths, scale):
    """The same of all sequences, whose pages are a list each."""
    each = []
    for rows, own, length in zip(q, pages, lengths.tolist(), strict=True):
        keys, values = (cache[own.long(), :, 0].flatten(0, 1)[:length] for cache in (k, v))
        each.append(attend(rows, keys, values, scale))
    return tuple(map(torch.stack, zip(*each, strict=True)))


class FlashMla:
    """One convention has a schedule in tensors. In the other, the first call makes it, and an object keeps it."""

    def __init__(self, lazy):
        self.lazy, self.planned = lazy, 0

    def get_mla_metadata(self, *args):
        if self.lazy:
            return SimpleNamespace(plan=None), None
        lengths, heads, heads_k = args
        assert (len(lengths), heads, heads_k) == (3, 4, 1)
        return "schedule", "splits"

    def flash_mla_with_kvcache(self, q, cache, table, lengths, columns, schedule, splits, softmax_scale, causal):
        if self.lazy and schedule.plan is None:
            assert splits is None
            schedule.plan, self.planned = "made", self.planned + 1
        assert self.lazy or (schedule, splits) == ("schedule", "splits")
        assert not causal
        return attend_all(q, cache, cache[..., :columns], table, lengths, softmax_scale)


def flash_attn_3(packed):
    def with_kvcache(q, k, v, qv, cache_seqlens, page_table, softmax_scale, causal, num_splits):
        assert (causal, num_splits) == (False, 0)
        whole = torch.cat((v, k), -1)
        return attend_all(torch.cat((qv, q), -1), whole, v, page_table, cache_seqlens, softmax_scale)[0]

    def fwd(q, k, v, *, q_v, cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k, **options):
        assert (cu_seqlens_q.tolist(), max_seqlen_q, max_seqlen_k) == ([0, 1, 2, 3], 1, 130)
        one_by_one, one_by_one_v = (tensor.unflatten(0, (3, 1)) for tensor in (q, q_v))
        o = with_kvcache(one_by_one, k, v, one_by_one_v, seqused_k, block_table, **options)
        return o.flatten(0, 1), None

    return SimpleNamespace(fwd=fwd) if packed else SimpleNamespace(flash_attn_with_kvcache=with_kvcache)


class FlashInfer:
    """Its wrapper is told of pages by where those of each sequence begin."""

    def __init__(self, workspace):
        assert workspace.numel() == 128 * 2**20

    def plan(self, rows, first_pages, pages, lengths, heads, latent, rotated, page_size, causal, scale, *dtypes):
        assert (rows.tolist(), heads, latent, rotated, page_size) == ([0, 1, 2, 3], 4, 512, 64, 64)
        self.pages = [pages[a:b] for a, b in zip(first_pages[:-1].tolist(), first_pages[1:].tolist(), strict=True)]
        self.lengths, self.scale = lengths, scale

    def run(self, q_latent, q_rotated, latent, rotated, return_lse):
        assert return_lse
        q, cache = torch.cat((q_latent, q_rotated), -1)[:, None], torch.cat((latent, rotated), -1)[:, :, None]
        o, lse = attend_all(q, cache, latent[:, :, None], self.pages, self.lengths, self.scale)
        return o[:, 0], lse


MODULES = {
    "flashmla": FlashMla(lazy=False),
    "flashmla since 2026": FlashMla(lazy=True),
    "fa3": flash_attn_3(packed=False),
    "fa3 packed": flash_attn_3(packed=True),
    "flashinfer": SimpleNamespace(BatchMLAPagedAttentionWrapper=FlashInfer),
}


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.parametrize("name", MODULES)
def test_each_is_told_what_the_problem_is(on_hopper, monkeypatch, name):
    baseline = baselines.find(name.split()[0], "mla")
    monkeypatch.setattr(type(baseline), "_import", lambda _: MODULES[name])
    task = problem(softmax_scale=0.07)
    tensors = make_inputs(task)
    run = baseline.prepare(task, tensors)
    for _ in range(2):
        given = run()._asdict()
        outputs = {output: given[output] for output in task.outputs if output != LSE}
        verify(expect(task, tensors), outputs).require(name)


def test_flash_mla_is_given_lists_whose_rest_is_no_key(on_hopper, monkeypatch):
    """Of a list it knows -1 alone as no key; what lies behind a list's length may be anything."""

    def with_kvcache(q, cache, table, lengths, columns, *_, indices, is_fp8_kvcache, **options):
        assert (table, lengths, is_fp8_kvcache) == (None, None, True)
        given.append(indices)
        return q[..., :columns], None

    given, asked = [], []
    module = SimpleNamespace(
        flash_mla_with_kvcache=with_kvcache, get_mla_metadata=lambda _, *counts: (asked.append(counts), None)
    )
    task = problem(num_heads=64, seqlens_k=(100, 128), options={"sparse": True, "fp8_rows": True})
    tensors, baseline = make_inputs(task), baselines.find("flashmla", "mla")
    monkeypatch.setattr(type(baseline), "_import", lambda _: module)
    baseline.prepare(task, tensors)
    lists = tensors.by_name["indices"]
    assert torch.equal(given[0][:, 0, :100], lists[:, :100])
    assert (given[0][0, 0, 100:] == -1).all()
    assert (lists[0, 100:] != -1).any()
    assert asked == [(64, 1, 64, True, 128)]
    assert "lists of whole 64 keys" in baseline.refusal(
        problem(num_heads=64, seqlens_k=(100,), options={"sparse": True, "fp8_rows": True})
    )


def test_a_schedule_is_made_once_before_anything_is_timed(on_hopper, monkeypatch):
    baseline, module = baselines.find("flashmla", "mla"), FlashMla(lazy=True)
    monkeypatch.setattr(type(baseline), "_import", lambda _: module)
    run = baseline.prepare(problem(), make_inputs(problem()))
    assert module.planned == 1
    run()
    assert module.planned == 1


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("flashmla", {"page_size": 32}, "FlashMLA reads pages of 64 keys alone"),
        ("flashinfer", {"paged": False}, "FlashInfer reads pages alone"),
        ("flashinfer", {"num_heads_k": 2}, "FlashInfer takes one head of K"),
        ("fa3", {"head_dim": 128, "head_dim_v": 64}, "FlashAttention-3 takes no head_dim_v of 64"),
        ("fa3", {"paged": False}, None),
    ],
)
def test_refusals_for_mla(on_hopper, name, values, message):
    refusal = baselines.find(name, "mla").refusal(problem(**values))
    assert refusal is None if message is None else refusal.startswith(message)


@pytest.mark.parametrize("name", ["flashmla", "fa3", "flashinfer"])
@pytest.mark.parametrize(
    ("options", "sizes", "reason"),
    [
        ({"fp8_rows": True}, {}, "is asked for caches in 16 bits alone here"),
        ({"sparse": True}, {}, "without lists of keys"),
        ({}, {"head_dim": 512}, "is asked for 576 columns and 512 of V alone here, not 512 and 512"),
    ],
)
def test_what_they_are_not_given(name, options, sizes, reason):
    usual = {"num_heads": 4, "num_heads_k": 1, "head_dim": 576, "head_dim_v": 512, "seqlen_q": 1}
    task = Problem(operation="mla", seqlens_k=LENGTHS, options=options, **(usual | sizes))
    assert reason in baselines.of("mla")[name].refuses(task)
