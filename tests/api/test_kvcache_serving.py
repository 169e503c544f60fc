"""flash_attn_with_kvcache as engines call it: sinks, memory of their own for O, packed rows."""

import math
import re

import pytest
import torch

from flashladder import attention, flash_attn_with_kvcache
from flashladder.common import catalog
from flashladder.common.errors import UnsupportedProblemError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, HEADS_K, COLUMNS, ROOM = 4, 2, 64, 96
LENGTHS = (0, 1, 70)
SINKS = (1.5, -3.0, 6.0, 0.0)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def given(device, rows=1, columns=COLUMNS):
    """Q, caches with NaN behind the lengths, and the lengths."""
    q = normal(3, rows, HEADS, columns, device=device)
    both = [normal(3, ROOM, HEADS_K, columns, seed=seed, device=device) for seed in (1, 2)]
    for cache in both:
        for sequence, length in enumerate(LENGTHS):
            cache[sequence, length:] = math.nan
    return q, *both, torch.tensor(LENGTHS, dtype=torch.int32, device=device)


OPTIONS = {"plain": {}, "a window": {"window_size": (20, 0)}, "splits": {"num_splits": 3, "softcap": 5.0}}


@pytest.mark.parametrize("columns", [COLUMNS, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sinks_are_those_of_attention(device, options, columns):
    """With as many keys; a row without keys has the sink as its log-sum-exp."""
    q, k, v, lengths = given(device, 2, columns)
    sinks = torch.tensor(SINKS, device=device)
    asked = {"causal": True, **options}
    o, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, s_aux=sinks.bfloat16(), return_softmax_lse=True, **asked
    )
    asked["window"] = (20, 0) if asked.pop("window_size", None) else (None, None)
    asked.pop("num_splits", None)
    for sequence, length in enumerate(LENGTHS):
        one, keys = slice(sequence, sequence + 1), slice(0, length)
        wanted = attention(q[one], k[one, keys], v[one, keys], sinks=sinks, return_lse=True, **asked)
        for found, expected, near in zip((o[one], lse[one]), wanted, (0.02, 1e-4), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=near)


def test_each_kernel_that_a_call_may_launch_has_sinks():
    for launch in catalog.ladder_of("decode").launches:
        assert catalog.find(launch.rung).supports.sinks, launch.rung


def same(outputs, expected):
    return all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("columns", [COLUMNS, 40])
@pytest.mark.parametrize("appends", [False, True])
def test_memory_of_the_callers_own(device, appends, columns):
    """Of any strides, again and again; what lies between its rows stays."""
    q, k, v, lengths = given(device, columns=columns)
    new = (normal(3, 1, HEADS_K, columns, seed=5, device=device),) * 2 if appends else ()
    call = lambda **more: flash_attn_with_kvcache(  # noqa: E731
        q, k.clone(), v.clone(), *new, cache_seqlens=lengths, return_softmax_lse=True, **more
    )
    expected = call()
    memory = torch.full((3, 1, HEADS, 128), 7.0, device=device).bfloat16()
    out = memory[..., :columns]
    for _ in range(3):
        out.zero_()
        found = call(out=out)
        assert found[0] is out
        assert same(found, expected)
        assert (memory[..., columns:] == 7).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_packed_rows(device, rows):
    """As many of each sequence."""
    q, k, v, lengths = given(device, rows)
    starts = torch.arange(0, 3 * rows + 1, rows, dtype=torch.int32, device=device)
    asked = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    expected, of_rows = flash_attn_with_kvcache(q, k, v, **asked)
    packed = {"cu_seqlens_q": starts, "max_seqlen_q": rows}
    out = torch.empty_like(q.flatten(0, 1))
    for more in ({}, {"out": out}):
        o, lse = flash_attn_with_kvcache(q.flatten(0, 1), k, v, **asked, **packed, **more)
        assert torch.equal(o, expected.flatten(0, 1))
        assert torch.equal(lse, of_rows.transpose(0, 1).reshape(HEADS, 3 * rows))
    assert torch.equal(out, o)


STARTS = torch.tensor([0, 1, 2, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qv": torch.zeros(1)}, "qv is given"),
        ({"s_aux": torch.zeros(3)}, "s_aux is (3,) torch.float32; with q it is (4,)"),
        ({"s_aux": [1.0] * 4}, "s_aux is of type list"),
        ({"out": normal(3, 1, HEADS, COLUMNS).half()}, "out is (3, 1, 4, 64) torch.float16 on cpu; O is"),
        ({"out": normal(1, 1, HEADS, COLUMNS).expand(3, -1, -1, -1)}, "out has strides (0, 256, 64, 1), by which"),
        ({"out": normal(3, 1, HEADS, 63)}, "out is (3, 1, 4, 63) torch.bfloat16 on cpu; O is (3, 1, 4, 64)"),
        ({"cu_seqlens_q": STARTS}, "max_seqlen_q is left out"),
        ({"q": normal(3, HEADS, COLUMNS), "max_seqlen_q": 1}, "cu_seqlens_q is left out"),
        (
            {"cu_seqlens_q": STARTS, "max_seqlen_q": 1},
            "q has shape (3, 1, 4, 64); packed, it is (total, heads",
        ),
        (
            {"q": normal(3, HEADS, COLUMNS), "cu_seqlens_q": STARTS, "max_seqlen_q": 2},
            "q has 3 rows of 3 sequences, max_seqlen_q=2: here each has so many; flash_attn_varlen_func takes",
        ),
        (
            {"q": normal(3, HEADS, COLUMNS), "cu_seqlens_q": STARTS // 2 * 2, "max_seqlen_q": 1},
            "max_seqlen_q is 1; sequence 1 of cu_seqlens_q has 2 rows",
        ),
    ],
)
def test_what_is_refused(changes, message):
    q, k, v, lengths = given("cpu")
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, **changes})


