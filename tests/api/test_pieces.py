"""More sequences or heads than CUDA's grids take, in pieces, to the same bits as at once: a small limit stands in."""

from types import SimpleNamespace

import pytest
import torch

from flashladder import attention, flash_attn_with_kvcache, flash_mla_with_kvcache, packed_attention
from flashladder.common.api import operator, pieces
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.inputs import allocate
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import fast_path, launch
from flashladder.common.runtime.launch import GridError
from flashladder.tests.support import fake_cuda

MANY = 70_000
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def in_pieces(monkeypatch):
    """What a call gives with a lower limit; it must be launched in pieces."""

    def called(call):
        halved = []
        noting = lambda *given: halved.append(given) or pieces.halves(*given)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(launch, "MAX_GRID_YZ", 2)
            patch.setattr(operator, "pieces", SimpleNamespace(halves=noting))
            found = call()
        assert halved
        return found

    return called


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


def trained(call, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    o, lse = call(*inputs)
    return o, lse, *torch.autograd.grad((o, lse), inputs, (normal(*o.shape), normal(*lse.shape).float()))


@pytest.mark.parametrize("sizes", [(3, 1, 1), (1, 6, 3)], ids=["sequences", "heads"])
@pytest.mark.slow
def test_both_passes(sizes, in_pieces):
    batch, heads, heads_k = sizes
    q, k, v = normal(batch, 5, heads, 64), normal(batch, 7, heads_k, 64, seed=1), normal(batch, 7, heads_k, 64, seed=2)
    slopes, sinks = torch.rand(batch, heads), torch.rand(heads)

    def call():
        options = {"alibi_slopes": slopes, "return_lse": True, "version": "24"}
        plain = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, **options)  # noqa: E731
        return trained(plain, q, k, v, sinks)

    assert all(map(torch.equal, in_pieces(call), call()))


@pytest.mark.slow
def test_packed_sequences(in_pieces):
    """Of which some have no rows or no keys; behind the last one are rows of none."""
    q, k, sinks = normal(11, 4, 64), normal(10, 2, 64, seed=1), torch.rand(4)
    starts, slopes = (numbers(0, 3, 3, 9), numbers(0, 5, 8, 8)), torch.rand(3, 4)

    def call():
        options = {"alibi_slopes": slopes, "return_lse": True, "version": "24"}
        packed = lambda q, k, v, sinks: packed_attention(q, k, v, *starts, 6, 5, sinks=sinks, **options)  # noqa: E731
        return trained(packed, q, k, k, sinks)

    assert all(map(torch.equal, in_pieces(call), call()))


@pytest.mark.parametrize("paged", [False, True])
def test_decode(paged, in_pieces):
    q, new = normal(3, 2, 4, 64), normal(3, 2, 2, 64, seed=1)
    options = {"block_table": numbers([2, 0], [1, 3], [5, 4])} if paged else {}

    def call():
        caches = [normal(*((6, 8) if paged else (3, 16)), 2, 64, seed=seed) for seed in (2, 3)]
        options.update(cache_seqlens=numbers(0, 5, 14), num_splits=1, return_softmax_lse=True)
        return *flash_attn_with_kvcache(q, *caches, new, new, **options), *caches

    assert all(map(torch.equal, in_pieces(call), call()))


def test_latents():
    """By their views alone: the emulator takes long."""
    sizes = {"num_heads": 4, "num_heads_k": 1, "seqlen_q": 1, "seqlen_k": 64, "head_dim": 576, "head_dim_v": 512}
    whole = Problem(operation="mla", batch=3, **sizes, options={"num_pages": 7})
    tensors, rows = allocate(whole).by_name, []
    for piece, parts in pieces.halves(whole, tensors, GridError("too large")):
        assert {name: tuple(x.shape) for name, x in parts.items()} == {n: x.shape for n, x in piece.tensors.items()}
        assert parts["k_cache"].data_ptr() == tensors["k_cache"].data_ptr()
        rows += [(parts[name].data_ptr(), parts[name].nbytes) for name in ("q", "block_table", "o", "lse")]
    assert piece.batch == 2
    for (begin, size), (behind, _) in zip(rows[:4], rows[4:], strict=True):
        assert behind == begin + size


