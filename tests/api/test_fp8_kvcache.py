"""flash_attn_with_kvcache of caches in 8-bit floats: against its own answer for the same cache in 16 bits."""

import pytest
import torch

from flashladder import flash_attn_with_kvcache
from flashladder.common.api import caches as api_caches
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.fp8 import FP8, quantised

HEADS, HEADS_K, COLUMNS, ROOM = 4, 2, 64, 96
LENGTHS = torch.tensor([0, 1, 70], dtype=torch.int32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALES = torch.tensor([[0.25, 2.0], [1.0, 0.5], [0.125, 4.0]])  # powers of 2: the same cache is exact in 16 bits


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def caches():
    """K and V as 8-bit floats, NaN behind the lengths."""
    both = [quantised(normal(3, ROOM, HEADS_K, COLUMNS, seed=seed), SCALES[:, None]) for seed in (1, 2)]
    for cache in both:
        for sequence, length in enumerate(LENGTHS.tolist()):
            cache[sequence, length:] = torch.nan
    return both


def widened(cache, scales):
    return (cache.float() * scales[:, None, :, None]).bfloat16()


def same(found, expected):
    """O as near as its largest number can be rounded, and the log-sum-exp."""
    (o, lse), (wide, wide_lse) = found, expected
    torch.testing.assert_close(o.float(), wide.float(), rtol=0, atol=2**-7 * float(wide.float().abs().max()))
    torch.testing.assert_close(lse, wide_lse, rtol=0, atol=1e-4)


def test_the_scales_of_k_and_of_v():
    q, (k, v) = normal(3, 2, HEADS, COLUMNS), caches()
    options = {"cache_seqlens": LENGTHS, "causal": True, "return_softmax_lse": True}
    found = flash_attn_with_kvcache(q, k, v, k_descale=SCALES, v_descale=SCALES.flip(1), **options)
    same(found, flash_attn_with_kvcache(q, widened(k, SCALES), widened(v, SCALES.flip(1)), **options))


def test_new_keys_are_rounded_by_the_scales():
    """In pages; one scale a head for all sequences, and none for V. What is beyond the largest number saturates."""
    q, (k, v) = normal(3, 2, HEADS, COLUMNS), caches()
    new_k, new_v = normal(3, 2, HEADS_K, COLUMNS, seed=3), normal(3, 2, HEADS_K, COLUMNS, seed=4)
    new_v[2, 0] = 1000.0
    pages = [cache.view(-1, 32, HEADS_K, COLUMNS) for cache in (k, v)]
    table = torch.arange(9, dtype=torch.int32).view(3, 3)
    options = {"cache_seqlens": LENGTHS, "causal": True, "return_softmax_lse": True}
    o, lse = flash_attn_with_kvcache(q, *pages, new_k, new_v, block_table=table, k_descale=SCALES[:1], **options)
    assert (v[2, 70].float() == 448).all()
    assert torch.equal(k[0, :2].float(), quantised(new_k[0], SCALES[0]).float())
    wide = widened(k, SCALES[:1].expand(3, -1)), widened(v, torch.ones(3, HEADS_K))
    expected = flash_attn_with_kvcache(q, *wide, **options | {"cache_seqlens": LENGTHS + 2})
    same((o, lse), expected)


@pytest.mark.parametrize("columns", [COLUMNS, 40])
@pytest.mark.parametrize("appends", [False, True])
def test_what_rows_see_and_new_keys(appends, columns, device):
    """As beside a cache in 16 bits with the same numbers, to which new keys are rounded that are 8-bit floats."""
    shape = 3, ROOM, HEADS_K, columns
    narrow = exact_in_8_bits(*shape, device=device)
    wide = [cache.bfloat16() for cache in narrow]
    of_new = exact_in_8_bits(3, 1, HEADS_K, columns, device=device, seeds=(3, 4)) if appends else []
    new = [keys.bfloat16() for keys in of_new]
    options = {"window_size": (30, 0), "softcap": 4.0, "s_aux": torch.tensor((1.0, -2.0, 3.0, 0.0), device=device)}
    options |= {"cache_leftpad": torch.tensor([0, 1, 20], dtype=torch.int32, device=device), "num_splits": 2}
    q, lengths = normal(3, 2, HEADS, columns).to(device), LENGTHS.to(device)
    found, expected = (
        flash_attn_with_kvcache(q, *both, *new, cache_seqlens=lengths, **options, return_softmax_lse=True)
        for both in (narrow, wide)
    )
    same(found, expected)
    for cache, like in zip(narrow, wide, strict=True):
        assert torch.equal(cache.bfloat16(), like)


KINDS = {  # of scales: given, and what they are for each of 9 pages of 32 and each head
    "a number": (0.5, torch.full((9, HEADS_K), 0.5)),
    "a tensor of one": (torch.tensor(2.0), torch.full((9, HEADS_K), 2.0)),
    "of pages and heads": (
        2.0 ** (torch.arange(18) % 5 - 2).view(9, 1, HEADS_K, 1),
        2.0 ** (torch.arange(18) % 5 - 2).view(9, HEADS_K),
    ),
    "of pages": (2.0 ** (torch.arange(9) % 4).view(9, 1, 1, 1), 2.0 ** (torch.arange(9) % 4).view(9, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_scales(kind, device):
    """Powers of 2, so that the same caches and new keys are exact in 16 bits."""
    given, of_pages = (x.to(device) if isinstance(x, torch.Tensor) else x for x in KINDS[kind])
    pages = exact_in_8_bits(9, 32, HEADS_K, COLUMNS, device=device)
    table = torch.tensor([[8, 1, 2], [3, 0, 5], [6, 7, 4]], dtype=torch.int32, device=device)
    units = of_pages.expand(9, HEADS_K)[:, None, :, None]
    wide = [(cache.float() * units).bfloat16() for cache in pages]
    lengths = torch.tensor([0, 1, 70], dtype=torch.int32, device=device)
    places = units[table.gather(1, (lengths.long() // 32)[:, None])[:, 0].long()]
    new = [keys.float() * places for keys in exact_in_8_bits(3, 1, HEADS_K, COLUMNS, device=device, seeds=(3, 4))]
    options = {"cache_seqlens": lengths, "block_table": table, "return_softmax_lse": True}
    scales = {"k_descale": given, "v_descale": given}
    q, new = normal(3, 1, HEADS, COLUMNS).to(device), [x.bfloat16() for x in new]
    found = flash_attn_with_kvcache(q, *pages, *new, **scales, **options)
    same(found, flash_attn_with_kvcache(q, *wide, *new, **options))
    for cache, like in zip(pages, wide, strict=True):
        assert torch.equal((cache.float() * units).bfloat16(), like)


def exact_in_8_bits(*shape, device, seeds=(1, 2)):
    return [quantised(normal(*shape, seed=seed), torch.ones(HEADS_K)).to(device) for seed in seeds]


NOWHERE = {  # lengths and tables of which some new keys have no place
    "a full sequence": ([ROOM, 5, 70], None),
    "some of them fit": ([ROOM - 1, 5, 70], None),
    "lengths that are none": ([-3, 2**31 - 1, ROOM + 5], None),
    "no page": ([16, 15, 0], [[1, -1], [2, 3], [-1, 0]]),
    "no such page": ([16, 15, 31], [[1, 5], [2, 2**31 - 1], [0, 3]]),
    "no page of any": ([0, 16, 32], [[-1, -1]] * 3),
}


@pytest.mark.parametrize(("lengths", "table"), NOWHERE.values(), ids=NOWHERE)
def test_new_keys_without_a_place_are_not_written(lengths, table, device, monkeypatch):
    """As to caches of 16 bits, whose kernel leaves them out."""
    monkeypatch.setattr(api_caches, "can_look_at", lambda _: False)  # as on a GPU
    shape = (3, ROOM, HEADS_K, COLUMNS) if table is None else (5, 16, HEADS_K, COLUMNS)
    new = [keys.bfloat16() for keys in exact_in_8_bits(3, 2, HEADS_K, COLUMNS, device=device, seeds=(3, 4))]
    narrow = exact_in_8_bits(*shape, device=device)
    wide = [cache.bfloat16() for cache in narrow]
    numbers = {"cache_seqlens": lengths} | ({} if table is None else {"block_table": table})
    options = {name: torch.tensor(value, dtype=torch.int32, device=device) for name, value in numbers.items()}
    q = normal(3, 2, HEADS, COLUMNS).to(device)
    found, expected = (
        flash_attn_with_kvcache(q, *both, *new, **options, causal=True, return_softmax_lse=True)
        for both in (narrow, wide)
    )
    for cache, like in zip(narrow, wide, strict=True):
        assert torch.equal(cache.bfloat16(), like)
    same(found, expected)


@pytest.mark.gpu
def test_a_graph_leaves_out_new_keys_without_a_place():
    """Captured before a sequence is full; other keys come with each replay."""
    q, narrow = normal(3, 1, HEADS, COLUMNS).cuda(), exact_in_8_bits(3, ROOM, HEADS_K, COLUMNS, device="cuda")
    new = [keys.bfloat16() for keys in exact_in_8_bits(3, 1, HEADS_K, COLUMNS, device="cuda", seeds=(3, 4))]
    wide = [cache.bfloat16() for cache in narrow]
    lengths = torch.tensor([ROOM - 4, 5, ROOM - 2], dtype=torch.int32, device="cuda")

    def step():
        for keys in new:
            keys.neg_()
        o = [flash_attn_with_kvcache(q, *both, *new, cache_seqlens=lengths) for both in (narrow, wide)]
        lengths.add_(1)
        return o

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, expected = step()
    for _ in range(5):
        graph.replay()
    for cache, like in zip(narrow, wide, strict=True):
        assert torch.equal(cache.bfloat16(), like)
    torch.testing.assert_close(o, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(("causal", "positions"), [(False, ROOM), (True, ROOM), (True, ROOM + 3)])
def test_rows_turn_as_beside_a_cache_in_16_bits(causal, positions, device):
    """Also beyond the room, where there are more rows than new keys."""
    q, new = normal(3, 3, HEADS, COLUMNS).to(device), torch.zeros(3, 1, HEADS_K, COLUMNS).bfloat16().to(device)
    narrow = exact_in_8_bits(3, ROOM, HEADS_K, COLUMNS, device=device)
    angles = torch.outer(torch.arange(positions), 0.5 ** torch.arange(COLUMNS // 2)).to(device)
    options = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16(), "causal": causal}
    options["cache_seqlens"] = torch.tensor([0, 5, ROOM - 1], dtype=torch.int32, device=device)
    found, expected = (
        flash_attn_with_kvcache(q, *both, new, new, **options, return_softmax_lse=True)
        for both in (narrow, [cache.bfloat16() for cache in narrow])
    )
    same(found, expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k_descale": torch.ones(2, HEADS_K)}, r"k_descale is \(2, 2\) torch.float32 on cpu; with q it is a number"),
        ({"v_descale": SCALES.double()}, r"v_descale is \(3, 2\) torch.float64 on cpu"),
        ({"v_descale": 0 * SCALES}, "a scale is a positive, finite number"),
        ({"k_descale": "1"}, "k_descale='1' is of type str; it should be a number"),
        (
            {"k_descale": torch.ones(3, 1, HEADS_K, 1)},
            r"k_descale is \(3, 1, 2, 1\) torch.float32 on cpu; with",
        ),
        ({"v_descale": 0.0}, "a scale is a positive, finite number"),
        ({"v_cache": normal(3, ROOM, HEADS_K, COLUMNS)}, "v_cache is torch.bfloat16 on cpu; like k_cache it should be"),
        ({"k": normal(3, 1, HEADS_K, COLUMNS).to(FP8)}, "k is .* torch.float8_e4m3fn on cpu; with the cache it is"),
    ],
)
def test_what_is_refused(given, message):
    k, v = caches()
    more = {"v": normal(3, 1, HEADS_K, COLUMNS)} if "k" in given else {}
    with pytest.raises(UnsupportedProblemError, match=message):
        flash_attn_with_kvcache(
            normal(3, 1, HEADS, COLUMNS), **{"k_cache": k, "v_cache": v, "cache_seqlens": LENGTHS, **more, **given}
        )


def test_scales_of_a_cache_in_16_bits_are_refused():
    cache = normal(3, ROOM, HEADS_K, COLUMNS)
    with pytest.raises(UnsupportedProblemError, match=r"k_descale is given, but k_cache is torch.bfloat16"):
        flash_attn_with_kvcache(normal(3, 1, HEADS, COLUMNS), cache, cache, k_descale=SCALES)
