"""The exact answers with windows and ALiBi, as flash-attn documents them, and sizes of packed sequences."""

import math

import pytest
import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem

LENGTHS = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (6, 6)])


def hidden_by_definition(seqlen_q, seqlen_k, left, right):
    """Word for word."""
    return [
        [
            not (
                (left is None or j >= i + seqlen_k - seqlen_q - left)
                and (right is None or j <= i + seqlen_k - seqlen_q + right)
            )
            for j in range(seqlen_k)
        ]
        for i in range(seqlen_q)
    ]


@pytest.mark.parametrize(("left", "right"), [(2, None), (None, 1), (0, 0), (3, 2)])
@LENGTHS
def test_windows(seqlen_q, seqlen_k, left, right):
    problem = Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16, window_left=left, window_right=right)
    tensors = make_inputs(problem)
    hidden = torch.tensor(hidden_by_definition(seqlen_q, seqlen_k, left, right))
    scores = (tensors.q[0, :, 0].double() @ tensors.k[0, :, 0].double().T / 4).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    exact = expect(problem, tensors).exact
    torch.testing.assert_close(exact["o"][0, :, 0], weights @ tensors.v[0, :, 0].double())
    torch.testing.assert_close(exact["lse"][0, 0], scores.logsumexp(-1))
    assert problem.flops == 4 * 16 * (~hidden).sum()


@LENGTHS
def test_slopes(seqlen_q, seqlen_k):
    """-alibi_slope * |i + seqlen_k - seqlen_q - j|"""
    problem = Problem(batch=2, num_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16, alibi=True)
    tensors = make_inputs(problem)
    exact = expect(problem, tensors).exact
    distances = [[abs(i + seqlen_k - seqlen_q - j) for j in range(seqlen_k)] for i in range(seqlen_q)]
    q, k, v = (x.double().transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v))
    bias = -tensors.alibi_slopes.double()[..., None, None] * torch.tensor(distances)
    scores = q @ k.transpose(2, 3) / 4 + bias
    torch.testing.assert_close(exact["o"].transpose(1, 2), scores.softmax(-1) @ v)
    torch.testing.assert_close(exact["lse"], scores.logsumexp(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_left": -1}, "window_left=-1: must be an integer of at least 0, or None for all keys"),
        ({"window_right": 2.5}, "window_right=2.5: must be an integer of at least 0, or None for all keys"),
        ({"window_right": 3, "causal": True}, "window_right=3: with causal=true no row sees a later key"),
        ({"softcap": -1.0}, "softcap=-1.0: must be a positive number up to 1000, or 0 for none"),
        ({"softcap": math.nan}, "softcap=nan: must be a positive number"),
        ({"operation": "packed", "seqlens_q": (3, -1)}, "no sequence is shorter than 0"),
        ({"operation": "packed", "seqlens_q": (3, 2), "seqlens_k": (1,)}, "seqlens_q are 2, seqlens_k 1 lengths"),
        ({"operation": "packed", "seqlens_q": (0, 0)}, "total_q=0: must be at least 1"),
        ({"operation": "packed"}, "packed sequences have lengths"),
        ({"seqlens_q": (3, 2)}, "the operation forward knows no seqlens_q"),
        (
            {"operation": "packed", "seqlens_q": (3, 2), "seqlens_k": (1, 3), "layout": "qkv"},
            "total_q=5 must equal total_k=4",
        ),
    ],
)
def test_what_is_no_problem_is_refused(options, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        Problem(**options)


def test_lengths_that_the_gpu_alone_knows():
    problem = Problem(operation="packed", batch=3, seqlen_q=9, seqlen_k=7, total_q=20, total_k=11, num_heads=2)
    tensors = problem.tensors
    assert tuple(tensors[name].shape for name in ("k", "cu_seqlens_k", "lse")) == ((1, 11, 2, 128), (4,), (2, 20))
    known = Problem(operation="packed", seqlens_q=(9, 2, 9), seqlens_k=(4, 7, 0), num_heads=2)
    assert known.tensors == tensors
    assert (known.batch, known.seqlen_q, known.seqlen_k) == (3, 9, 7)
    assert known.flops == 4 * 2 * 128 * (9 * 4 + 2 * 7)