def test_what_has_no_pieces(monkeypatch):
    monkeypatch.setattr(launch, "MAX_GRID_YZ", 2)
    q = normal(3, 5, 1, 64).requires_grad_()
    for tensor in (q, q.detach()):
        with pytest.raises(UnsupportedProblemError, match=r"dropout_p=0\.5 with batch=3 .* up to 2 sequences"):
            attention(tensor, tensor, tensor, dropout_p=0.5)
    x = normal(1, 5, 3, 64)
    with pytest.raises(UnsupportedProblemError, match="num_heads=3 along y: a launch takes at most 2"):
        attention(x, x[:, :, :1], x[:, :, :1])


@pytest.mark.parametrize("way", ["Python", "C++"])
def test_launches_on_a_gpu(way, monkeypatch):
    driver = fake_cuda.for_attention(monkeypatch)
    driver.parts["attention_forward"] = (fake_cuda.PARAMS_BYTES,)
    monkeypatch.setattr(fast_path, "extension", fast_path.made() if way == "C++" else None)
    q = torch.zeros(MANY, 1, 1, 64, dtype=torch.bfloat16)
    attention(q[:2], q[:2], q[:2], version="24")
    driver.launches.clear()
    attention(q, q, q, version="24")
    assert [each.shape[:3] for each in driver.launches] == [[1, 1, MANY // 2]] * 2
    addresses = [int.from_bytes(each.arguments[0][:8], "little") for each in driver.launches]
    assert addresses == [q.data_ptr(), q.data_ptr() + q.nbytes // 2]


@pytest.mark.gpu
def test_many_on_a_gpu():
    """The first and the last of them as by themselves."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(MANY, 8, 2, 64, device="cuda").bfloat16() for _ in range(3))
    slopes = torch.rand(2, device="cuda")
    ends = [slice(0, 5), slice(MANY // 2 - 2, MANY // 2 + 3), slice(MANY - 5, MANY)]

    def both(q, k, v, **options):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = attention(*inputs, return_lse=True, deterministic=True, **options)
        return o, lse, *torch.autograd.grad((o, lse), inputs, (o.detach(), lse.detach()))

    for options in ({}, {"alibi_slopes": slopes, "causal": True}):
        found = both(q, k, v, **options)
        for part in ends:
            alone = both(q[part], k[part], v[part], **options)
            assert all(torch.equal(x[part], y) for x, y in zip(found, alone, strict=True))
    starts = torch.arange(0, 8 * MANY + 1, 8, dtype=torch.int32, device="cuda")
    packed = [x.flatten(0, 1).requires_grad_() for x in (q, k, v)]
    o = packed_attention(*packed, starts, starts, 8, 8, alibi_slopes=slopes, causal=True, deterministic=True)
    made = torch.autograd.grad(o, packed, o.detach())
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*inputs, alibi_slopes=slopes, causal=True, deterministic=True)
    expected = torch.autograd.grad(o, inputs, o.detach())
    for x, y in zip(made, expected, strict=True):
        torch.testing.assert_close(x.view_as(y), y, rtol=2**-6, atol=2**-6)
    lengths = torch.randint(1, 8, (MANY,), device="cuda", dtype=torch.int32)

    def decoded(part):
        new = k[part, :1], v[part, :1]
        caches = k[part].clone(), v[part].clone()
        return flash_attn_with_kvcache(q[part, :1], *caches, *new, cache_seqlens=lengths[part], num_splits=1)

    found = decoded(slice(None))
    assert all(torch.equal(found[part], decoded(part)) for part in ends)
    latents, rows = torch.randn(64, 64, 1, 576, device="cuda").bfloat16(), torch.randn(MANY, 1, 4, 576, device="cuda")
    table = torch.randint(0, 64, (MANY, 1), device="cuda", dtype=torch.int32)

    def of_latents(part):
        return flash_mla_with_kvcache(rows[part].bfloat16(), latents, table[part], lengths[part], 512)[0]

    found = of_latents(slice(None))
    for part in ends:
        torch.testing.assert_close(found[part], of_latents(part), rtol=2**-6, atol=2**-6)
