"""flash_attn_with_kvcache: caches in one piece and in pages, appended to in place, against the textbook."""

import math
import re

import pytest
import torch

from flashladder import flash_attn_with_kvcache
from flashladder.common import catalog
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.head_dims import CACHED_HEAD_DIMS
from flashladder.tests.support import triton_process

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, HEADS_K, COLUMNS, ROOM, PAGE = 4, 2, 64, 96, 16
LENGTHS = (0, 1, 70)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def caches(device, lengths=LENGTHS):
    """K and V in one piece, NaN behind the lengths."""
    both = [normal(len(lengths), ROOM, HEADS_K, COLUMNS, seed=seed, device=device) for seed in (1, 2)]
    for cache in both:
        for sequence, length in enumerate(lengths):
            cache[sequence, length:] = math.nan
    return both


def in_pages(both, device):
    """The same in pages that lie in random order, and the table of them."""
    batch, pages = len(both[0]), ROOM // PAGE
    order = torch.randperm(batch * pages + 2, generator=torch.Generator().manual_seed(3))[: batch * pages].to(device)
    paged = [torch.full((batch * pages + 2, PAGE, HEADS_K, COLUMNS), math.nan, device=device).bfloat16() for _ in both]
    for new, old in zip(paged, both, strict=True):
        new[order] = old.reshape(-1, PAGE, HEADS_K, COLUMNS)
    return paged, order.view(batch, pages).int()


def lengths_of(lengths, device):
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def check(o, lse, q, k, v, lengths, causal, padding=None, window=(-1, -1), softcap=0.0, slopes=None, near=1e-4):
    """By the textbook, in fp64."""
    for sequence, length in enumerate(lengths):
        begin = padding[sequence] if padding else 0
        rows = q[sequence].double().transpose(0, 1)
        keys, values = (
            x[sequence, begin:length].double().transpose(0, 1).repeat_interleave(HEADS // HEADS_K, 0) for x in (k, v)
        )
        scores = rows @ keys.mT * COLUMNS**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(len(q[0]), device=q.device)[:, None] + length - len(q[0])
        key = torch.arange(begin, max(begin, length), device=q.device)
        if slopes is not None:
            scores = scores - slopes.double().expand(len(q), -1)[sequence, :, None, None] * (own - key).abs()
        left, right = window[0], 0 if causal else window[1]
        hidden = torch.zeros_like(own - key, dtype=torch.bool)
        if left >= 0:
            hidden |= key < own - left
        if right >= 0:
            hidden |= key > own + right
        scores = scores.masked_fill(hidden, -math.inf)
        exact = scores.softmax(-1).nan_to_num(0) @ values
        torch.testing.assert_close(o[sequence].double(), exact.transpose(0, 1), rtol=0, atol=0.02)
        torch.testing.assert_close(lse[sequence].double(), scores.logsumexp(-1), rtol=0, atol=near)


@pytest.mark.parametrize("paged", [False, True])
def test_rows_against_a_cache(device, paged):
    q, both = normal(3, 2, HEADS, COLUMNS, device=device), caches(device)
    given, table = in_pages(both, device) if paged else (both, None)
    options = {"cache_seqlens": lengths_of(LENGTHS, device), "block_table": table, "causal": True, "num_splits": 2}
    o, lse = flash_attn_with_kvcache(q, *given, **options, return_softmax_lse=True)
    check(o, lse, q, *both, LENGTHS, causal=True)
    assert torch.equal(flash_attn_with_kvcache(q, *given, **options), o)


@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_are_written_behind_the_others(device, paged):
    q, both = normal(3, 2, HEADS, COLUMNS, device=device), caches(device)
    given, table = in_pages(both, device) if paged else (both, None)
    k, v = (normal(3, 2, HEADS_K, COLUMNS, seed=seed, device=device) for seed in (4, 5))
    lengths = lengths_of(LENGTHS, device)
    o, lse = flash_attn_with_kvcache(
        q, *given, k, v, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
    )
    for cache, new in zip(both, (k, v), strict=True):
        for sequence, length in enumerate(LENGTHS):
            cache[sequence, length : length + 2] = new[sequence]
    check(o, lse, q, *both, [length + 2 for length in LENGTHS], causal=True)
    assert lengths.tolist() == list(LENGTHS), "those of the caller stay as they are"
    if table is not None:
        for old, new in zip(both, given, strict=True):
            assert torch.equal(new[table.long()].view(old.shape).nan_to_num(7), old.nan_to_num(7))


def test_one_number_of_keys_for_all_and_a_window_of_all(device):
    q, (k, v) = normal(3, 1, HEADS, COLUMNS, device=device), caches(device, (ROOM,) * 3)
    for length, options in ((5, {"cache_seqlens": 5}), (ROOM, {}), (ROOM, {"window_size": (-1, 0), "num_splits": 3})):
        o, lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
        check(o, lse, q, k, v, (length,) * 3, causal=False)


BOUNDS = {
    "a window": {"window_size": (9, 4), "causal": False},
    "a causal window": {"window_size": (30, 7)},
    "a softcap": {"softcap": 2.0},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.0, -0.2])},
    "padding": {"cache_leftpad": (0, 1, 20)},
    "all": {"window_size": (50, -1), "softcap": 9.0, "alibi_slopes": torch.ones(3, 4), "cache_leftpad": (0, 0, 33)},
}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("paged", [False, True])
def test_what_rows_see(device, paged, kind):
    q, both = normal(3, 2, HEADS, COLUMNS, device=device), caches(device)
    given, table = in_pages(both, device) if paged else (both, None)
    asked = {"causal": True, **BOUNDS[kind]}
    options = {"cache_seqlens": lengths_of(LENGTHS, device), "block_table": table, **asked}
    told = {"causal": asked["causal"], "window": asked.get("window_size", (-1, -1)), "softcap": asked.get("softcap", 0)}
    if padding := asked.get("cache_leftpad"):
        options["cache_leftpad"] = lengths_of(padding, device)
    if "alibi_slopes" in asked:
        options["alibi_slopes"] = asked["alibi_slopes"].to(device)
    o, lse = flash_attn_with_kvcache(q, *given, **options, return_softmax_lse=True)
    check(o, lse, q, *both, LENGTHS, padding=padding, slopes=options.get("alibi_slopes"), **told)


