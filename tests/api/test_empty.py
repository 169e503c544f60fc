"""Calls with nothing to compute: no sequences, rows, keys or heads. Results are empty, or of rows without keys."""

import math

import pytest
import torch

from flashladder import (
    attention,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
    packed_attention,
)
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.fp8 import FP8
from flashladder.common.runtime import fast_path
from flashladder.tests.support import fake_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, ROWS, KEYS, HEADS, HEADS_K, COLUMNS = 2, 5, 7, 4, 2, 64
SINKS = {"sinks": torch.full((HEADS,), 3.0)}
FEATURES = {"alibi_slopes": torch.ones(HEADS), "softcap": 2.0, "window": (3, None)}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def numbers(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def require_empty(call, shapes, sink=-math.inf):
    """O is 0, the log-sum-exp that of rows without keys; gradients are 0."""
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    with torch.no_grad():
        o, lse = call(*tensors)
    assert o.shape[-1] == tensors[2].shape[-1]
    assert not o.any()
    assert (lse == sink).all()
    trained = [tensor.requires_grad_() for tensor in tensors]
    again = call(*trained)
    assert all(map(torch.equal, again, (o, lse)))
    (again[0].sum() + again[1].sum()).backward()
    assert all(tensor.grad.shape == tensor.shape and not tensor.grad.any() for tensor in trained)
    return o, lse


@pytest.mark.parametrize("head_dim", [COLUMNS, 80])
@pytest.mark.parametrize("options", [{}, SINKS, FEATURES, {"dropout_p": 0.5, "causal": True}, {"deterministic": True}])
@pytest.mark.parametrize("sizes", [(0, 5, 7, 4, 2), (2, 0, 7, 4, 2), (2, 5, 0, 4, 2), (2, 5, 7, 0, 0), (0, 0, 0, 4, 2)])
def test_attention(sizes, options, head_dim):
    batch, rows, keys, heads, heads_k = sizes
    options = {name: x[:heads] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    shapes = (batch, rows, heads, head_dim), *[(batch, keys, heads_k, head_dim)] * 2
    sink = 3.0 if "sinks" in options else -math.inf
    o, lse = require_empty(lambda *qkv: attention(*qkv, return_lse=True, **options), shapes, sink)
    assert (o.shape, lse.shape) == (shapes[0], (batch, heads, rows))


@pytest.mark.parametrize("options", [{}, SINKS])
@pytest.mark.parametrize(
    ("starts", "totals"),
    [
        (((0,), (0,)), (0, 0)),
        (((0,), (0,)), (3, 4)),
        (((0, 0), (0, 0)), (0, 0)),
        (((0, 0, 0), (0, 3, 7)), (0, 7)),
        (((0, 2, 5), (0, 0, 0)), (5, 0)),
    ],
)
def test_packed_sequences(starts, totals, options):
    bounds = *(numbers(*each) for each in starts), 3, 4
    shapes = (totals[0], HEADS, COLUMNS), *[(totals[1], HEADS_K, COLUMNS)] * 2
    sink = 3.0 if options else -math.inf
    o, lse = require_empty(lambda *qkv: packed_attention(*qkv, *bounds, return_lse=True, **options), shapes, sink)
    assert (o.shape, lse.shape) == (shapes[0], (HEADS, totals[0]))
    flash = lambda *qkv: flash_attn_varlen_func(*qkv, *bounds, return_attn_probs=True)[:2]  # noqa: E731
    require_empty(flash, shapes)


def test_on_a_gpu_nothing_is_launched(monkeypatch):
    """In C++ neither, also where a kernel stands ready for calls of such a kind."""
    driver = fake_cuda.for_attention(monkeypatch)
    q, k = torch.zeros(BATCH, ROWS, HEADS, COLUMNS).bfloat16(), torch.zeros(BATCH, KEYS, HEADS_K, COLUMNS).bfloat16()
    monkeypatch.setattr(fast_path, "extension", fast_path.made())
    lengths = numbers(3, 4)
    for _ in range(3):
        attention(q, k, k)
        flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths)
    driver.launches.clear()
    assert not attention(q[:0], k[:0], k[:0]).numel()
    assert not attention(q[:, :0], k, k).numel()
    assert not attention(q, k[:, :0], k[:, :0]).any()
    assert not flash_attn_with_kvcache(q[:0], k[:0], k[:0], cache_seqlens=lengths[:0]).numel()
    assert not flash_attn_with_kvcache(q[:, :0], k, k, cache_seqlens=lengths).numel()
    assert not flash_attn_with_kvcache(q, k[:, :0], k[:, :0], cache_seqlens=0 * lengths).any()
    assert not driver.launches


CACHES = {  # q, a cache, and numbers that go with them
    "no sequences": ((0, 1), (0, 9), {"cache_seqlens": numbers()}),
    "no rows": ((2, 0), (2, 9), {"cache_seqlens": numbers(3, 4)}),
    "no room": ((2, 3), (2, 0), {"cache_seqlens": numbers(0, 0)}),
    "no pages": ((2, 3), (0, 9), {"cache_seqlens": numbers(0, 0), "block_table": numbers([-1], [-1])}),
    "no pages of a sequence": ((2, 3), (4, 9), {"cache_seqlens": 0, "block_table": torch.zeros(2, 0).int()}),
    "no sequences of a larger cache": ((0, 1), (4, 9), {"cache_seqlens": 3, "cache_batch_idx": numbers()}),
}


@pytest.mark.parametrize("head_dim", [COLUMNS, 80])
@pytest.mark.parametrize(("rows", "room", "given"), CACHES.values(), ids=CACHES)
def test_caches(rows, room, given, head_dim):
    q, cache = torch.zeros(*rows, HEADS, head_dim).bfloat16(), torch.zeros(*room, HEADS_K, head_dim).bfloat16()
    o, lse = flash_attn_with_kvcache(q, cache, cache, **given, return_softmax_lse=True)
    assert (o.shape, lse.shape) == (q.shape, (rows[0], HEADS, rows[1]))
    assert not o.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("given", [name for name in CACHES if "block_table" in CACHES[name][2]])
def test_latents(given):
    """The log-sum-exp of a row without keys is FlashMLA's."""
    rows, room, numbers_of = CACHES[given]
    q, cache = torch.zeros(*rows, 16, 576).bfloat16(), torch.zeros(*room, 1, 576).bfloat16()
    for batch in (2, 0):
        table = numbers_of["block_table"][:batch]
        o, lse = flash_mla_with_kvcache(q[:batch], cache, table, torch.zeros(batch).int(), 512)
        assert (o.shape, lse.shape) == ((batch, rows[1], 16, 512), (batch, 16, rows[1]))
        assert not o.any()
        assert (lse == math.inf).all()


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_new_keys(narrow, rotary, device):
    """None of them, where q turns all the same; and some, which are written though there are no rows."""
    q, new = normal(2, 3, HEADS, COLUMNS, device=device), normal(2, 2, HEADS_K, COLUMNS, seed=1, device=device)
    angles = torch.rand(9, 16, device=device)
    tables = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()} if rotary else {}
    options = {"cache_seqlens": numbers(3, 7, device=device), "causal": True}

    def called(rows, keys):
        caches = [normal(2, 9, HEADS_K, COLUMNS, seed=seed, device=device) for seed in (2, 3)]
        caches = [cache.to(FP8) if narrow else cache for cache in caches]
        before = [cache.clone() for cache in caches]
        o = flash_attn_with_kvcache(q[:, :rows], *caches, new[:, :keys], new[:, :keys], **tables, **options)
        return o, [cache.float() for cache in caches], [cache.float() for cache in before]

    o, caches, before = called(3, 0)
    assert all(map(torch.equal, caches, before))
    narrowed = [cache.to(FP8 if narrow else torch.bfloat16) for cache in before]
    assert torch.equal(o, flash_attn_with_kvcache(q, *narrowed, **options)) != rotary
    none, caches, _ = called(0, 2)
    _, written, before = called(3, 2)
    assert none.shape == (2, 0, HEADS, COLUMNS)
    assert all(map(torch.equal, caches, written))
    assert not torch.equal(written[0], before[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """By fake tensors."""
    compiled = torch.compile(lambda q, k: flash_attn_func(q, k, k) * 2, backend="aot_eager", dynamic=dynamic)
    for rows, keys in ((0, 7), (5, 0), (0, 0)):
        q, k = (torch.zeros(2, n, HEADS, COLUMNS).bfloat16().requires_grad_() for n in (rows, keys))
        o = compiled(q, k)
        o.sum().backward()
        assert o.shape == q.shape == q.grad.shape
        assert not o.any()
        assert not q.grad.any()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (
            ((0, 5, 4, 64), (2, 7, 2, 64), (2, 7, 2, 64)),
            r"k is \(2, 7, 2, 64\) .*; with .* it is \(0, 7,",
        ),
        (
            ((2, 0, 4, 64), (2, 7, 2, 64), (2, 6, 2, 64)),
            r"v is \(2, 6, 2, 64\) .*; with .* it is \(2, 7,",
        ),
        (((2, 5, 0, 64), (2, 7, 2, 64), (2, 7, 2, 64)), "q has 0 heads, k 2"),
        (((2, 0, 4, 0), (2, 7, 2, 0), (2, 7, 2, 0)), "head_dim=0: must be at least 1"),
        (((2, 0, 4, 600), (2, 7, 2, 600), (2, 7, 2, 600)), "head_dim"),
        (((2, 0, 3, 64), (2, 7, 2, 64), (2, 7, 2, 64)), "num_heads=3 must be a multiple of num_heads_k=2"),
    ],
)
def test_what_is_wrong_is_refused_all_the_same(shapes, words):
    with pytest.raises(UnsupportedProblemError, match=words):
        attention(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))
