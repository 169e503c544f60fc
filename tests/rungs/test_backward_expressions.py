"""Gradients beside masks and scores by expressions, on the emulator, under the race detector."""

import random

import pytest
import torch

from flashladder.common.expression import Mods, normal
from flashladder.common.problem.inputs import make_inputs
from flashladder.tests.support.backward_rungs import SAME_BITS, SINKS_TOO, WITH_MODS, emulated, problem
from flashladder.tests.support.random_expressions import EXTENT, random_mask, random_score

pytestmark = pytest.mark.slow

GROUPS = {"num_heads": 2, "num_heads_k": 1}
LSE_TOO = {"options": {"dlse": True}}
LEARNED = "slope:fp32[];score=s+slope[h]*(k-q);gradients=slope"


@pytest.mark.parametrize(
    ("mods", "sizes"),
    [
        ("mask=k<=q", {"seqlen_q": 70, "seqlen_k": 100, **GROUPS}),
        ("mask=k%40==37&&q<120", {"seqlen_q": 150, "seqlen_k": 200, **LSE_TOO}),
        ("mask=k<=q&&q!=100", {"seqlen_q": 200, "seqlen_k": 120, "options": SINKS_TOO}),  # rows that see no key
        ("mask=(k+q)%3!=0", {"seqlen_q": 100, "seqlen_k": 150, "window_left": 90, "window_right": 20, **SAME_BITS}),
        ("mask=k%5!=q%5;score=max(s,-3)*(h+1)-abs(k-q)/64.0", {"seqlen_q": 70, "causal": True, **GROUPS}),
        ("score=k<100?-s:k==130?-inf:s/2", {"seqlen_q": 70, "seqlen_k": 190, "dropout_p": 0.3, **GROUPS}),
        ("score=tanh(s/4)*4+exp2(-abs(s)-1)-log(1+exp(s))", {"seqlen_q": 70, "head_dim": 128, "dtype": "fp16"}),
        ("score=s<0?sin(s):floor(s)/8+sqrt(s)", {"seqlen_q": 70, "head_dim": 96, "options": {"wants_dq": False}}),
        ("score=s*s", {"seqlen_q": 40, "head_dim": 256, "softcap": 3.0, "alibi": True, **LSE_TOO}),
        ("score=q>30?s:-1e9", {"seqlen_q": 70}),  # rows whose scores are all alike, and large
    ],
)
@pytest.mark.in_turn("backward/23")
def test_masks_and_scores(mods, sizes):
    task = problem(**sizes, mods=mods)
    tensors = make_inputs(task)
    if "1e9" in mods:
        tensors.dout[:, :31] = 0  # as of padding, which no loss reads
    if "dlse" in tensors.by_name:
        tensors.dlse.masked_fill_(tensors.lse.isinf(), 0)
    emulated(WITH_MODS, task, tensors)


@pytest.mark.parametrize(
    ("mods", "extents", "sizes"),
    [
        (LEARNED, ((2,),), {"seqlen_q": 70, "seqlen_k": 140, "batch": 2, **GROUPS}),
        (f"{LEARNED};mask=k<=q&&q>90", ((2,),), {"seqlen_q": 130, **GROUPS, "dtype": "fp16"}),
        ("t:bf16[][];score=s+t[h][q-k+99];gradients=t", ((2, 199),), {"seqlen_q": 70, "seqlen_k": 100, **GROUPS}),
        ("t:fp64[][];score=tanh(s*t[q][k]);gradients=t", ((70, 70),), {"seqlen_q": 70, "softcap": 4.0, "alibi": True}),
        ("w:fp32;score=q>30?s*w:exp(w)-s;gradients=w", ((),), {"seqlen_q": 70, "options": {"wants_dkv": False}}),
        (
            "i:int32[];t:fp16[];w:fp32[];score=k>9?max(s,w[i[k]])*t[k-10]:s+w[h];gradients=t+w",
            ((130,), (120,), (5,)),
            {"seqlen_q": 100, "seqlen_k": 130, "window_left": 60, "causal": True, "dropout_p": 0.2, **GROUPS},
        ),
        (
            "t:fp32[][];u:fp32[];score=s*t[b][k]+u[h];gradients=t+u",
            ((2, 90), (1,)),
            {
                "seqlen_q": 40,
                "seqlen_k": 90,
                "batch": 2,
                "options": {"wants_dq": False, "wants_dkv": False, "dsinks": True},
            },
        ),
        (
            "t:fp32[][];mask=k<=q||t[b][k]>0;score=s*t[b][k]-(seqlen_k-k)/16.0;gradients=t",
            ((5, 200),),
            {"seqlens_q": (70, 0, 33, 1, 130), "seqlens_k": (120, 10, 33, 0, 200), **GROUPS, "options": SINKS_TOO},
        ),
    ],
)
@pytest.mark.in_turn("backward/23")
def test_gradients_of_what_a_score_reads(mods, extents, sizes):
    """Shared by all scores of a head or not, in conditions, of any type; also alone."""
    task = problem(**sizes, mods=mods, extents=extents)
    tensors = make_inputs(task)
    if "dlse" in tensors.by_name:
        tensors.dlse.masked_fill_(tensors.lse.isinf(), 0)
    emulated(WITH_MODS, task, tensors)


def test_what_is_not_read_is_not_written_either():
    """Where an element has no place in its tensor, no sum beside it changes: its neighbours are canaries."""
    mods = "t:fp32[];w:fp32;score=q>=8?s*t[q-8]:h>0?s*t[h-1]:s*w;gradients=t+w"
    emulated(WITH_MODS, problem(seqlen_q=70, num_heads=2, mods=mods, extents=((62,), ())))


def test_a_mask_that_is_the_causal_one():
    """Each bit is that of the causal mask."""
    runs = []
    for asked in ({"causal": True}, {"mods": "mask=k<=q"}):
        task = problem(seqlen_q=100, seqlen_k=140, **asked)
        tensors = make_inputs(task)
        emulated(WITH_MODS, task, tensors)
        runs.append([tensors.by_name[name].clone() for name in ("dk", "dv")])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_random_expressions():
    """Masks as those of rung 51; scores, each with the gradients of all tensors that it grows with."""
    chance, graded = random.Random(53), 0
    for _ in range(6):
        mask, score = random_mask(chance, depth=4), random_score(chance, depth=2)
        mods = Mods.parse(Mods(mask=mask.mask, score=score).spelled)
        mods = Mods.parse(";".join([mods.spelled, *([f"gradients={'+'.join(mods.growing)}"] if mods.growing else [])]))
        extents = [(EXTENT,) * tensor.rank for tensor in mods.tensors]
        task = problem(seqlen_q=40, seqlen_k=70, batch=2, mods=mods.spelled, extents=extents, **GROUPS)
        tensors = make_inputs(task)
        if not (tensors.o.isfinite().all() and tensors.lse.nan_to_num(neginf=0).abs().max() < 100):
            continue
        graded += len(mods.gradients)
        emulated(WITH_MODS, task, tensors)
    assert graded > 1, normal(score)
