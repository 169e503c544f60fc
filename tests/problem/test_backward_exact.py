"""What the exact gradients allow a kernel that gets O in 16 bits."""

import math

import pytest
import torch

from flashladder.common.problem.check import Expected, expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", ["falling_steeply", "rising_steeply"])
def test_delta_is_of_the_rounded_o_under_a_softcap(family, head_dim):
    p = Problem(
        operation="backward",
        seqlen_q=1280,
        head_dim=head_dim,
        dtype="bf16",
        causal=True,
        window_left=512,
        softcap=30,
        family=family,
    )
    tensors = make_inputs(p)
    q, k, v, o, dout = (tensors.by_name[name][0, :, 0].double() for name in ("q", "k", "v", "o", "dout"))
    row, key = torch.arange(1280)[:, None], torch.arange(1280)
    tanh = torch.tanh(q @ k.T * p.softmax_scale / p.softcap)
    P = (p.softcap * tanh).masked_fill((key > row) | (key < row - 512), -torch.inf).softmax(-1)

    def faults(derivative, of_row):
        dS = P * (dout @ v.T - of_row.sum(-1, keepdim=True)) * derivative
        return verify(expect(p, tensors), {"dq": (p.softmax_scale * (dS @ k)).bfloat16()[None, :, None]}).faults

    assert not faults(1 - tanh**2, dout * o)
    assert faults(1 - tanh**2, 0.9 * dout * o)
    assert faults(1 - tanh, dout * o)


@pytest.mark.parametrize(("given", "faults"), [(-math.inf, 0), (math.inf, 1), (-3e38, 1)])
def test_what_an_outputs_type_has_no_number_for_is_infinite(given, faults):
    exact = torch.tensor([[[-8.8e38]]], dtype=torch.float64)
    found = verify(Expected({"dsinks": exact}, {"dsinks": 1e34}), {"dsinks": torch.tensor([[[given]]])})
    assert len(found.faults) == faults
