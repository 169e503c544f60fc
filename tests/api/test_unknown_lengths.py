"""Sizes that torch.compile and torch.export learn only when a program runs: lengths out of tensors, any batch."""

import pytest
import torch

import flashladder
from flashladder import attention, flash_attn_varlen_func, flash_attn_with_kvcache, flash_mla_with_kvcache
from flashladder.common.errors import UnsupportedProblemError

BF16, INT = torch.bfloat16, torch.int32


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def inputs(batch):
    """Tensors of a batch, by name: sequences, packed ones, caches, pages, latents, and what goes with them."""
    found = {"q": drawn(batch, 1, 2, 64), "c": drawn(batch, 32, 2, 64), "narrow": drawn(batch, 16, 2, 40)}
    found |= {"x": drawn(10 * batch, 2, 64), "cu": torch.arange(batch + 1, dtype=INT) * 10}
    found |= {"pages": drawn(2 * batch, 16, 2, 64), "table": torch.arange(2 * batch, dtype=INT).view(batch, 2)}
    found |= {"lengths": torch.arange(batch, dtype=INT) % 4 + 9, "fp8": found["c"].to(torch.float8_e4m3fn)}
    found |= {"latents": drawn(batch, 64, 1, 576), "rows": drawn(batch, 1, 16, 576)}
    return found | {"slopes": torch.ones(batch, 2)}


def longest(cu):
    return (cu[1:] - cu[:-1]).max().item()


def flash_mla(rows, latents, table, lengths):
    metadata = flashladder.get_mla_metadata(lengths)
    return flash_mla_with_kvcache(rows, latents, table, lengths, 512, *metadata)


COMPILED = {
    "packed": lambda x, cu: flash_attn_varlen_func(x, x, x, cu, cu, longest(cu), longest(cu), window_size=(9, 0)),
    "as many rows as needed": lambda x, cu: flashladder.packed_attention(
        x[: cu[-1].item()], x, x, cu, cu, longest(cu), longest(cu)
    ),
    "packed pages": lambda x, pages, cu, table: flash_attn_varlen_func(
        x, pages, pages, cu, cu, longest(cu), longest(cu), block_table=table
    ),
    "as many keys as needed": lambda c, lengths: flashladder.flash_attn_func(
        c, c[:, : lengths.max().item()], c[:, : lengths.max().item()], window_size=(7, lengths.min().item())
    ),
    "a length": lambda q, c, lengths: flash_attn_with_kvcache(q, c, c, cache_seqlens=lengths.max().item()),
    "a part of a cache": lambda q, c, lengths: flash_attn_with_kvcache(
        q, c[:, : lengths.max().item()], c[:, : lengths.max().item()], cache_seqlens=lengths
    ),
    "some new keys": lambda q, c, lengths: flash_attn_with_kvcache(
        q, c, c.clone(), *(c[:, : lengths.min().item()].clone() for _ in range(2)), cache_seqlens=lengths
    ),
    "some pages": lambda q, pages, table, lengths: flash_attn_with_kvcache(
        q, pages, pages, cache_seqlens=lengths, block_table=table[:, : lengths.min().item() // 8], num_splits=1
    ),
    "latents": lambda rows, latents, table, lengths: flash_mla(
        rows, latents, table[:, : lengths.min().item() // 8] // 2, lengths
    ),
}
EXPORTED = {
    "attention": lambda narrow, slopes: attention(narrow, narrow, narrow, causal=True, alibi_slopes=slopes),
    "packed": lambda x, cu: flash_attn_varlen_func(x, x, x, cu, cu, 10, 10),
    "packed pages": lambda x, pages, cu, table: flash_attn_varlen_func(
        x, pages, pages, cu, cu, 10, 10, block_table=table
    ),
    "a length": lambda q, c: flash_attn_with_kvcache(q, c, c, cache_seqlens=9),
    "a cache by number": lambda q, c, lengths: flash_attn_with_kvcache(
        q, c, c, cache_seqlens=lengths, cache_batch_idx=lengths - 9, cache_leftpad=lengths // 9
    ),
    "new keys in pages": lambda q, pages, table, lengths: flash_attn_with_kvcache(
        q, pages, pages.clone(), q, q, cache_seqlens=lengths, block_table=table
    ),
    "new keys of 8 bits": lambda q, fp8, lengths: flash_attn_with_kvcache(
        q, fp8, fp8.clone(), q, q, cache_seqlens=lengths
    ),
    "latents": lambda rows, latents, table, lengths: flash_mla(rows, latents, table // 2, lengths),
}


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


def called_with(call, batch):
    """The tensors that a call names."""
    tensors = inputs(batch)
    return tuple(tensors[name] for name in call.__code__.co_varnames[: call.__code__.co_argcount])


def require_equal(found, wanted):
    pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, wanted)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.fixture
def captures():
    """torch.compile keeps numbers that are read out of tensors in the graph."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@torch.no_grad()
@pytest.mark.parametrize("call", COMPILED.values(), ids=COMPILED)
def test_lengths_out_of_tensors_are_compiled(call, captures):
    tensors = called_with(call, 3)
    require_equal(torch.compile(call, backend="eager", fullgraph=True)(*tensors), call(*tensors))


@torch.no_grad()
def test_bounds_are_checked_when_the_program_runs(captures):
    short = torch.compile(
        lambda x, cu: flash_attn_varlen_func(x, x, x, cu, cu, longest(cu) - 4, longest(cu)),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(UnsupportedProblemError, match="max_seqlen_q is 6; sequence 0 of cu_seqlens_q has 10 rows"):
        short(*called_with(COMPILED["packed"], 3))
    long = torch.compile(COMPILED["a length"], backend="eager", fullgraph=True)
    q, c, lengths = called_with(COMPILED["a length"], 3)
    long(q, c, lengths)
    with pytest.raises(RuntimeError, match="<= 32"):
        long(q, c, lengths + 30)


@torch.no_grad()
@pytest.mark.parametrize("call", EXPORTED.values(), ids=EXPORTED)
def test_a_batch_of_any_size_is_exported(call):
    tensors, others = called_with(call, 3), called_with(call, 5)
    any_batch = (tuple({0: torch.export.Dim.AUTO} for _ in tensors),)
    exported = torch.export.export(Module(call), tensors, dynamic_shapes=any_batch)
    require_equal(exported.module()(*others), call(*others))
