"""decode_blocks: of blocks that each row and head of K chose, the exact answer, however the cache lies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder import decode_blocks
from flashladder.common.errors import UnsupportedProblemError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def chosen(shape, num_blocks, seed=0):
    """Some of the blocks, in any order; one of five is none."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(*shape[:3], num_blocks, generator=generator).argsort(-1)[..., : shape[3]]
    return found.where(torch.rand(found.shape, generator=generator) > 0.2, -1).int()


def exact(q, k, v, blocks, size, lengths, causal):
    """O, (batch, seqlen_q, heads, head_dim_v), and the log-sum-exp, with blocks as a mask."""
    _, rows, heads, head_dim = q.shape
    key, group = torch.arange(k.shape[1], device=q.device), heads // k.shape[2]
    own = torch.as_tensor(lengths, device=q.device)[:, None] - torch.arange(rows - 1, -1, -1, device=q.device) * causal
    seen = (blocks[..., None] == key // size).any(-2) & (key < own[:, :, None, None])  # (batch, seqlen_q, heads_k, key)
    k, v, seen = (x.double().repeat_interleave(group, 2) for x in (k, v, seen))
    scores = torch.einsum("bqhd,bkhd->bqhk", q.double(), k) * head_dim**-0.5
    scores = scores.masked_fill(seen == 0, -torch.inf)
    o = torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1).nan_to_num(0), v)
    return o, scores.logsumexp(-1).transpose(1, 2)