@pytest.mark.parametrize("rung", ["decode/07", "decode/10", "decode/12"])
def test_every_head_dim_that_is_not_copied_is_a_rungs(rung):
    assert set(CACHED_HEAD_DIMS) == set(catalog.find(rung).supports.head_dim)


@pytest.mark.parametrize("columns", [20, 160])
@pytest.mark.slow
def test_another_head_dim(device, columns, monkeypatch):
    """No kernel has it: caches are copied, and new keys still written to them."""
    monkeypatch.setitem(globals(), "COLUMNS", columns)
    test_new_keys_are_written_behind_the_others(device, paged=columns == 20)
    test_what_rows_see(device, paged=columns != 20, kind="all")
    test_rows_against_a_cache(device, paged=False)


def test_sequences_of_a_larger_cache(device):
    """Read, and written to, where they lie."""
    q, both, new = normal(2, 1, HEADS, COLUMNS, device=device), caches(device), normal(2, 1, HEADS_K, COLUMNS)
    options = {"cache_batch_idx": lengths_of((2, 0), device), "cache_seqlens": lengths_of((70, 0), device)}
    others = [cache[1].clone() for cache in both]
    o, lse = flash_attn_with_kvcache(q, *both, *[new.to(device)] * 2, **options, return_softmax_lse=True)
    assert all(torch.equal(cache[2, 70], new[0].to(device)[0]) for cache in both)
    assert all(
        torch.equal(cache[1].nan_to_num(7), other.nan_to_num(7)) for cache, other in zip(both, others, strict=True)
    )
    check(o, lse, q, *(cache[[2, 0]] for cache in both), (71, 1), causal=False)


def turned(x, angles, positions, interleaved):
    """By complex numbers, in fp64."""
    columns = 2 * angles.shape[1]
    part = x[..., :columns].double()
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    rotated = (
        torch.complex(a, b)
        * torch.polar(torch.ones_like(angles[positions]).double(), angles[positions].double())[:, :, None]
    )
    pairs = torch.view_as_real(rotated)
    made = pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)
    return torch.cat((made, x[..., columns:].double()), -1)


