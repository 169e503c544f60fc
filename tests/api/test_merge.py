"""merge_states: any split of the keys gives what attention over all of them gives, whatever a side does not see."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashladder import attention, merge_states
from flashladder.common.errors import UnsupportedProblemError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def exact(scores, v):
    """(o, lse) by the textbook, in fp64, of scores (batch, heads, rows, keys) and values (batch, keys, heads, dim)."""
    lse = scores.double().logsumexp(-1)
    probabilities = torch.exp(scores.double() - lse.nan_to_num(neginf=0)[..., None])
    return torch.einsum("bhrk,bkhd->brhd", probabilities, v.double()), lse


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    sides=st.tuples(st.integers(0, 4), st.integers(1, 4)),
    offsets=st.tuples(*[st.sampled_from([-1e4, -90.0, 0.0, 3.0, 90.0, 1e4])] * 2),
    hidden=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    wide=st.booleans(),
)
def test_a_split_of_the_keys_makes_no_difference(seed, rows, sides, offsets, hidden, dtype, wide):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, rows, sum(sides), generator=generator)
    scores += torch.tensor(offsets).repeat_interleave(torch.tensor(sides))
    scores.masked_fill_(torch.rand(scores.shape, generator=generator) < hidden, -math.inf)
    v = torch.randn(2, sum(sides), 3, 8, generator=generator)
    (o_a, lse_a), (o_b, lse_b) = map(exact, scores.split(sides, -1), v.split(sides, 1))
    kept = torch.float32 if wide else dtype
    o, lse = merge_states(o_a.to(kept), lse_a.float(), o_b.to(dtype), lse_b.float())
    whole, whole_lse = exact(scores, v)
    eps = torch.finfo(dtype).eps
    near = 1e-6 * max(1, float(lse_a.nan_to_num(neginf=0).abs().max()), float(lse_b.nan_to_num(neginf=0).abs().max()))
    torch.testing.assert_close(lse.double(), whole_lse, rtol=0, atol=near)
    torch.testing.assert_close(o.double(), whole, rtol=0, atol=2 * (eps + near) * float(v.abs().max()))
    assert (o.dtype, lse.dtype) == (kept, torch.float32)


def test_partial_results_of_attention_make_the_whole(device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 48, 2, 64, generator=generator).to(device, torch.bfloat16)
    near, far = (attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 16), slice(16, 48)))
    o, lse = merge_states(*near, *far)
    whole, whole_lse = attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(o, whole, rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("nothing", [-math.inf, math.inf], ids=["ours", "flash-attn's"])
def test_what_a_side_does_not_see_is_not_read(device, nothing):
    seen, unseen = torch.full((1, 2, 1, 4), 3.0, device=device), torch.full((1, 2, 1, 4), math.nan, device=device)
    lse_seen, lse_unseen = torch.full((1, 1, 2), 5.0, device=device), torch.full((1, 1, 2), nothing, device=device)
    for sides in ((seen, lse_seen, unseen, lse_unseen), (unseen, lse_unseen, seen, lse_seen)):
        o, lse = merge_states(*sides)
        assert torch.equal(o, seen)
        assert torch.equal(lse, lse_seen)
    o, lse = merge_states(unseen, lse_unseen, unseen, lse_unseen)
    assert (o == 0).all()
    assert (lse == -math.inf).all()


def test_the_largest_and_the_smallest(device):
    a, b = torch.full((1, 1, 4), 1.0, device=device), torch.full((1, 1, 4), 3.0, device=device)
    for lse_a, lse_b, expected in ((3e38, 3e38, 2), (-3e38, -3e38, 2), (3e38, -3e38, 1), (-3e38, 3e38, 3)):
        rows = [torch.full((1, 1), value, device=device) for value in (lse_a, lse_b)]
        o, lse = merge_states(a, rows[0], b, rows[1])
        assert (o == expected).all()
        assert lse.item() == torch.tensor(max(lse_a, lse_b)).item()


def test_torch_sees_through_it(device):
    o, lse = torch.randn(2, 5, 3, 8, device=device).bfloat16(), torch.randn(2, 3, 5, device=device)
    strided = torch.randn(2, 3, 5, 8, device=device).bfloat16().transpose(1, 2)
    torch.library.opcheck(torch.ops.flashladder.merge_states.default, (strided, lse, o, lse, False))
    torch.library.opcheck(torch.ops.flashladder.merge_states_out.default, (strided, lse, o, lse, False, o.clone()))

    def model(o, lse):
        return merge_states(*merge_states(o * 2, lse, o, lse + 1), o, lse)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(o, lse), model(o, lse)))


@given(seed=st.integers(0, 2**31), parts=st.integers(1, 5), hidden=st.floats(0, 1), wide=st.booleans())
def test_parts_of_tokens_become_one(seed, parts, hidden, wide):
    """As one after the other, and as by the textbook."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 2, 1, parts * 2, generator=generator) * 20
    scores.masked_fill_(torch.rand(scores.shape, generator=generator) < hidden, -math.inf)
    v = torch.randn(3, parts * 2, 2, 8, generator=generator)
    split = [exact(*each) for each in zip(scores.split(2, -1), v.split(2, 1), strict=True)]
    o, lse = (torch.stack(each, 1).float() for each in ([o[:, 0] for o, _ in split], [s[..., 0] for _, s in split]))
    given = o if wide else o.bfloat16()
    merged, merged_lse = merge_states(given, lse)
    whole, whole_lse = exact(scores, v)
    near = 1e-4 if wide else 2 * torch.finfo(torch.bfloat16).eps * float(v.abs().max())
    torch.testing.assert_close(merged_lse.double(), whole_lse[..., 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(merged.double(), whole[:, 0], rtol=0, atol=near)
    assert merged.dtype == given.dtype


@pytest.mark.parametrize("nothing", [-math.inf, math.inf], ids=["ours", "flash-attn's"])
def test_parts_that_see_nothing_are_not_read(device, nothing):
    o, lse = torch.full((2, 3, 1, 4), math.nan, device=device), torch.full((2, 3, 1), nothing, device=device)
    o[0, 1], lse[0, 1] = 3.0, 5.0
    merged, merged_lse = merge_states(o, lse)
    assert merged[:, 0, 0].tolist() == [3.0, 0.0]
    assert merged_lse[:, 0].tolist() == [5.0, -math.inf]
    torch.library.opcheck(torch.ops.flashladder.merge_states.default, (o, lse, None, None, False))


def sides(device, wide=False, rows=5, columns=64):
    """Of 3 heads, of which some see no key."""
    generator = torch.Generator().manual_seed(rows)
    o_a, o_b = (torch.randn(2, rows, 3, columns, generator=generator) for _ in "ab")
    lse_a, lse_b = (torch.randn(2, 3, rows, generator=generator) for _ in "ab")
    lse_a[:, 0], lse_b[0] = -math.inf, math.inf
    o_a[:, :, 0] = math.nan
    first = o_a if wide else o_a.bfloat16()
    return [x.to(device) for x in (first, lse_a, o_b.bfloat16(), lse_b)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_rows_first_and_memory_of_ones_own(device, wide, packed):
    """The same bits in either layout, into a tensor of any strides, or into side a itself."""
    o_a, lse_a, o_b, lse_b = (x[0] if packed else x for x in sides(device, wide))
    expected, sums = merge_states(o_a, lse_a, o_b, lse_b)
    apart, itself = torch.zeros(*o_a.shape[:-1], 128, dtype=o_a.dtype, device=device)[..., :64], o_a.clone()
    for side_a, out in ((o_a, None), (o_a, apart), (itself, itself)):
        o, lse = merge_states(side_a, lse_a.mT, o_b, lse_b.mT.contiguous(), rows_first=True, out=out)
        assert out is None or o is out
        torch.testing.assert_close(o, expected, rtol=0, atol=0)
        torch.testing.assert_close(lse.mT, sums, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 80, 128, 512, 72])
@pytest.mark.parametrize("wide", [False, True])
def test_the_kernel_is_as_torch(wide, columns):
    """72 columns have none."""
    two = sides("cpu", wide, columns=columns)
    o_a, lse_a, o_b, lse_b = two
    parts = torch.stack((o_a[:, 0], o_b[:, 0].to(o_a.dtype)), 1), torch.stack((lse_a[..., 0], lse_b[..., 0]), 1)
    for states in (two, parts):
        found = merge_states(*[x.cuda() for x in states])
        for output, expected in zip(found, merge_states(*states), strict=True):
            torch.testing.assert_close(output.cpu(), expected, rtol=2**-7, atol=1e-5)


@pytest.mark.gpu
def test_a_graph_captures_one_kernel():
    states = sides("cuda", columns=128)
    out = torch.empty_like(states[0])
    expected, _ = merge_states(*states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_states(*states, out=out)
    graph.replay()
    assert torch.equal(out, expected)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        merge_states(*states, out=out)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["attention_merge"]


def test_what_does_not_belong_together_is_refused():
    o, lse = torch.zeros(2, 5, 3, 8), torch.zeros(2, 3, 5)
    for arguments, words in (
        ((o, lse, o[:, :4], lse[..., :4]), "o_b is (2, 4, 3, 8); with o_a it is (2, 5, 3, 8)"),
        ((o, lse.mT, o, lse), "lse_a is (2, 5, 3) torch.float32; with o_a of (2, 5, 3, 8) it is (2, 3, 5)"),
        ((o, lse, o, lse.double()), "lse_b is (2, 3, 5) torch.float64; with o_b of (2, 5, 3, 8) it is (2, 3, 5)"),
        ((o[0, 0], lse, o, lse), "o_a is (3, 8) torch.float32; it should be (batch, seqlen_q, heads, head_dim)"),
        ((o, lse, o.to("meta"), lse), "o_b on meta, lse_b on cpu; they should be on one device"),
        ((o, lse), "lse_a is (2, 3, 5) torch.float32 on cpu; with o_a alone it is (2, 5, 3) torch.float32 on cpu"),
        ((o[0], lse), "o_a is (5, 3, 8) torch.float32; without o_b it should be (tokens, parts, heads, head_dim)"),
        ((o, lse, o), "lse_b=None is of type NoneType; it should be a torch.Tensor"),
        ((None, lse, o, lse), "o_a=None is of type NoneType; it should be a torch.Tensor"),
        ((o, lse, o, "x"), "lse_b='x' is of type str; it should be a torch.Tensor"),
        ((o.clone().requires_grad_(), lse, o, lse), "want a gradient, and merge_states computes none"),
    ):
        with pytest.raises(UnsupportedProblemError, match=re.escape(words)):
            merge_states(*arguments)
