"""The backward rungs of wide heads on the emulator: 21, of up to 256 columns, and 22, whose tiles have 96 keys."""

import pytest

from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.tests.support.backward_rungs import (
    ALL_ELSE,
    NINETY_SIX,
    SAME_BITS,
    SINKS_TOO,
    WIDE,
    WITH_DROPOUT,
    emulated,
    problem,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 256, "seqlen_q": 200, "seqlen_k": 80, "num_heads": 2, "num_heads_k": 1, "causal": True},
        {"head_dim": 192, "seqlen_q": 70, "seqlen_k": 50, "batch": 2, "dtype": "fp16", "layout": "bhsd"},
        {"head_dim": 192, "head_dim_v": 128, "seqlen_q": 200, "seqlen_k": 64, "layout": "padded"},
        {"head_dim": 256, "seqlen_q": 90, "seqlen_k": 20, "causal": True},
    ],
    ids=str,
)
def test_wide_heads(sizes):
    """One tile of Q, two and more; cut tiles of either; rows without keys."""
    emulated(WIDE, problem(**sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 256, "seqlen_q": 150, "num_heads": 2, "num_heads_k": 1, "window_left": 5, "window_right": 9},
        {"head_dim": 192, "head_dim_v": 128, "seqlen_q": 20, "seqlen_k": 300, "causal": True, "window_left": 40},
        {"head_dim": 256, "seqlen_q": 70, "softcap": 0.5, "causal": True, "softmax_scale": 1.0, "dtype": "fp16"},
        {"head_dim": 192, "batch": 2, "seqlen_q": 70, "seqlen_k": 80, "alibi": True},
        {"head_dim": 256, "seqlen_q": 70, "seqlen_k": 50, "dropout_p": 0.3, "num_heads": 2},
        {"head_dim": 200, "head_dim_v": 136, "seqlen_q": 70, "seqlen_k": 50, "options": SINKS_TOO},
        {
            "head_dim": 160,
            "head_dim_v": 72,
            "seqlens_q": (70, 0, 33, 1),
            "seqlens_k": (90, 10, 33, 0),
            "causal": True,
            "options": SINKS_TOO,
        },
        {"head_dim": 256, "seqlen_q": 150, "causal": True, "options": {"wants_dq": False}},
        {"head_dim": 192, "seqlen_q": 150, "seqlen_k": 60, "softcap": 5.0, "options": {"wants_dkv": False}},
        {
            "seqlens_q": (3, 130),
            "seqlens_k": (140, 9),
            "window_left": 30,
            **ALL_ELSE,
            "head_dim": 256,
            "dropout_p": 0.5,
        },
    ],
    ids=str,
)
@pytest.mark.in_turn("backward/21")
def test_wide_heads_of_any_attention(sizes):
    emulated(WIDE, problem(**sizes))


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ({"seqlen_q": 200, "seqlen_k": 100, "num_heads": 2, "num_heads_k": 1, "causal": True}, {}),
        ({"seqlen_q": 330, "seqlen_k": 60, "batch": 2, "dtype": "fp16", "layout": "bhsd"}, {}),
        ({"head_dim_v": 128, "seqlen_q": 200, "seqlen_k": 96, "layout": "padded"}, {}),
        ({"head_dim_v": 128, "seqlen_q": 330, "seqlen_k": 200, "causal": True}, {"num_stages": 3}),
        ({"head_dim_v": 128, "seqlen_q": 30, "seqlen_k": 1}, {"num_stages": 3}),
        ({"head_dim_v": 128, "seqlen_q": 250, "seqlen_k": 200, **SAME_BITS}, {"num_stages": 3}),
        ({"head_dim_v": 128, "seqlen_q": 330, "seqlen_k": 100, "causal": True}, {"num_stages": 3}),
        ({"seqlen_q": 90, "seqlen_k": 20, "causal": True}, {}),
        ({"seqlen_q": 150, "num_heads": 2, "num_heads_k": 1, "window_left": 5, "window_right": 9}, {}),
        ({"head_dim_v": 128, "seqlen_q": 20, "seqlen_k": 300, "causal": True, "window_left": 40}, {}),
        ({"seqlen_q": 70, "softcap": 0.5, "causal": True, "softmax_scale": 1.0, "dtype": "fp16"}, {}),
        ({"batch": 2, "seqlen_q": 70, "seqlen_k": 120, "alibi": True}, {}),
        ({"seqlen_q": 70, "seqlen_k": 150, "dropout_p": 0.3, "num_heads": 2}, {}),
        ({"head_dim": 184, "head_dim_v": 136, "seqlen_q": 70, "seqlen_k": 50, "options": SINKS_TOO}, {}),
        (
            {
                "head_dim": 160,
                "head_dim_v": 72,
                "seqlens_q": (70, 0, 33, 1),
                "seqlens_k": (90, 10, 33, 0),
                "options": SINKS_TOO,
            },
            {"num_stages": 3},
        ),
        ({"seqlen_q": 100, "seqlen_k": 70, "causal": True, "options": {"wants_dq": False}}, {}),
        ({"seqlen_q": 150, "seqlen_k": 160, "softcap": 5.0, "options": {"wants_dkv": False}}, {}),
        (
            {
                "seqlens_q": (3, 130),
                "seqlens_k": (140, 9),
                "window_left": 30,
                **ALL_ELSE,
                "head_dim": 192,
                "dropout_p": 0.5,
            },
            {},
        ),
    ],
    ids=str,
)
@pytest.mark.in_turn("backward/22")
def test_tiles_of_96_keys(sizes, config):
    """One tile of Q, two and more; cut tiles of either; rows without keys; and any attention."""
    emulated(NINETY_SIX, problem(**{"head_dim": 192, **sizes}), **config)


@pytest.mark.parametrize(
    ("rung", "other", "most", "head_dim"),
    [(WIDE, WITH_DROPOUT, 0.9, 256), (NINETY_SIX, WIDE, 1.01, 192)],
    ids=["21", "22"],
)
def test_wide_heads_have_a_more_exact_ds(rung, other, most, head_dim):
    """It comes of a P that is not rounded: errors of dQ and dK are smaller than rung 12's, and alike in both rungs."""
    task = problem(head_dim=head_dim)
    errors = {}
    for each in (rung, other):
        tensors = make_inputs(task)
        emulated(each, task, tensors)
        exact = expect(task, tensors).exact
        errors[each] = [float((getattr(tensors, name) - exact[name]).square().mean()) ** 0.5 for name in ("dq", "dk")]
    assert all(ours < most * others for ours, others in zip(errors[rung], errors[other], strict=True))
