"""flash_attn_with_kvcache: caches in one piece and in pages, appended to in place, against the textbook."""

import math
import re

import pytest
import torch

from flashladder import flash_attn_with_kvcache
from flashladder.common.errors import UnsupportedProblemError

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


def check(o, lse, q, k, v, lengths, causal):
    for sequence, length in enumerate(lengths):
        rows = q[sequence].double().transpose(0, 1)
        keys, values = (
            x[sequence, :length].double().transpose(0, 1).repeat_interleave(HEADS // HEADS_K, 0) for x in (k, v)
        )
        scores = rows @ keys.mT * COLUMNS**-0.5
        if causal:
            place = torch.arange(len(q[0]), device=q.device)[:, None] + length - len(q[0])
            scores = scores.masked_fill(torch.arange(length, device=q.device) > place, -math.inf)
        exact = scores.softmax(-1).nan_to_num(0) @ values
        torch.testing.assert_close(o[sequence].double(), exact.transpose(0, 1), rtol=0, atol=0.02)
        torch.testing.assert_close(lse[sequence].double(), scores.logsumexp(-1), rtol=0, atol=1e-4)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_cos": torch.zeros(1)}, "rotary_cos: kernels for caches have none yet; rotary_cos=None works"),
        ({"cache_batch_idx": torch.zeros(1)}, "cache_batch_idx: kernels for caches have none yet"),
        ({"window_size": (5, 0)}, "window_size=(5, 0): kernels for caches have no sliding window yet"),
        ({"softcap": 3.0}, "softcap=3.0: kernels for caches have none yet"),
        ({"num_splits": 257}, "num_splits=257: must be 0, for as many as suit, or up to 256"),
        ({"cache_seqlens": ROOM + 1}, "cache_seqlens=97: the cache has room for 0 to 96 keys"),
        ({"cache_seqlens": lengths_of((0, 1, 97), "cpu")}, "cache_seqlens=[0, 1, 97]: the cache has room for 0 to 96"),
        ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens is (3,) torch.float32 on cpu; with q it"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_scale": -1.0}, "softmax_scale=-1.0: must be a positive"),
        ({"q": normal(3, 1, 3, COLUMNS)}, "num_heads=3 must be a multiple of num_heads_k=2"),
        ({"q": normal(3, 1, HEADS, 128)}, "k_cache is (3, 96, 2, 64) torch.bfloat16; with the other tensors it is"),
        ({"v_cache": normal(3, ROOM, HEADS_K, COLUMNS + 1)[..., 1:]}, "v_cache has strides (12480, 130, 65, 1)"),
        ({"v_cache": normal(1, ROOM, HEADS_K, COLUMNS).expand(3, -1, -1, -1)}, "by which elements lie on each other"),
        ({"softcap": math.nan}, "softcap=nan: kernels for caches have none yet"),
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
