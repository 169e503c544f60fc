"""Packed sequences, windows and softcaps as functions of torch tensors."""

import itertools
import math

import pytest
import torch

from flashladder.common.attention.bounded import _bounded, bounded_attention, mask_of
from flashladder.common.attention.packed import _packed, check_sequences, packed_attention
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import Problem, expect, make_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PACKED = {"operation": "packed", "seqlens_q": (33, 0, 20), "seqlens_k": (40, 7, 0), "num_heads": 2, "num_heads_k": 1}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def packed(device, **options):
    """A problem, and what the function is called with."""
    problem = Problem(**PACKED, head_dim=64, **options)
    tensors = make_inputs(problem, device)
    qkv = (tensors.q[0], tensors.k[0], tensors.v[0])
    return problem, tensors, (*qkv, tensors.cu_seqlens_q, tensors.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k)


def close(problem, tensors, o, lse):
    expected = expect(problem, tensors)
    assert (o - expected.exact["o"].view_as(o)).abs().max() <= expected.tolerances["o"]
    torch.testing.assert_close(lse.double(), expected.exact["lse"].double(), rtol=0, atol=expected.tolerances["lse"])


def test_packed_sequences(device):
    problem, tensors, given = packed(device, causal=True, window_left=9, softcap=20.0)
    o, lse = packed_attention(*given, causal=True, window=(9, -1), softcap=20.0, return_lse=True)
    assert (o.shape, lse.shape, lse.dtype) == ((53, 2, 64), (2, 53), torch.float32)
    close(problem, tensors, o, lse)
    assert torch.equal(packed_attention(*given, causal=True, window=(9, -1), softcap=20.0), o), "without the lse"


def test_windows_and_softcaps(device):
    problem = Problem(seqlen_q=50, seqlen_k=70, num_heads=2, head_dim=64, window_left=20, window_right=3, softcap=20.0)
    tensors = make_inputs(problem, device)
    given = (tensors.q, tensors.k, tensors.v)
    o, lse = bounded_attention(*given, window=(20, 3), softcap=20.0, return_lse=True)
    close(problem, tensors, o, lse)


def test_nothing_to_attend_to(device):
    like = {"dtype": torch.float16, "device": device}
    q, k = torch.ones(5, 2, 64, **like), torch.ones(0, 1, 64, **like)
    starts = torch.tensor([[0, 5], [0, 0]], dtype=torch.int32, device=device)
    o, lse = packed_attention(q, k, k, *starts, 5, 0, return_lse=True)
    assert not o.any()
    assert (lse == -math.inf).all()
    assert packed_attention(q[:0], k, k, starts[1], starts[1], 0, 0).shape == (0, 2, 64)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), list(itertools.product((1, 2, 5, 8), repeat=2)))
def test_a_mask_is_what_is_left_of_a_window(seqlen_q, seqlen_k):
    """For every window: the same keys are hidden as by the definition, and no more is asked of a kernel than needed."""
    row, key = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    own = row + seqlen_k - seqlen_q
    for causal, left, right in itertools.product((False, True), range(-1, 9), range(-1, 9)):
        last = 0 if causal else right
        hidden = ((key < own - left) & (left >= 0)) | ((key > own + last) & (last >= 0))
        is_causal, begin, end = mask_of(causal, (left, right), seqlen_q, seqlen_k)
        found = torch.zeros_like(hidden)
        for side, seen in ((begin, lambda n: key >= own - n), (0 if is_causal else end, lambda n: key <= own + n)):
            found |= torch.zeros_like(hidden) if side is None else ~seen(side)
        assert torch.equal(found, hidden), (causal, left, right)
        assert hidden.any() or (is_causal, begin, end) == (False, None, None)


def test_torch_sees_through_them(device):
    checks = ("test_schema", "test_faketensor")
    _, _, given = packed(device)
    torch.library.opcheck(_packed, (*given, True, 9, None, 0.0, None, True), test_utils=checks)
    q, k, v = (tensor[None] for tensor in given[:3])
    torch.library.opcheck(_bounded, (q, k, v, False, 9, 3, 0.0, 0.125, False), test_utils=checks)


def test_wrong_sequences_are_refused(device):
    _, _, (q, k, v, of_q, of_k, most_q, most_k) = packed(device)

    def refused(message, *given):
        with pytest.raises(UnsupportedProblemError, match=message):
            packed_attention(*given)

    refused(r"q has shape \(1, 53, 2, 64\); packed, it is", q[None], k, v, of_q, of_k, most_q, most_k)
    refused(r"cu_seqlens_q is \(4,\) torch.int64", q, k, v, of_q.long(), of_k, most_q, most_k)
    refused("cu_seqlens_q is of 3 sequences, cu_seqlens_k of 2", q, k, v, of_q, of_k[:3], most_q, most_k)
    refused("cu_seqlens_k is on meta, q on", q, k, v, of_q, of_k.to("meta"), most_q, most_k)
    refused("v is .* with the other tensors it is", q, k, v[:, :, :32], of_q, of_k, most_q, most_k)
    with pytest.raises(UnsupportedProblemError, match=r"window=\(-2, 0\): \(left, right\), each at least 0, or -1"):
        packed_attention(q, k, v, of_q, of_k, most_q, most_k, window=(-2, 0))
    with pytest.raises(UnsupportedProblemError, match="the inputs want a gradient"):
        packed_attention(q.clone().requires_grad_(), k, v, of_q, of_k, most_q, most_k)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 33, 30, 53], r"cu_seqlens_q\[2\] is 30, after 33; each should be at least the one before"),
        ([0, 33, 33, 99], "cu_seqlens_q is from 0 to 99; it should be from 0 to 53, the rows of q"),
        ([1, 33, 33, 53], "cu_seqlens_q is from 1 to 53"),
        ([0, 40, 40, 53], "max_seqlen_q is 33; sequence 0 of cu_seqlens_q has 40 rows"),
    ],
)
def test_lengths_are_checked_where_they_can_be_read(starts, message, device):
    _, _, (q, k, v, _, of_k, most_q, most_k) = packed(device)
    wrong = torch.tensor(starts, dtype=torch.int32, device=device)
    with pytest.raises(UnsupportedProblemError, match=message):
        check_sequences(wrong, of_k, most_q, most_k, len(q), len(k))
    if device == "cpu":
        with pytest.raises(UnsupportedProblemError, match=message):
            packed_attention(q, k, v, wrong, of_k, most_q, most_k)
