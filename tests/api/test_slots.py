"""reshape_and_cache: keys to slots of pages, as engines write them, and what it refuses."""

import re

import pytest
import torch

from flashladder import reshape_and_cache
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.fp8 import FP8, quantised
from flashladder.common.problem.rotary import Rotary

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS_K, COLUMNS, PAGE = 2, 64, 16
SLOTS = (5, 33, -1, 79, 16)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def written(cache, keys):
    """The cache with keys at their slots."""
    flat = cache.clone().flatten(0, 1)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            flat.view(torch.uint8)[slot] = keys[token].view(torch.uint8)
    return flat.view(cache.shape)


def same(cache, expected):
    return torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("fp8", [False, True])
def test_keys_to_slots(fp8, device):
    """Of a view of q, k and v in one tensor; caches of K and V in one tensor too. K is turned, V is not."""
    qkv = normal(5, 8, COLUMNS).to(device)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    both = normal(5, 2, PAGE, HEADS_K, COLUMNS, seed=1).to(device, FP8 if fp8 else torch.bfloat16)
    angles = torch.outer(torch.arange(50), 0.5 ** torch.arange(8)).to(device)
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    positions = torch.tensor([0, 7, 3, 49, 20], device=device)
    wanted = [Rotary(*tables, True).turned(k[None], positions[None])[0], v]
    scales = {"k_descale": 0.05, "v_descale": torch.tensor([0.1], device=device)} if fp8 else {}
    if fp8:
        units = [torch.full((HEADS_K,), unit, device=device) for unit in (0.05, 0.1)]
        wanted = [quantised(*each) for each in zip(wanted, units, strict=True)]
    expected = [written(cache, keys) for cache, keys in zip(both.unbind(1), wanted, strict=True)]
    turned = {"rotary_cos": tables[0], "rotary_sin": tables[1], "positions": positions}
    reshape_and_cache(k, v, *both.unbind(1), torch.tensor(SLOTS, device=device), **turned, **scales)
    assert all(same(cache.contiguous(), each) for cache, each in zip(both.unbind(1), expected, strict=True))


def test_no_tokens():
    cache, none = normal(2, PAGE, HEADS_K, COLUMNS), normal(0, HEADS_K, COLUMNS)
    before = cache.clone()
    reshape_and_cache(none, none, cache, cache.clone(), torch.empty(0, dtype=torch.int64))
    assert same(cache, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": normal(5, 1, HEADS_K, COLUMNS)}, "k has shape (5, 1, 2, 64); packed, it is (total, heads, head_dim)"),
        ({"v": normal(4, HEADS_K, COLUMNS)}, "v is (4, 2, 64) torch.bfloat16 on cpu; it should be (5, 2, 64)"),
        (
            {"slot_mapping": torch.zeros(5).int()},
            "slot_mapping is (5,) torch.int32 on cpu; it should be (5,)",
        ),
        ({"k_cache": normal(5, PAGE, HEADS_K, COLUMNS).half()}, "k_cache is torch.float16 on cpu; like q it should be"),
        ({"k_descale": 1.0}, "k_descale is given, but k_cache is torch.bfloat16"),
        ({"positions": torch.zeros(5).long()}, "rotary_cos, rotary_sin and positions are given together"),
        ({"v_cache": "itself"}, "k_cache shares memory with v_cache"),
    ],
)
def test_what_is_refused(changes, message):
    cache = normal(5, PAGE, HEADS_K, COLUMNS)
    given = {"k": normal(5, HEADS_K, COLUMNS), "v": normal(5, HEADS_K, COLUMNS), "k_cache": cache}
    given |= {"v_cache": cache.clone(), "slot_mapping": torch.tensor(SLOTS)} | changes
    if given["v_cache"] == "itself":
        given["v_cache"] = cache
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        reshape_and_cache(**given)


@pytest.mark.gpu
def test_a_graph_reads_slots_anew():
    k, cache = normal(5, HEADS_K, COLUMNS).cuda(), normal(5, PAGE, HEADS_K, COLUMNS).cuda()
    other, slots = cache.clone(), torch.full((5,), -1, device="cuda")
    reshape_and_cache(k, k, cache, other, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reshape_and_cache(k, k, cache, other, slots)
    expected = written(cache, k)
    slots.copy_(torch.tensor(SLOTS))
    graph.replay()
    assert same(cache, expected)
    assert same(other, expected)