@pytest.mark.parametrize(
    ("causal", "interleaved", "columns"), [(True, True, COLUMNS), (True, False, 32), (False, True, 8)]
)
def test_rotary_embeddings(device, causal, interleaved, columns):
    """New keys are turned by their places, and so are rows under a causal mask; else all as the first new key is."""
    q, both = normal(3, 2, HEADS, COLUMNS, device=device), caches(device)
    k, v = (normal(3, 2, HEADS_K, COLUMNS, seed=seed, device=device) for seed in (4, 5))
    angles = torch.outer(torch.arange(ROOM), 100 ** -torch.linspace(0, 1, columns // 2)).to(device)
    tables = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    given, table = in_pages(both, device)
    options = {"block_table": table, "causal": causal, "rotary_interleaved": interleaved, "return_softmax_lse": True}
    o, lse = flash_attn_with_kvcache(q, *given, k, v, **tables, cache_seqlens=lengths_of(LENGTHS, device), **options)
    places = torch.tensor(LENGTHS, device=device)[:, None] + torch.arange(2, device=device)
    new, rows = (
        turned(x, angles, at, interleaved) for x, at in ((k, places), (q, places if causal else places[:, :1]))
    )
    for sequence, length in enumerate(LENGTHS):
        both[0][sequence, length : length + 2] = new[sequence].bfloat16()
        both[1][sequence, length : length + 2] = v[sequence]
    found = given[0][table.long()].view(both[0].shape)
    torch.testing.assert_close(found, both[0], rtol=0, atol=0.05, equal_nan=True)
    check(o, lse, rows.bfloat16(), found, both[1], [length + 2 for length in LENGTHS], causal, near=0.03)


@pytest.mark.parametrize("positions", [ROOM, ROOM + 3])
def test_rows_beyond_the_room_turn_as_far_as_there_are_angles(device, positions):
    """More rows of Q than new keys, in a cache that is full then."""
    q, both = normal(1, 3, HEADS, COLUMNS, device=device), caches(device, (ROOM - 1,))
    k, v = (normal(1, 1, HEADS_K, COLUMNS, seed=seed, device=device) for seed in (4, 5))
    angles = torch.outer(torch.arange(positions), 0.5 ** torch.arange(COLUMNS // 2)).to(device)
    tables = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    options = {"cache_seqlens": lengths_of((ROOM - 1,), device), "window_size": (ROOM, 0), "return_softmax_lse": True}
    o, lse = flash_attn_with_kvcache(q, *both, k, v, **tables, **options)
    places = (ROOM - 1 + torch.arange(3, device=device)).clamp(max=positions - 1)
    check(o, lse, turned(q, angles, places[None], True).bfloat16(), *both, (ROOM,), causal=True, near=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_cos": torch.zeros(1)}, "rotary_sin=None is of type NoneType"),
        (
            {"rotary_cos": torch.zeros(9, 8), "rotary_sin": torch.zeros(9, 8)},
            "rotary_cos is (9, 8) torch.float32 on cpu",
        ),
        (
            dict.fromkeys(("rotary_cos", "rotary_sin"), normal(ROOM, 8)),
            "rotary_cos is given, but no k and v: keys in the cache are turned already",
        ),
        ({"cache_batch_idx": torch.zeros(1)}, "cache_batch_idx is (1,) torch.float32 on cpu; with q it is (3,)"),
        (
            {"cache_batch_idx": lengths_of((0, 1, 3), "cpu")},
            "cache_batch_idx=[0, 1, 3]: the cache has sequences 0 to 2",
        ),
        (
            {"cache_batch_idx": lengths_of((0, 1, 2), "cpu"), "block_table": torch.zeros(3, 2).int()},
            "cache_batch_idx and block_table are given",
        ),
        ({"cache_leftpad": lengths_of((0, 1, 97), "cpu")}, "cache_leftpad=[0, 1, 97]: the cache has room for 0 to 96"),
        (
            {"cache_leftpad": torch.zeros(3)},
            "cache_leftpad is (3,) torch.float32 on cpu; with q it is (3,) torch.int32",
        ),
        ({"window_size": (5,)}, "window_size=(5,): it should be (left, right)"),
        ({"softcap": 3000.0}, "softcap=3000.0: must be a positive number up to 1000"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes is (3,) torch.float32; with q it is (4,) or (3, 4)"),
        ({"num_splits": 257}, "num_splits=257: must be 0, for as many as suit, or up to 256"),
        ({"cache_seqlens": ROOM + 1}, "cache_seqlens=97: the cache has room for 0 to 96 keys"),
        ({"cache_seqlens": lengths_of((0, 1, 97), "cpu")}, "cache_seqlens=[0, 1, 97]: the cache has room for 0 to 96"),
        ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens is (3,) torch.float32 on cpu; with q it"),
        ({"k_cache": normal(3, 0, HEADS_K, COLUMNS)}, "v_cache has shape (3, 96, 2, 64); both caches are (batch"),
        ({"v_cache": normal(3, ROOM, 1, COLUMNS)}, "v_cache has shape (3, 96, 1, 64); both caches are (batch, seqlen"),
        ({"k_cache": normal(3, ROOM, HEADS_K, COLUMNS).half()}, "k_cache is torch.float16 on cpu; like q it should be"),
        ({"q": normal(2, 1, HEADS, COLUMNS)}, "k_cache is of 3 sequences, q of 2"),
        ({"block_table": torch.zeros(2, 3).int()}, "block_table is (2, 3) torch.int32 on cpu; with q it is"),
        ({"block_table": torch.full((3, 2), 3).int()}, "block_table has pages 3 to 3; the cache has 3, from 0"),
        ({"k": normal(3, 1, HEADS_K, COLUMNS)}, "k and v are given, but no cache_seqlens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(changes, message):
    cache = normal(3, ROOM, HEADS_K, COLUMNS)
    given = {"q": normal(3, 1, HEADS, COLUMNS), "k_cache": cache, "v_cache": cache} | changes
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        flash_attn_with_kvcache(**given)


def test_no_room_for_new_keys():
    cache, new = normal(3, 4, HEADS_K, COLUMNS), normal(3, 2, HEADS_K, COLUMNS)
    with pytest.raises(UnsupportedProblemError, match=r"cache_seqlens=\[3, 3, 3\] and 2 new keys: the cache has room"):
        flash_attn_with_kvcache(normal(3, 1, HEADS, COLUMNS), cache, cache, new, new, cache_seqlens=3)


LAYOUTS = {  # of K and V in one tensor: its shape, and how they are views of it; vLLM and SGLang have such ones
    "apart": ((2, -1, PAGE, HEADS_K, COLUMNS), lambda both: both.unbind(0)),
    "a page of K, a page of V": ((-1, 2, PAGE, HEADS_K, COLUMNS), lambda both: both.unbind(1)),
    "heads before rows": ((2, -1, HEADS_K, PAGE, COLUMNS), lambda both: both.transpose(2, 3).unbind(0)),
    "a row of K, a row of V": ((-1, PAGE, HEADS_K, 2 * COLUMNS), lambda both: both.split(COLUMNS, -1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_pages(device, layout):
    """Are views, in which keys are written and seen to the same bits."""
    q, k, v = (normal(3, 1, heads, COLUMNS, seed=7, device=device) for heads in (HEADS, HEADS_K, HEADS_K))
    given, table = in_pages(caches(device), device)
    shape, views_of = LAYOUTS[layout]
    views = views_of(torch.zeros(2 * given[0].numel(), device=device).bfloat16().view(shape))
    for view, cache in zip(views, given, strict=True):
        view.copy_(cache)
    options = {"cache_seqlens": lengths_of(LENGTHS, device), "block_table": table}
    expected = flash_attn_with_kvcache(q, *given, k, v, **options)
    assert torch.equal(flash_attn_with_kvcache(q, *views, k, v, **options), expected)
    for view, cache in zip(views, given, strict=True):
        assert torch.equal(view.nan_to_num(7), cache.nan_to_num(7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_scale": -1.0}, "softmax_scale=-1.0: must be a positive"),
        ({"q": normal(3, 1, 3, COLUMNS)}, "num_heads=3 must be a multiple of num_heads_k=2"),
        ({"q": normal(3, 1, HEADS, 128)}, "k_cache is (3, 96, 2, 64) torch.bfloat16; with the other tensors it is"),
        ({"v_cache": normal(3, ROOM, HEADS_K, COLUMNS + 1)[..., 1:]}, "v_cache has strides (12480, 130, 65, 1)"),
        ({"v_cache": normal(1, ROOM, HEADS_K, COLUMNS).expand(3, -1, -1, -1)}, "by which elements lie on each other"),
        ({"softcap": math.nan}, "softcap=nan: must be a positive number"),
    ],
)
def test_what_is_refused_has_written_nothing(changes, message):
    cache, new = normal(3, ROOM, HEADS_K, COLUMNS), normal(3, 1, HEADS_K, COLUMNS, seed=1)
    given = {"q": normal(3, 1, HEADS, COLUMNS), "v_cache": cache.clone(), "k": new, "v": new} | changes
    before = cache.clone()
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        flash_attn_with_kvcache(k_cache=cache, **given, cache_seqlens=5)
    assert torch.equal(cache, before)


def test_new_keys_take_a_page():
    """One that is none would be read as the last one, and written as that, which is another sequence's."""
    cache, new = normal(4, PAGE, HEADS_K, COLUMNS), normal(2, 2, HEADS_K, COLUMNS)
    given = {"q": normal(2, 1, HEADS, COLUMNS), "k_cache": cache, "v_cache": cache.clone(), "k": new, "v": new}
    table, before = torch.tensor([[1, -1], [2, 3]], dtype=torch.int32), cache.clone()
    flash_attn_with_kvcache(**given, cache_seqlens=PAGE - 2, block_table=table)
    assert torch.equal(cache[0], before[0])
    with pytest.raises(UnsupportedProblemError, match="block_table is -1, which is no page, where new keys come to"):
        flash_attn_with_kvcache(**given, cache_seqlens=PAGE - 1, block_table=table)


def test_torch_compiles_around_it(device):
    q, (k, v), lengths = normal(3, 1, HEADS, COLUMNS, device=device), caches(device), lengths_of(LENGTHS, device)

    def step(q, lengths):
        return flash_attn_with_kvcache(2 * q, k, v, cache_seqlens=lengths) + 1

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, lengths), step(q, lengths))


@pytest.mark.parametrize("paged", [False, True])
def test_torch_compiles_around_new_keys(paged):
    q, both, new = normal(3, 1, HEADS, COLUMNS), caches("cpu"), normal(3, 1, HEADS_K, COLUMNS, seed=9)
    given, table = in_pages(both, "cpu") if paged else (both, None)
    again = [cache.clone() for cache in given]

    def step(q, k_cache, v_cache, lengths):
        return flash_attn_with_kvcache(2 * q, k_cache, v_cache, new, new, cache_seqlens=lengths, block_table=table)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    lengths = lengths_of(LENGTHS, "cpu")
    assert torch.equal(compiled(q, *given, lengths), step(q, *again, lengths))
    for cache, other in zip(given, again, strict=True):
        assert torch.equal(cache.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.gpu
def test_a_graph_serves_growing_lengths():
    """Captured once; each replay reads the lengths anew, and appends a key."""
    q, (k, v) = normal(3, 1, HEADS, COLUMNS, device="cuda"), caches("cuda", (3, 4, 70))
    lengths, new = lengths_of((3, 4, 70), "cuda"), normal(3, 1, HEADS_K, COLUMNS, seed=9, device="cuda")

    def step():
        o = flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths, return_softmax_lse=True)
        lengths.add_(1)
        return o

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = step()
    for number in range(2, 5):
        graph.replay()
        torch.cuda.synchronize()
        check(o, lse, q, k, v, [length + number for length in (3, 4, 70)], causal=False)


CAPTURED = """
import torch
from flashladder import flash_attn_with_kvcache

def step(q, cache, lengths):
    return flash_attn_with_kvcache(q * 2, cache, cache, cache_seqlens=lengths, num_splits=4) * 2

q, cache = (torch.randn(2, n, 8, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 500))
compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
for length in (1, 100, 300, 500):
    lengths = torch.full((2,), length, dtype=torch.int32, device="cuda")
    assert torch.equal(compiled(q, cache, lengths).clone(), step(q, cache, lengths))
"""


@pytest.mark.gpu
def test_compiled_for_a_gpu_and_captured():
    """In the pool of torch.compile's graphs nothing may stay: memory that kernels keep is none of it."""
    triton_process.run("-c", CAPTURED, check=True)
