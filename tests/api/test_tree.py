"""Draft trees: masks of parents, and rows of flash_attn_with_kvcache that see their own branch."""

import math
import re

import pytest
import torch

from flashladder import flash_attn_with_kvcache, tree_mask
from flashladder.common.errors import UnsupportedProblemError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PARENTS = torch.tensor([[-1, 0, 0, 1, -1, 4], [-1, 0, 1, 2, 3, 4]])
BRANCHES = [[{0}, {0, 1}, {0, 2}, {0, 1, 3}, {4}, {4, 5}], [set(range(row + 1)) for row in range(6)]]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_masks_of_parents(dtype):
    masks = tree_mask(PARENTS.to(dtype))
    assert masks.dtype == torch.int32
    assert masks.tolist() == [[sum(1 << node for node in seen) for seen in of_rows] for of_rows in BRANCHES]


def test_a_chain_of_32():
    """The last bit is the sign's."""
    masks = tree_mask(torch.arange(32)[None] - 1)[0]
    assert masks.tolist() == [(2 << row) - 1 for row in range(31)] + [-1]


@pytest.mark.parametrize("appends", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_see_their_branch(appends, device):
    """All keys before the tree, and of the tree those above them."""
    before, rows, room = (0, 40), 6, 64
    q = normal(2, rows, 4, 64)
    k, v = (normal(2, room, 2, 64, seed=seed) for seed in (1, 2))
    for cache in (k, v):
        for sequence, length in enumerate(before):
            cache[sequence, length + rows :] = math.nan
    wanted = torch.empty(2, rows, 4, 64)
    for sequence, length in enumerate(before):
        for row in range(rows):
            keys = [*range(length), *(length + node for node in sorted(BRANCHES[sequence][row]))]
            alone = (x[sequence : sequence + 1, keys] for x in (k, v))
            wanted[sequence, row] = flash_attn_with_kvcache(q[sequence : sequence + 1, row : row + 1], *alone)[0, 0]
    new = [torch.stack([x[i, at : at + rows] for i, at in enumerate(before)]).to(device) for x in (k, v)]
    lengths = torch.tensor(before, dtype=torch.int32, device=device) + (0 if appends else rows)
    options = {"cache_seqlens": lengths, "causal": True, "tree_mask": tree_mask(PARENTS).to(device)}
    o = flash_attn_with_kvcache(q.to(device), k.to(device), v.to(device), *(new if appends else ()), **options)
    torch.testing.assert_close(o.float().cpu(), wanted, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[0]], "parents is of type list"),
        (torch.zeros(2, 33).int(), "parents is (2, 33) torch.int32; it should be (batch, tokens)"),
        (torch.zeros(2, 3), "parents is (2, 3) torch.float32; it should be"),
        (torch.tensor([[-1, 1]]), "parents=[[-1, 1]]: each is a token before its own, or -1 for none"),
        (torch.tensor([[-2, 0]]), "parents=[[-2, 0]]: each is a token before"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        tree_mask(parents)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tree_mask": torch.zeros(1, 3).int()},
            "tree_mask is (1, 3) torch.int32 on cpu; with q it is (1, 2) torch.int32",
        ),
        ({"tree_mask": torch.zeros(1, 2)}, "tree_mask is (1, 2) torch.float32 on cpu; with q it is (1, 2) torch.int32"),
        ({"causal": False}, "tree=true takes causal=true"),
    ],
)
def test_what_is_no_mask_is_refused(changes, message):
    q, k = normal(1, 2, 2, 64), normal(1, 9, 2, 64)
    given = {"tree_mask": torch.ones(1, 2).int(), "causal": True, **changes}
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        flash_attn_with_kvcache(q, k, k, **given)
