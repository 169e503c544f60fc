"""The backward ladder on the emulator: each rung's gradients, without a race, and what the last rung takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.measure import baselines
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.runtime.launch import Launcher
from flashladder.tests.support.backward_rounding import bounded_by_flash_attention
from flashladder.tests.support.backward_rungs import (
    ALL_ELSE,
    ANY,
    HOPPER,
    IN_ORDER,
    LADDER,
    LAST,
    NINETY_SIX,
    RUNGS,
    SAME_BITS,
    SINKS_TOO,
    TILE_LATE,
    WIDE,
    WITH_DROPOUT,
    emulated,
    problem,
)

pytestmark = pytest.mark.slow

# The operation


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"causal": True, "options": {"dlse": True}},
        {"seqlen_k": 50, "num_heads": 4, "num_heads_k": 2},
        {"seqlen_k": 90, "window_left": 30, "window_right": 2, "softcap": 1.5},
        {"causal": True, "softcap": 0.5, "alibi": True, "num_heads": 2, "options": {"dlse": True}},
    ],
)
def test_the_exact_answer_is_that_of_automatic_differentiation(sizes):
    task = problem(seqlen_q=70, batch=2, **sizes)
    tensors = make_inputs(task)
    q, k, v = (tensors.by_name[name].double().transpose(1, 2).requires_grad_() for name in "qkv")
    group = task.num_heads // task.num_heads_k
    scores = task.softmax_scale * q @ k.repeat_interleave(group, 1).mT
    ahead = (torch.arange(task.seqlen_q)[:, None] + task.seqlen_k - task.seqlen_q) - torch.arange(task.seqlen_k)
    if task.softcap:
        scores = task.softcap * torch.tanh(scores / task.softcap)
    if task.alibi:
        scores = scores - tensors.alibi_slopes[:, :, None, None] * ahead.abs()
    if task.causal:
        scores = scores.masked_fill(ahead < 0, -torch.inf)
    if task.window:
        scores = scores.masked_fill((ahead > task.window_left) | (-ahead > task.window_right), -torch.inf)
    o = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    outputs, given = [o], [tensors.dout.double().transpose(1, 2)]
    if task.dlse:
        outputs, given = [o, scores.logsumexp(-1)], [*given, tensors.dlse.double()]
    gradients = torch.autograd.grad(outputs, (q, k, v), given)
    exact = expect(task, tensors).exact
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        torch.testing.assert_close(exact[name], gradient.transpose(1, 2))
    assert (tensors.o - o.transpose(1, 2)).abs().max() < 0.02


def test_the_exact_answer_of_packed_sequences_is_that_of_each():
    task = problem(seqlens_q=(20, 0, 5), seqlens_k=(9, 4, 5), softcap=1.0, alibi=True, options={"dlse": True})
    tensors = make_inputs(task)
    alone = problem(seqlen_q=5, softcap=1.0, alibi=True, options={"dlse": True})
    given = make_inputs(alone)
    for name, x in given.by_name.items():
        if name in ("lse", "dlse"):
            x.copy_(tensors.by_name[name][:, -5:])
        else:
            x.copy_(tensors.by_name[name][-1:] if name == "alibi_slopes" else tensors.by_name[name][:, -5:])
    packed, single = expect(task, tensors).exact, expect(alone, given).exact
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(packed[name][:, -5:], single[name])
    assert not packed["dk"][:, 9:13].any()


def test_torchs_own_gradients_pass():
    task = problem(causal=True, num_heads=2)
    tensors = make_inputs(task)
    given_back = baselines.of(LADDER, on_gpu=False)["sdpa"].prepare(task, tensors)()
    exact = expect(task, tensors).exact
    for name, gradient in given_back._asdict().items():
        torch.testing.assert_close(gradient.double(), exact[name], rtol=2**-6, atol=2**-5)


def test_its_flops_are_the_forward_passs_two_and_a_half_times():
    assert problem().flops == 2.5 * Problem(seqlen_q=128, head_dim=64).flops


# The rungs


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_each_rung_is_right(rung):
    emulated(rung, problem(dtype="fp16" if int(rung.number) % 2 else "bf16"))


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 128, "seqlen_q": 70, "seqlen_k": 100, "causal": True, "layout": "padded"},
        {"head_dim": 96, "seqlen_q": 20, "seqlen_k": 33, "dtype": "fp16"},
        {"head_dim": 256, "seqlen_q": 33, "seqlen_k": 20, "causal": True},
        {"seqlen_q": 5, "seqlen_k": 1, "num_heads": 4, "num_heads_k": 2, "causal": True, "layout": "bhsd"},
        {"seqlen_q": 66, "num_heads": 2, "num_heads_k": 1, "layout": "qkv"},
        {"seqlen_q": 150, "seqlen_k": 300, "num_heads": 2, "num_heads_k": 1, "window_left": 5, "window_right": 9},
        {"seqlen_q": 20, "seqlen_k": 300, "causal": True, "window_left": 40, "dtype": "fp16"},
        {"seqlen_q": 70, "softcap": 0.5, "causal": True, "softmax_scale": 1.0},
        {"batch": 2, "seqlen_q": 70, "seqlen_k": 150, "num_heads": 2, "num_heads_k": 1, "alibi": True},
        {"seqlen_q": 70, "num_heads": 2, "batch": 2, "options": {"dlse": True}},
        {"seqlen_q": 70, "num_heads": 2, "batch": 2, "causal": True, "dropout_p": 0.3, "options": SINKS_TOO},
        {"seqlens_q": (70, 0, 33), "seqlens_k": (20, 10, 33), "causal": True, "num_heads": 2, "options": SINKS_TOO},
        {"head_dim": 256, "seqlen_q": 40, "softcap": 2.0, "alibi": True, "causal": True},
        {"seqlens_q": (70, 0, 33, 1, 64), "seqlens_k": (20, 10, 33, 0, 200), "causal": True, "num_heads": 2},
        {"seqlens_q": (3, 130), "seqlens_k": (140, 9), "num_heads": 2, "num_heads_k": 1, "window_left": 30, **ALL_ELSE},
        {"seqlen_q": 70, "seqlen_k": 100, "batch": 2, "num_heads": 2, "causal": True, "dropout_p": 0.5},
        {"head_dim": 256, "seqlen_q": 33, "seqlen_k": 40, "num_heads": 2, "num_heads_k": 1, "dropout_p": 0.1},
        {"head_dim": 96, "seqlen_q": 50, "seqlen_k": 40, "dtype": "fp16", "dropout_p": 0.99},
        {"seqlens_q": (70, 0, 33, 1, 64), "seqlens_k": (20, 10, 33, 0, 200), "num_heads": 2, "dropout_p": 0.3},
        {"seqlens_q": (3, 50), "seqlens_k": (70, 9), "num_heads": 2, "window_left": 30, **ALL_ELSE, "dropout_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.in_turn("backward/11")
def test_the_general_rungs_take_any(sizes):
    task = problem(**sizes)
    emulated(WITH_DROPOUT if task.dropout_p and WITH_DROPOUT.takes(task) else ANY, task)


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 96, "seqlen_q": 90, "seqlen_k": 133, "dtype": "fp16", "options": SINKS_TOO},
        {"seqlen_q": 150, "seqlen_k": 300, "num_heads": 2, "num_heads_k": 1, "window_left": 5, "window_right": 9},
        {"head_dim": 128, "seqlen_q": 20, "seqlen_k": 300, "causal": True, "window_left": 40, "dtype": "fp16"},
        {"head_dim": 128, "seqlen_q": 70, "softcap": 0.5, "causal": True, "softmax_scale": 1.0},
        {"head_dim": 128, "seqlen_q": 70, "softcap": 30.0, "causal": True, "window_left": 40},
        {"batch": 2, "seqlen_q": 70, "seqlen_k": 150, "num_heads": 2, "num_heads_k": 1, "alibi": True},
        {"seqlens_q": (70, 0, 133, 1, 64), "seqlens_k": (20, 10, 150, 0, 200), "causal": True, "num_heads": 2},
        {"seqlens_q": (3, 130), "seqlens_k": (140, 9), "num_heads": 2, "num_heads_k": 1, "window_left": 30, **ALL_ELSE},
        {"seqlens_q": (70, 0, 133, 1), "seqlens_k": (200, 10, 33, 0), "head_dim": 96, "dropout_p": 0.3, **SAME_BITS},
        {"seqlen_q": 200, "seqlen_k": 300, "window_left": 90, "causal": True, "num_heads": 2, "dropout_p": 0.5},
        {"head_dim": 128, "seqlen_q": 100, "seqlen_k": 150, "causal": True, "options": {"wants_dq": False}},
        {"seqlen_q": 150, "seqlen_k": 100, "softcap": 5.0, "options": {"wants_dkv": False}},
        {
            "head_dim": 72,
            "head_dim_v": 40,
            "seqlens_q": (100, 0, 130),
            "seqlens_k": (90, 1, 200),
            "num_heads": 2,
            "options": SINKS_TOO,
        },
        {"head_dim": 128, "head_dim_v": 64, "seqlen_q": 20, "seqlen_k": 400, "causal": True, "window_left": 30},
    ],
    ids=str,
)
def test_a_hopper_rung_takes_any(sizes):
    emulated(TILE_LATE, problem(**sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 128, "seqlen_q": 200, "seqlen_k": 150, "num_heads": 4, "num_heads_k": 2, "batch": 2},
        {"seqlens_q": (70, 0, 133, 1), "seqlens_k": (20, 150, 150, 0), "num_heads": 4, "num_heads_k": 2},
        {"head_dim": 72, "head_dim_v": 40, "seqlen_q": 100, "seqlen_k": 300, "num_heads": 3, "window_left": 30},
        {"seqlen_q": 60, "seqlen_k": 200, "num_heads": 2, "dropout_p": 0.3},
        {"head_dim": 96, "seqlen_q": 60, "seqlen_k": 90, "num_heads": 2, "options": {"wants_dq": False}},
        {"seqlen_q": 60, "seqlen_k": 200, "num_heads": 2, "options": {"wants_dkv": False}},
    ],
    ids=str,
)
def test_each_head_has_its_ctas(sizes):
    """Heads of a group add to dK and dV, and keys that no row sees have none."""
    emulated(TILE_LATE, problem(**{"num_heads_k": 1, "causal": True, **sizes}), split_heads=True)


def test_heads_that_have_their_ctas_add_in_any_order():
    with pytest.raises(ConfigError, match="split_heads"):
        TILE_LATE.config_for(problem(**SAME_BITS), split_heads=True)


@pytest.mark.parametrize("batch", [1, 31, 33, 70])
def test_the_sequence_of_a_place_is_found(batch):
    """Of as many as a warp sees at once, and of more: the last ones have keys, and each has a row."""
    lengths = (*[1] * (batch - 1), 70)
    emulated(TILE_LATE, problem(seqlens_q=lengths, seqlens_k=(*[0] * (batch // 2), *lengths[batch // 2 :])))


@pytest.mark.parametrize("rung", [TILE_LATE, WIDE, NINETY_SIX], ids=lambda rung: rung.name)
@pytest.mark.parametrize(("lengths", "end"), [((1, 62), 1), ((64, 129), 65), ((70, 133), 135)], ids=str)
def test_behind_the_last_sequence_are_zeros(rung, lengths, end):
    """Also where the last one is empty, and no tile is behind it that another one would have."""
    head_dim = 64 if rung is TILE_LATE else 192
    task = problem(seqlens_q=lengths, seqlens_k=lengths, head_dim=head_dim, options=SINKS_TOO)
    tensors = make_inputs(task)
    for starts in (tensors.cu_seqlens_q, tensors.cu_seqlens_k):
        starts[-1] = end
    gradients = [tensors.by_name[name].fill_(torch.nan) for name in ("dq", "dk", "dv", "dsinks")]
    on_emulator(translate(rung, rung.config_for(task), "sm_90a"), task, tensors)
    assert all(bool(gradient[:, :end].isfinite().all()) for gradient in gradients)
    assert not any(bool(gradient[:, end:].any()) for gradient in gradients)


def some_lengths(draw):
    """Of Q and of K: of one sequence, or of some that are packed."""
    if draw(st.booleans()):
        return {name: draw(st.integers(1, 80)) for name in ("seqlen_q", "seqlen_k")}
    lengths = st.lists(st.integers(0, 80), min_size=2, max_size=2)
    return {name: (1, *draw(lengths)) for name in ("seqlens_q", "seqlens_k")}


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_random_problems(data):
    """Lengths, heads and ends of windows at random; with all features or none, so that few kernels are compiled."""
    draw = data.draw
    group, heads_k, causal = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.booleans())
    windows = {"window_left": draw(st.integers(0, 90))} | ({} if causal else {"window_right": draw(st.integers(0, 90))})
    more = {"softcap": draw(st.floats(0.1, 50)), "alibi": True, "options": {"dlse": True}, **windows}
    more["dropout_p"] = draw(st.floats(0.01, 0.99))
    emulated(
        ANY,
        problem(
            **some_lengths(draw),
            **(more if draw(st.booleans()) else {}),
            num_heads=group * heads_k,
            num_heads_k=heads_k,
            causal=causal,
            dtype=draw(st.sampled_from(["bf16", "fp16"])),
            layout=draw(st.sampled_from(["bshd", "bhsd", "padded"])),
            seed=draw(st.integers(0, 2**31)),
        ),
    )


ANY_LENGTHS = (
    {"head_dim": 128, "seqlen_q": 200, "seqlen_k": 150, "num_heads": 2, "num_heads_k": 1, "causal": True},
    {"seqlen_q": 300, "seqlen_k": 130, "dtype": "fp16", "layout": "padded", "causal": True},
    {"seqlen_q": 5, "seqlen_k": 1, "num_heads": 4, "num_heads_k": 2, "batch": 2, "layout": "bhsd"},
    {"head_dim": 128, "seqlen_q": 66, "num_heads": 2, "dtype": "fp16", "layout": "qkv"},
)
# The others take lengths, masks and strides as these do, and come by turns.
WHOLE = [catalog.find(f"{LADDER}/{number}") for number in ("13", "16", "18", "19")]


@pytest.mark.parametrize(
    ("rung", "sizes"),
    [
        pytest.param(rung, sizes, id=f"{rung.name}-{turn}")
        for rung in HOPPER
        for turn, sizes in enumerate(ANY_LENGTHS)
        if rung in WHOLE or turn == int(rung.number) % len(ANY_LENGTHS)
    ],
)
def test_hopper_rungs_take_any_lengths(rung, sizes):
    emulated(rung, problem(**sizes))


@pytest.mark.parametrize("rung", [ANY, LAST, TILE_LATE], ids=lambda rung: rung.name)
@pytest.mark.parametrize("family", ["normal_10", "rising_gently", "plateau_sparse", "huge_scores", "jump_key"])
def test_families_of_inputs(rung, family):
    """All of them are in test_backward_gpu.py."""
    task = problem(seqlen_q=130, causal=True, family=family)
    tensors = make_inputs(task)
    emulated(rung, task, tensors, bounded_by_flash_attention(task, tensors))


@pytest.mark.parametrize("rung", [rung for rung in HOPPER if rung.supports.dropout], ids=lambda rung: rung.name)
@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 128, "seqlen_q": 140, "seqlen_k": 150, "num_heads": 2, "num_heads_k": 1, "causal": True},
        {"seqlen_q": 200, "seqlen_k": 130, "batch": 2, "dtype": "fp16"},
    ],
)
def test_dropout_on_hopper(rung, sizes):
    """More than one tile of Q, and of 64 columns more than one step; and heads of more than one number."""
    emulated(rung, problem(**sizes, dropout_p=0.3, **(SAME_BITS if rung == IN_ORDER else {})))


@pytest.mark.parametrize("rung", [ANY, *HOPPER], ids=lambda rung: rung.name)
def test_rows_without_keys_have_no_gradient(rung):
    task = problem(seqlen_q=90, seqlen_k=20, causal=True)
    tensors = make_inputs(task)
    assert torch.isneginf(tensors.lse[..., :70]).all()
    emulated(rung, task, tensors)
    assert (tensors.dq[:, :70] == 0).all()


def test_rows_without_keys_have_none_whatever_their_lse_has():
    """Its gradient is a NaN there, as of -inf in what comes behind."""
    task = problem(seqlen_q=40, seqlen_k=20, causal=True, options={"dlse": True})
    tensors = make_inputs(task)
    tensors.dlse[..., :20] = 0.0
    expected = expect(task, tensors)
    tensors.dlse[..., :20] = torch.nan
    on_emulator(translate(ANY, ANY.config_for(task), "sm_80"), task, tensors)
    verify(expected, tensors.outputs, tensors.buffers).require("dlse")


def test_keys_that_no_row_sees_have_no_gradient():
    """Whole tiles of keys before the window."""
    task = problem(seqlen_q=20, seqlen_k=400, causal=True, window_left=10, seed=1)
    tensors = make_inputs(task)
    emulated(ANY, task, tensors)
    assert not tensors.dk[:, :370].any()
    assert not tensors.dv[:, :370].any()


PARTS = {"wants_dq": 4 / 5, "wants_dkv": 3 / 5}  # what is left of the products where one is not asked for


@pytest.mark.parametrize("left_out", PARTS)
def test_what_nobody_asks_for_costs_nothing(left_out):
    """Neither products nor memory nor, of dQ, a kernel; what is asked for has the same bits as with all else."""
    size = {"seqlen_q": 70, "seqlen_k": 150, "num_heads": 2, "num_heads_k": 1, "causal": True}
    whole, part = problem(**size), problem(**size, options={left_out: False})
    tensors, partly = make_inputs(whole), make_inputs(part)
    work = [emulated(ANY, whole, tensors).mma_flops, emulated(ANY, part, partly).mma_flops]
    assert work[1] / work[0] == pytest.approx(PARTS[left_out])
    assert partly.outputs.keys() == ({"dk", "dv"} if left_out == "wants_dq" else {"dq"})
    for name, gradient in partly.outputs.items():
        torch.testing.assert_close(gradient, getattr(tensors, name), rtol=0, atol=0 if name != "dq" else 2**-8)
    if left_out == "wants_dq":
        launcher = Launcher(translate(ANY, ANY.config_for(part), "sm_80"))
        launched = [launch.entry for launch in launcher.launches(part, partly, 2)]
        assert launched == ["backward_prepare", "attention_backward"]
        assert min(launcher.workspace_bytes(part)) <= 4


@pytest.mark.parametrize("left_out", PARTS)
def test_a_part_of_the_gradients_of_anything(left_out):
    sizes = {"seqlens_q": (3, 70), "seqlens_k": (140, 9), "num_heads": 2, "window_left": 30, "dropout_p": 0.3}
    emulated(ANY, problem(**sizes, softcap=5.0, alibi=True, options={"dlse": True, left_out: False}))


def test_no_gradient_at_all_is_refused():
    with pytest.raises(UnsupportedProblemError, match="no gradient is asked for"):
        problem(options={"wants_dq": False, "wants_dkv": False})


def test_a_windows_work_does_not_grow_with_the_length():
    work = [
        emulated(ANY, problem(seqlen_q=64, seqlen_k=keys, window_left=20, causal=True)).mma_flops for keys in (384, 640)
    ]
    assert work[0] == work[1]


def test_a_mask_leaves_tiles_out():
    """Two tiles of 128 keys and four of 64 rows: two of the eight are above the diagonal."""
    rung = ANY
    square = {"seqlen_q": 256}
    full, causal = (emulated(rung, problem(**square, causal=mask)).mma_flops for mask in (False, True))
    assert causal / full == pytest.approx(6 / 8)