def in_pages(cache, page, order):
    """Pages of the sequences, in an order, and their table."""
    batch, seqlen, heads, head_dim = cache.shape
    pages = torch.empty_like(cache).view(-1, page, heads, head_dim)
    pages[order] = cache.reshape(pages.shape)
    return pages, order.view(batch, seqlen // page).int()


def is_near(found, expected):
    for x, y, most in zip(found, expected, (0.02, 1e-4), strict=True):
        assert torch.equal(x.isinf(), y.isinf())
        assert (x - y).nan_to_num(0).abs().max() < most


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [None, 16, 32, 64])
def test_it_is_a_mask_of_blocks(page, device):
    """The last block has some keys only; blocks of 32 keys are of two pages, of one, and two are of a page."""
    q, lengths = drawn(2, 2, 4, 64, device=device), (117, 64)
    k, v = drawn(2, 128, 2, 64, seed=1, device=device), drawn(2, 128, 2, 64, seed=2, device=device)
    blocks = chosen((2, 2, 2, 3), 4).to(device)
    caches = {"k_cache": k, "v_cache": v}
    if page:
        order = torch.randperm(256 // page, generator=torch.Generator().manual_seed(3)).to(device)
        (k_pages, table), (v_pages, _) = (in_pages(x, page, order) for x in (k, v))
        caches = {"k_cache": k_pages, "v_cache": v_pages, "block_table": table}
    given = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device), "causal": True}
    out = torch.empty_like(q)
    found = decode_blocks(q, **caches, blocks=blocks, block_size=32, **given, return_softmax_lse=True, out=out)
    assert found[0] is out
    is_near(found, exact(q, k, v, blocks, 32, lengths, causal=True))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 8), (2, 3)]),
    st.sampled_from([8, 24, 64]),
    st.sampled_from([40, 72, 96]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_sizes(heads, size, seqlen, heads_first, causal, seed):
    heads_k, group = heads
    shape = (2, heads_k, seqlen, 64) if heads_first else (2, seqlen, heads_k, 64)
    k, v = (drawn(*shape, seed=seed + i) for i in (1, 2))
    if heads_first:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    q, lengths = drawn(2, 2, heads_k * group, 64, seed=seed), (seqlen, seed % seqlen + 1)
    num_blocks = -(-seqlen // size)
    blocks = chosen((2, 2, heads_k, num_blocks), num_blocks, seed)
    told = torch.tensor(lengths, dtype=torch.int32)
    found = decode_blocks(q, k, v, blocks, block_size=size, cache_seqlens=told, causal=causal, return_softmax_lse=True)
    is_near(found, exact(q, k, v, blocks, size, lengths, causal))


def test_nothing_of_the_cache_is_copied_and_v_may_be_beside_k():
    """K and V as views of one tensor, and poison behind the last key."""
    both = drawn(1, 64, 2, 2, 64)
    k, v = both[:, :, 0], both[:, :, 1]
    both[:, 50:] = torch.nan
    q, blocks = drawn(1, 1, 4, 64, seed=1), torch.tensor([3, 1]).expand(1, 1, 2, 2)
    found = decode_blocks(q, k, v, blocks, block_size=16, cache_seqlens=50, return_softmax_lse=True)
    is_near(found, exact(q, k[:, :50], v[:, :50], blocks, 16, (50,), causal=False))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_under_torch_compile(dynamic):
    q, cache, blocks = drawn(2, 1, 4, 64), drawn(2, 64, 2, 64, seed=1), chosen((2, 1, 2, 3), 4)
    lengths = torch.tensor([60, 33], dtype=torch.int32)

    def decode(q, blocks, lengths):
        return decode_blocks(q, cache, cache, blocks, block_size=16, cache_seqlens=lengths)

    def decode_of_views(q, blocks, both):
        return decode_blocks(q, both[:, :, 0], both[:, :, 1], blocks, block_size=16)

    both = torch.stack((cache, cache), 2)
    for function, inputs in ((decode, (q, blocks, lengths)), (decode_of_views, (q, blocks, both))):
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        assert torch.equal(compiled(*inputs), function(*inputs))


def test_numbers_that_are_none():
    """However large, and small; a block behind the last key is none, and blocks may be larger than the room."""
    q, cache = drawn(1, 1, 4, 64), drawn(1, 64, 2, 64, seed=1)

    def decoded(*numbers, size=16):
        blocks = torch.tensor(numbers).expand(1, 1, 2, len(numbers))
        return decode_blocks(q, cache, cache, blocks, block_size=size, cache_seqlens=50)

    whole = decoded(0, 1, 2, 3)
    for none in (-1, -(2**63), 4, 2**31 - 1, 2**31, 2**56, 2**60, 2**63 - 1):
        assert torch.equal(decoded(none, 1), decoded(1, -1))
        assert torch.equal(decoded(none, 2, 0, 1, 3), decoded(0, 1, 2, 3, -1))
    assert (decoded(0, size=2**40) - whole).abs().max() < 0.02


def test_a_page_that_is_none_is_the_last_one_as_elsewhere():
    q, pages = drawn(1, 1, 4, 64), drawn(5, 16, 2, 64, seed=1)
    found = [
        decode_blocks(
            q,
            pages,
            pages,
            torch.tensor([0, 1]).expand(1, 1, 2, 2),
            block_size=16,
            cache_seqlens=30,
            block_table=torch.tensor([table], dtype=torch.int32),
        )
        for table in ([0, -1, 99], [0, 4, 99])
    ]
    assert torch.equal(*found)
    none = torch.zeros(1, 0, dtype=torch.int32)
    blocks = torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    assert (decode_blocks(q, pages, pages, blocks, block_table=none) == 0).all()


@pytest.mark.parametrize(("rows", "room", "count"), [(0, 64, 3), (1, 64, 0), (1, 0, 3)], ids=["rows", "blocks", "room"])
def test_there_may_be_none(rows, room, count):
    cache, blocks = drawn(2, room, 2, 64), torch.zeros(2, rows, 2, count, dtype=torch.int32)
    o, lse = decode_blocks(drawn(2, rows, 4, 64), cache, cache, blocks, return_softmax_lse=True)
    assert (o.shape, lse.shape) == ((2, rows, 4, 64), (2, 4, rows))
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_heads(device):
    q, k, v = (drawn(2, n, heads, 64, seed=n, device=device) for n, heads in ((1, 8), (64, 2), (65, 2)))
    k, v = (x[:, :64].to(torch.float8_e4m3fn) for x in (k, v))
    scale = torch.tensor([[0.5, 2.0], [1.5, 1.0]], device=device)
    blocks = chosen((2, 1, 2, 2), 4).to(device)
    found = decode_blocks(q, k, v, blocks, block_size=16, k_descale=scale, v_descale=scale, return_softmax_lse=True)
    k, v = (x.float() * scale[:, None, :, None] for x in (k, v))
    is_near(found, exact(q, k, v, blocks, 16, (64, 64), causal=False))


CACHE = drawn(1, 64, 2, 64)
IN_8_BITS = dict.fromkeys(("k_cache", "v_cache"), CACHE.to(torch.float8_e4m3fn))
TABLE = {"block_table": torch.zeros(1, 1, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"block_size": 0}, "block_size=0: must be at least 1"),
        ({"blocks": torch.zeros(1, 1, 2, 3)}, r"blocks is \(1, 1, 2, 3\) torch.float32; it should be .*int32"),
        ({"blocks": torch.zeros(1, 1, 4, 3).int()}, r"with q and k_cache \(1, 1, 2, 'count'\)"),
        ({"blocks": torch.tensor([[[[1, 2, 1]] * 2]])}, "blocks has number 1 twice"),
        ({"v_cache": torch.zeros(1, 2, 64, 64).bfloat16().transpose(1, 2)}, "should be in one ratio"),
        ({"k_descale": torch.ones(1, 2)}, "k_descale is given, but k_cache is torch.bfloat16"),
        ({**IN_8_BITS, "k_descale": torch.ones(3, 2)}, r"k_descale is \(3, 2\) .*; with q it is a number"),
        ({**IN_8_BITS, "k_descale": torch.ones(2)}, r"k_descale is \(2,\) .*; with q it is a number"),
        ({**IN_8_BITS, **TABLE, "v_descale": torch.ones(1, 1, 2, 1)}, "v_descale are of pages; here"),
        ({"block_table": torch.full((1, 4), 99).int()}, "block_table has page 99; the cache has 1"),
        ({"q": drawn(1, 1, 4, 80), **dict.fromkeys(("k_cache", "v_cache"), drawn(1, 64, 2, 80))}, "head_dim 80"),
        ({"out": drawn(1, 1, 4, 32)}, "out is"),
        ({"out": CACHE[:, :1].expand(1, 1, 2, 64)[:, :, :1].expand(1, 1, 4, 64)}, "out has strides"),
        ({"out": CACHE[:, :2].reshape(1, 1, 4, 64)}, "out shares memory with k_cache"),
    ],
)
def test_what_is_refused(more, named):
    given = {"q": drawn(1, 1, 4, 64), "k_cache": CACHE, "v_cache": CACHE, "blocks": torch.zeros(1, 1, 2, 1).int()}
    with pytest.raises(UnsupportedProblemError, match=named):
        decode_blocks(**given | {"block_size": 16} | more)
