"""The backward ladder on the emulator: each rung's gradients, without a race, and what the last rung takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.measure import baselines
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator, on_gpu
from flashladder.common.runtime.gpu import device_arch

LADDER = "backward"
RUNGS = catalog.versions(ladder=LADDER)
GENERAL = [rung for rung in RUNGS if rung.supports.gqa]


def problem(**sizes):
    return Problem(**{"seqlen_q": 128, "head_dim": 64, **sizes}, operation=LADDER)


def emulated(rung, task, tensors=None, **overrides):
    """Runs a rung under the race detector and requires right gradients."""
    tensors = tensors or make_inputs(task)
    tensors.poison()
    report = on_emulator(build_one(rung, rung.config_for(task, **overrides), "sm_80"), task, tensors)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(rung.name)
    return report


# The operation


@pytest.mark.parametrize("sizes", [{}, {"causal": True}, {"seqlen_k": 50, "num_heads": 4, "num_heads_k": 2}])
def test_the_exact_answer_is_that_of_automatic_differentiation(sizes):
    task = problem(seqlen_q=70, batch=2, **sizes)
    tensors = make_inputs(task)
    q, k, v = (tensors.by_name[name].double().transpose(1, 2).requires_grad_() for name in "qkv")
    mask = torch.ones(task.seqlen_q, task.seqlen_k).tril(task.seqlen_k - task.seqlen_q).bool() if task.causal else None
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, scale=task.softmax_scale, enable_gqa=task.num_heads != task.num_heads_k
    )
    gradients = torch.autograd.grad(o, (q, k, v), tensors.dout.double().transpose(1, 2))
    exact = expect(task, tensors).exact
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        torch.testing.assert_close(exact[name], gradient.transpose(1, 2))
    assert (tensors.o - o.transpose(1, 2)).abs().max() < 0.02


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
        {"seqlen_q": 70, "seqlen_k": 100, "batch": 2, "num_heads": 2, "causal": True, "dropout_p": 0.5},
        {"head_dim": 256, "seqlen_q": 33, "seqlen_k": 40, "num_heads": 2, "num_heads_k": 1, "dropout_p": 0.1},
        {"head_dim": 96, "seqlen_q": 50, "seqlen_k": 40, "dtype": "fp16", "dropout_p": 0.99},
    ],
)
def test_the_last_rung_takes_any(sizes):
    emulated(GENERAL[-1], problem(**sizes))


@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_random_problems(data):
    draw = data.draw
    group, heads_k = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    emulated(
        GENERAL[-1],
        problem(
            seqlen_q=draw(st.integers(1, 80)),
            seqlen_k=draw(st.integers(1, 80)),
            num_heads=group * heads_k,
            num_heads_k=heads_k,
            causal=draw(st.booleans()),
            dtype=draw(st.sampled_from(["bf16", "fp16"])),
            layout=draw(st.sampled_from(["bshd", "bhsd", "padded"])),
            seed=draw(st.integers(0, 2**31)),
        ),
    )


def test_rows_without_keys_have_no_gradient():
    task = problem(seqlen_q=90, seqlen_k=20, causal=True)
    tensors = make_inputs(task)
    assert torch.isneginf(tensors.lse[..., :70]).all()
    emulated(GENERAL[-1], task, tensors)
    assert (tensors.dq[:, :70] == 0).all()


def test_a_mask_leaves_tiles_out():
    """Two tiles of 128 keys and four of 64 rows: two of the eight are above the diagonal."""
    rung = GENERAL[-1]
    square = {"seqlen_q": 256}
    full, causal = (emulated(rung, problem(**square, causal=mask)).mma_flops for mask in (False, True))
    assert causal / full == pytest.approx(6 / 8)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_rung_is_right_on_a_gpu(rung, head_dim):
    require_right_on_a_gpu(rung, problem(batch=2, num_heads=4, seqlen_q=1024, head_dim=head_dim))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (113, 203), (203, 113), (1023, 1025), (4000, 4000)])
def test_the_last_rung_is_right_on_a_gpu(head_dim, causal, seqlen_q, seqlen_k):
    sizes = {"num_heads": 4, "num_heads_k": 2, "head_dim": head_dim, "causal": causal, "layout": "padded"}
    require_right_on_a_gpu(GENERAL[-1], problem(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes))


def require_right_on_a_gpu(rung, task):
    tensors = make_inputs(task, "cuda")
    launch = on_gpu(build_one(rung, rung.config_for(task), device_arch()), task, tensors)
    for _ in range(3):
        tensors.poison()
        launch()
        torch.cuda.synchronize()
        verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(rung.name)