def test_an_out_that_is_an_input_is_refused():
    q, k, v, lengths = given("cpu")
    with pytest.raises(UnsupportedProblemError, match="out shares memory with q; it takes memory of its own"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, out=q)


@pytest.mark.parametrize("appends", [False, True])
def test_torch_compiles_around_memory_of_ones_own(appends):
    q, k, v, lengths = given("cpu")
    new = (normal(3, 1, HEADS_K, COLUMNS, seed=5),) * 2 if appends else ()
    sinks, expected, found = torch.tensor(SINKS), torch.zeros_like(q), torch.zeros_like(q)

    def step(q, out):
        flash_attn_with_kvcache(2 * q, k, v, *new, cache_seqlens=lengths, s_aux=sinks, out=out)
        return out + 1

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, found), step(q, expected))
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_a_graph_writes_to_memory_of_ones_own():
    """Captured once, on a stream of its own; lengths, sinks and pages may change before each replay."""
    q, k, v, lengths = given("cuda")
    new = (normal(3, 1, HEADS_K, COLUMNS, seed=5, device="cuda"),) * 2
    sinks, out = torch.tensor(SINKS, device="cuda"), torch.zeros_like(q)
    starts = torch.arange(4, dtype=torch.int32, device="cuda")

    def step(out, k, v):
        packed = {"cu_seqlens_q": starts, "max_seqlen_q": 1, "out": None if out is None else out[:, 0]}
        return flash_attn_with_kvcache(q[:, 0], k, v, *new, cache_seqlens=lengths, s_aux=sinks, **packed)

    caches = k.clone(), v.clone()
    step(out, *caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        step(out, *caches)
    for number in range(3):
        lengths.copy_(torch.tensor((number, 1, 70 - number)))
        sinks.add_(1)
        fresh = [cache.clone() for cache in caches]
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out[:, 0], step(None, *fresh))
