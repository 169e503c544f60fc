"""Problems, their inputs and layouts, the exact answer, and that verification finds what is planted."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import catalog
from flashladder.common.errors import UnsupportedProblemError, VerificationError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.operations.forward import LAYOUTS, V_IS_K, attention
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.launch import check

SMALL = {"batch": 2, "num_heads": 4, "num_heads_k": 2, "seqlen_q": 20, "seqlen_k": 20, "head_dim": 16}


def solved(**options):
    """A small problem with the right answer in its outputs."""
    problem = Problem(**(SMALL | options))
    tensors = make_inputs(problem)
    expected = expect(problem, tensors)
    for name, output in tensors.outputs.items():
        output.copy_(expected.exact[name])
    return tensors, expected


def faults(tensors, expected):
    return verify(expected, tensors.outputs, tensors.buffers).faults


def test_defaults_follow_the_queries():
    problem = Problem(num_heads=8, seqlen_q=512, head_dim=64)
    assert (problem.num_heads_k, problem.seqlen_k, problem.softmax_scale) == (8, 512, 0.125)
    assert problem.name == "batch=1,num_heads=8,seqlen_q=512,head_dim=64,dtype=bf16"
    grouped = Problem(num_heads=8, num_heads_k=2, seqlen_q=512, seqlen_k=64)
    assert "num_heads_k=2,seqlen_q=512,seqlen_k=64" in grouped.name


def test_an_output_may_not_be_asked_for():
    problem = Problem(**SMALL, lse=False)
    assert problem.name.endswith(",lse=false")
    assert (problem.outputs, Problem(**SMALL).outputs) == (("o",), ("o", "lse"))
    tensors, expected = solved(lse=False)
    check = verify(expected, tensors.outputs, tensors.buffers)
    assert check.passed
    assert (set(expected.exact), check.lse_error, check.lse_tolerance) == ({"o"}, 0, 0)
    with pytest.raises(AttributeError, match="the problem has no tensor lse"):
        tensors.lse  # noqa: B018
    tensors.poison()
    unwritten_o, _ = faults(tensors, expected)
    assert unwritten_o == "2560 of 2560 elements of o were not written"


def test_what_is_no_output_cannot_be_left_out():
    with pytest.raises(UnsupportedProblemError, match="lse=false: the log-sum-exp is no output of the operation back"):
        Problem(operation="backward", lse=False)


def test_flops_count_the_keys_that_are_seen():
    assert Problem(seqlen_q=512).flops == 4 * 512 * 512 * 128
    assert Problem(seqlen_q=512, causal=True).flops == 2 * 512 * 512 * 128
    assert Problem(seqlen_q=2, seqlen_k=8, causal=True).flops == 4 * 2 * 7 * 128
    assert Problem(seqlen_q=8, seqlen_k=2, causal=True).flops == 4 * 2 * 1 * 128


def test_bytes_are_of_each_tensor_once():
    problem = Problem(num_heads=4, num_heads_k=2, seqlen_q=512, seqlen_k=64)
    q, k = 2 * 512 * 4 * 128, 2 * 64 * 2 * 128
    assert problem.asked.bytes_moved(problem) == 2 * q + 2 * k + 4 * 512 * 4
    narrow = Problem(num_heads=4, num_heads_k=2, seqlen_q=512, seqlen_k=64, head_dim_v=64, lse=False)
    assert narrow.asked.bytes_moved(narrow) == q + k + (q + k) / 2


def test_kernels_are_told_numbers_by_name():
    problem = Problem(window_left=7, softcap=30.0)
    told = {name: problem.asked.argument(problem, name) for name in ("seqlen_k", "softcap", "window_left")}
    assert told == {"seqlen_k": 256, "softcap": 30.0, "window_left": 7}
    assert problem.asked.argument(problem, "window_right") == 2**30


def test_a_configuration_with_expressions_is_of_a_problem_with_their_tensors():
    """Each as long as anything that a position counts."""
    rung = catalog.find("51")
    mods = "bias:fp32[][];far:int64;mask=q-k<far;score=s+bias[h][k]"
    found = Problem.of_config("forward", rung.config(mods=mods), num_heads=2, seqlen_q=10, seqlen_k=70)
    assert (found.mods, found.extents) == (mods, ((70, 70), ()))
    assert Problem.of_config("forward", rung.config()).extents == ()


def test_v_may_be_narrower_than_q_and_k():
    tensors, expected = solved(head_dim_v=8)
    assert (tensors.v.shape[-1], tensors.o.shape[-1], tensors.k.shape[-1]) == (8, 8, 16)
    assert faults(tensors, expected) == ()
    assert Problem(seqlen_q=512, head_dim_v=64).flops == 3 * 512 * 512 * 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"num_heads": 4, "num_heads_k": 3}, "num_heads=4 must be a multiple of num_heads_k=3"),
        ({"dtype": "fp32"}, "dtype=fp32: must be one of bf16, fp16"),
        ({"layout": "sbhd"}, "layout=sbhd: must be one of bshd, bhsd, padded, qkv, kv"),
        ({"layout": "qkv", "seqlen_k": 3}, "seqlen_q=256 must equal seqlen_k=3"),
        ({"layout": "kv", "head_dim_v": 136}, "head_dim_v=136 is at most 128"),
        ({"softmax_scale": math.inf}, "softmax_scale=inf: must be a positive, finite number"),
        ({"softmax_scale": -1.0}, "softmax_scale=-1.0: must be a positive, finite number"),
    ],
)
def test_what_is_no_problem_is_refused(options, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        Problem(**options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_numbers_and_suit_kernels(layout):
    plain = make_inputs(Problem(**SMALL))
    tensors = make_inputs(Problem(**SMALL, layout=layout))
    for name in "qv" if layout == V_IS_K else "qkv":
        assert torch.equal(getattr(tensors, name), getattr(plain, name))
    assert (tensors.k.data_ptr() == tensors.v.data_ptr()) == (layout == V_IS_K)
    check(Problem(**SMALL, layout=layout), tensors.by_name)
    assert not torch.equal(make_inputs(Problem(**SMALL, seed=1)).q, plain.q)
    strides = {"bshd": (64, 16), "bhsd": (16, 320), "padded": (120, 24), "qkv": (128, 16), "kv": (64, 16)}
    assert tensors.q.stride()[1:3] == strides[layout]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 20), (5, 33), (33, 5)])
def test_reference_agrees_with_torch(causal, seqlen_q, seqlen_k):
    problem = Problem(**(SMALL | {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}), causal=causal)
    tensors = make_inputs(problem)
    o, lse = attention(problem, tensors.by_name, torch.float64)
    q, k, v = (tensor.transpose(1, 2).double() for tensor in (tensors.q, tensors.k, tensors.v))
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    mask = mask.tril(seqlen_k - seqlen_q) if causal else mask
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    dead = ~mask.any(-1)
    torch.testing.assert_close(o[:, ~dead], theirs[:, ~dead])
    assert (o[:, dead] == 0).all()
    assert (lse[..., dead] == -math.inf).all()
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 4
    torch.testing.assert_close(lse, scores.masked_fill(~mask, -math.inf).logsumexp(-1))


def test_reference_in_blocks_of_queries_is_the_same(monkeypatch):
    problem = Problem(**SMALL, causal=True)
    tensors = make_inputs(problem)
    whole, _ = attention(problem, tensors.by_name, torch.float64)
    monkeypatch.setattr("flashladder.common.problem.operations.forward._SCORES_LIMIT", 300)
    blocks, _ = attention(problem, tensors.by_name, torch.float64)
    torch.testing.assert_close(blocks, whole)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 2), st.sampled_from([(2, 1), (3, 3)]), st.integers(1, 40), st.integers(1, 40), st.booleans(),
    st.sampled_from(["bshd", "bhsd", "padded"]), st.sampled_from(["bf16", "fp16"]),
)  # fmt: skip
def test_the_exact_answer_passes(batch, heads, seqlen_q, seqlen_k, causal, layout, dtype):
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    tensors, expected = solved(
        batch=batch, num_heads=heads[0], num_heads_k=heads[1], causal=causal, layout=layout, dtype=dtype, **lengths
    )
    assert faults(tensors, expected) == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_planted_fault_is_named(layout):
    tensors, expected = solved(layout=layout)
    tensors.o[1, 2, 3, 4] += 1
    tensors.lse[1, 2, 3] += 1e-3
    wrong_o, wrong_lse = faults(tensors, expected)
    assert wrong_o.startswith("o[1, 2, 3, 4] is")
    assert wrong_lse.startswith("lse[1, 2, 3] is")

    tensors, expected = solved(layout=layout)
    tensors.q.as_strided((1,), (1,), tensors.q.storage_offset() - 1)[0] = 1.0
    (damage,) = faults(tensors, expected)
    assert "1 elements outside" in damage
    assert "at element -1 of its buffer" in damage


def test_a_write_into_the_gap_between_rows_is_found():
    tensors, expected = solved(layout="padded")
    tensors.o.as_strided((1,), (1,), tensors.o.storage_offset() + 16)[0] = 0.0
    (damage,) = faults(tensors, expected)
    assert "outside o were overwritten, the first at element 16" in damage


def test_what_is_not_written_is_counted():
    tensors, expected = solved()
    answer = tensors.o.clone()
    tensors.poison()
    tensors.o[:, :10] = answer[:, :10]
    unwritten_o, _, unwritten_lse, _ = faults(tensors, expected)
    assert unwritten_o == "1280 of 2560 elements of o were not written"
    assert unwritten_lse == "160 of 160 elements of lse were not written"


def test_nan_is_never_close():
    tensors, expected = solved()
    tensors.o[0, 0, 0, 0] = math.nan
    check = verify(expected, {"o": tensors.o})
    assert check.max_error == math.inf
    assert not check.passed
    with pytest.raises(VerificationError, match=r"rung 02 is wrong:\n  o\[0, 0, 0, 0\] is nan instead of"):
        check.require("rung 02")


def test_a_problem_that_no_memory_holds_is_refused():
    with pytest.raises(UnsupportedProblemError, match=r"no room for a tensor of .* GiB on the device cpu"):
        make_inputs(Problem(seqlen_q=2**44))
