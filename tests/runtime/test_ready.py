"""What stands ready is of kinds, which have no sizes: sizes that are new take no memory, and compile nothing."""

import pytest
import torch

from flashladder import flash_attn_varlen_func, flash_attn_with_kvcache, flash_mla_with_kvcache
from flashladder.common import catalog
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import ready
from flashladder.tests.support import fake_cuda

HEADS, HEADS_K, COLUMNS = 4, 2, 64


@pytest.fixture
def driver(monkeypatch):
    return fake_cuda.for_attention(monkeypatch)


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def append(rows):
    """As a prompt in chunks, or a draft that is verified."""
    caches, new = [bf16(1, 600, HEADS_K, COLUMNS) for _ in range(2)], bf16(1, rows, HEADS_K, COLUMNS)
    flash_attn_with_kvcache(bf16(1, rows, HEADS, COLUMNS), *caches, new, new, cache_seqlens=0, causal=True)


def with_pages(num_pages):
    pages, table = bf16(num_pages, 64, HEADS_K, COLUMNS), torch.zeros(1, 4, dtype=torch.int32)
    flash_attn_with_kvcache(bf16(1, 1, HEADS, COLUMNS), pages, pages, cache_seqlens=9, block_table=table)


def with_splits(num_splits):
    cache = bf16(1, 600, HEADS_K, COLUMNS)
    flash_attn_with_kvcache(bf16(1, 1, HEADS, COLUMNS), cache, cache, cache_seqlens=9, num_splits=num_splits)


def with_rows(count):
    """As a server's steps: other sequences with other rows."""
    pages, table = bf16(9, 64, HEADS_K, COLUMNS), torch.zeros(count, 4, dtype=torch.int32)
    rows = torch.arange(count + 1, dtype=torch.int32) * 7 * count
    lengths = {"block_table": table, "seqused_k": rows[1:] % 256}
    flash_attn_varlen_func(bf16(7 * count**2, HEADS, COLUMNS), pages, pages, rows, None, 999, 256, **lengths)


def of_batch(batch):
    cache = bf16(batch, 600, HEADS_K, COLUMNS)
    flash_attn_with_kvcache(bf16(batch, 1, HEADS, COLUMNS), cache, cache, cache_seqlens=9)


@pytest.mark.parametrize("gpu", ["h100", "a100"])
@pytest.mark.parametrize("call", [append, with_pages, with_splits, with_rows, of_batch])
def test_a_new_size_makes_nothing_ready(monkeypatch, call, gpu):
    driver = fake_cuda.for_attention(monkeypatch, gpu)
    call(2)
    before = len(ready.by_kind), len(driver.memory), driver.loads
    for size in range(3, 11):
        call(size)
    assert (len(ready.by_kind), len(driver.memory), driver.loads) == before
    assert len(driver.memory) <= 2  # a workspace, and counters


def test_pages_of_another_size_have_a_kernel_of_their_own(driver):
    """Where it is compiled for that: as those of latents are."""
    q, lengths = bf16(1, 1, 16, 576), torch.tensor([3], dtype=torch.int32)
    for page_size in (64, 256):
        table = torch.zeros(1, 2, dtype=torch.int32)
        flash_mla_with_kvcache(q, bf16(3, page_size, 1, 576), table, lengths, 512)
    assert {each.artifact.config.page_size for each in ready.by_kind.values()} == {64, 256}


SIZES = {"batch": 3, "num_heads": 8, "seqlen_q": 5, "seqlen_k": 100}
OF_DECODE = {"num_splits": 3, "num_pages": 99, "seqlen_new": 7, "rotary_positions": 2000}


@pytest.mark.parametrize("operation", ["forward", "backward", "decode"])
def test_a_kind_has_no_sizes(operation):
    """But that fewer heads of K than of Q are a kind; of decode, what the ladder says of them."""
    usual = {"num_heads_k": 2, "head_dim": 64, "operation": operation}
    options = {"options": {"new_keys": True, "paged": True} if operation == "decode" else {}}
    one = Problem(batch=4, num_heads=4, seqlen_q=7, seqlen_k=200, **usual, **options)
    more = {"options": options["options"] | OF_DECODE} if operation == "decode" else {}
    assert catalog.kind_of(one) == catalog.kind_of(Problem(**SIZES, **usual, **more))


def test_a_rung_for_one_stride_between_rows_is_made_ready_for_each(driver):
    from flashladder.common.api import attention

    for heads in (2, 4):
        q = bf16(1, 128, heads, 128)
        attention(q, q, q, version="16")
    assert {each.artifact.config.row_stride for each in ready.by_kind.values()} == {256, 512}
