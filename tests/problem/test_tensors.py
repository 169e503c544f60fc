"""Which tensors a problem has: one declaration an operation, from which all else follows."""

import pytest
import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem, operation_named

FP8 = torch.float8_e4m3fn
LENGTHS = {"operation": "packed", "seqlens_q": (3, 0, 9), "num_heads": 2}
CACHE = {"operation": "decode", "seqlens_k": (5, 9), "num_heads": 2, "seqlen_q": 1}
OF_CACHE = {"leftpad": True, "fp8_cache": True, "new_keys": True, "rotary": True, "page_size": 16}
FEATURES = {"alibi": True, "dropout_p": 0.5}
LATENT = {"operation": "mla", "seqlens_k": (5, 9), "seqlen_q": 1, "head_dim": 96, "head_dim_v": 32}


@pytest.mark.parametrize(
    ("asked", "inputs", "outputs", "updated"),
    [
        ({}, "q k v", "o lse", ""),
        ({"lse": False, "layout": "qkv"}, "q k v", "o", ""),
        ({**FEATURES, "sinks": True}, "q k v alibi_slopes sinks rng_state", "o lse", ""),
        (
            {**LENGTHS, **FEATURES, "sinks": True},
            "q k v cu_seqlens_q cu_seqlens_k alibi_slopes sinks rng_state",
            "o lse",
            "",
        ),
        ({"operation": "backward"}, "q k v o dout lse", "dq dk dv", ""),
        (
            {**LENGTHS, **FEATURES, "operation": "backward", "options": {"dlse": True, "wants_dkv": False}},
            "q k v o dout lse cu_seqlens_q cu_seqlens_k alibi_slopes dlse rng_state",
            "dq",
            "",
        ),
        ({"operation": "backward", "options": {"dsinks": True}}, "q k v o dout lse sinks", "dq dk dv dsinks", ""),
        (CACHE, "q k_cache v_cache cache_seqlens", "o lse", ""),
        (
            {**CACHE, "alibi": True, "options": {**OF_CACHE, "paged": True}},
            "q k_cache v_cache cache_seqlens block_table cache_leftpad alibi_slopes k_descale v_descale k_new v_new "
            "rotary_cos rotary_sin",
            "o lse",
            "k_cache v_cache",
        ),
        (
            {**CACHE, "sinks": True, "seqlens_q": (3, 0), "options": {"packed_q": True, "paged": True}},
            "q k_cache v_cache cache_seqlens block_table cu_seqlens_q sinks",
            "o lse",
            "",
        ),
        ({**LATENT, "lse": False}, "q k_cache v_cache cache_seqlens block_table", "o", ""),
    ],
)
def test_tensors_are_in_the_order_in_which_kernels_get_them(asked, inputs, outputs, updated):
    """No option makes an operation another one."""
    problem = Problem(**asked)
    assert problem.asked is operation_named(problem.operation)
    assert (problem.inputs, problem.outputs) == (tuple(inputs.split()), tuple(outputs.split()))
    assert problem.updated == tuple(updated.split())
    left_out = [name for name, tensor in problem.tensors.items() if tensor.optional]
    assert [*problem.inputs, *problem.outputs, *left_out] == sorted(problem.tensors, key=left_out.__contains__)
    drawn = make_inputs(problem).by_name
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in drawn.items()} == {
        name: (problem.tensors[name].shape, problem.tensors[name].dtype) for name in (*problem.inputs, *problem.outputs)
    }


def test_tensors_that_lie_in_others_share_their_buffer():
    shared = [buffer.names for buffer in make_inputs(Problem(layout="qkv")).buffers]
    assert shared == [("q", "k", "v"), ("o",), ("lse",)]
    caches = make_inputs(Problem(**LATENT))
    assert caches.k_cache.data_ptr() == caches.v_cache.data_ptr()


def test_types_of_tensors_follow_from_options():
    tensors = Problem(**CACHE, options=OF_CACHE).tensors
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        **dict.fromkeys(("q", "k_new", "v_new", "rotary_cos", "rotary_sin", "o"), torch.bfloat16),
        **dict.fromkeys(("k_cache", "v_cache"), FP8),
        **dict.fromkeys(("cache_seqlens", "cache_leftpad"), torch.int32),
        **dict.fromkeys(("k_descale", "v_descale", "lse"), torch.float32),
    }


@pytest.mark.parametrize(
    ("asked", "foreign"),
    [
        *(({**LATENT, "options": {name: True}}, name) for name in ("leftpad", "fp8_cache", "new_keys", "rotary")),
        ({"operation": "backward", "sinks": True}, "sinks"),
    ],
)
def test_what_an_operation_has_no_tensor_for_is_refused(asked, foreign):
    with pytest.raises(UnsupportedProblemError, match=f"the operation {asked['operation']} knows no {foreign}"):
        Problem(**asked)
