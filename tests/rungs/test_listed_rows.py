"""Rung 24 lists the tiles of rows that see a tile of keys, by a mask that is an expression; on the emulator, under the
race detector."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.errors import FlashLadderError
from flashladder.common.problem.inputs import Tensors, make_inputs
from flashladder.common.runtime.launch import Launcher
from flashladder.tests.support.backward_rungs import SAME_BITS, TILE_LATE, emulated, problem

pytestmark = pytest.mark.slow

RUNG = catalog.find("backward/24")
GROUPS = {"num_heads": 2, "num_heads_k": 1}
FEW_SEEN = {"seqlen_q": 20, "seqlen_k": 203, "causal": True, "window_left": 50, **GROUPS}
DOCUMENTS = "mask=k<=q&&int(3*sqrt((k+0.5)/seqlen_k))==int(3*sqrt((q+0.5)/seqlen_k))"


@pytest.mark.parametrize(
    ("mods", "extents", "sizes"),
    [
        (DOCUMENTS, (), {"seqlen_q": 300, "head_dim": 128}),
        ("mask=k<=q||4*k<seqlen_k", (), {"seqlen_q": 290, "seqlen_k": 330, "head_dim": 96, "dtype": "fp16"}),
        ("mask=k>=200&&k<=q", (), {"seqlen_q": 300, **SAME_BITS, **GROUPS}),  # the first tile of keys is seen by none
        ("mask=k<=q&&q!=100", (), {"seqlen_q": 200, "seqlen_k": 120, "head_dim": 128}),  # rows that see no key
        ("mask=(k+64*b)/64%3!=h&&q!=250", (), {"batch": 2, "seqlen_q": 260, "seqlen_k": 200, **GROUPS, **SAME_BITS}),
        ("mask=(k+q)%3!=0", (), {"seqlen_q": 200, "seqlen_k": 250, "window_left": 90, "window_right": 20}),
        ("mask=k%40==37&&q<120", (), {"seqlen_q": 150, "seqlen_k": 200, "softcap": 3.0, "options": {"dlse": True}}),
        ("t:int32[][];mask=t[q][k]%5==0", ((300, 300),), {"seqlen_q": 300, "dropout_p": 0.3, "alibi": True}),
        ("slope:fp32[];score=s+slope[h]*(k-q)", ((2,),), {"seqlen_q": 170, "seqlen_k": 200, **GROUPS}),
        ("score=tanh(s/4)*4", (), {"seqlen_q": 150, "softcap": 3.0, "dtype": "fp16"}),
        ("mask=k%5!=q%5;score=max(s,-3)*(h+1)-abs(k-q)/64.0", (), {"seqlen_q": 170, "causal": True, **GROUPS}),
        # What is of a key or a row alone: behind conditions, and of keys and rows that are beyond what is seen
        ("doc:int32[];mask=doc[k-133]==doc[q-133]||k%8==h", ((70,),), FEW_SEEN),
        ("doc:int32[];mask=doc[q]!=doc[k]%2", ((120,),), {"seqlen_q": 200, "seqlen_k": 120, "causal": True}),
        ("doc:int64[];mask=(doc[k]>0)!=(q%2==0)&&(k<150?q*0.5<k:doc[k-53]<1)", ((203,),), {"seqlen_k": 203}),
        ("t:int32[];score=s+t[q-k]", ((70,),), {"seqlen_q": 70, "causal": True}),  # what is hidden is not read
        ("mask=k<=q", (), {"seqlen_q": 150, "head_dim": 72, "options": {"wants_dq": False}}),
        ("mask=k<=q", (), {"seqlen_q": 150, "head_dim": 128, "options": {"wants_dkv": False}}),
    ],
)
def test_gradients(mods, extents, sizes):
    task = problem(**sizes, mods=mods, extents=extents)
    tensors = make_inputs(task)
    if "dlse" in tensors.by_name:
        tensors.dlse.masked_fill_(tensors.lse.isinf(), 0)
    emulated(RUNG, task, tensors)


def test_a_mask_that_is_the_causal_one():
    """Each bit is rung 20's under a causal mask."""
    runs = []
    for rung, asked in ((TILE_LATE, {"causal": True}), (RUNG, {"mods": "mask=k<=q"})):
        task = problem(seqlen_q=200, seqlen_k=260, head_dim=128, **asked)
        tensors = make_inputs(task)
        emulated(rung, task, tensors)
        runs.append([tensors.by_name[name].clone() for name in ("dk", "dv")])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("mask", "tiles", "ctas"), [("k>=0", 32, 4), ("k/128==q/128", 8, 4), ("k/128==1", 8, 1), ("q/64==0", 4, 0)]
)
def test_tiles_that_nobody_sees_are_not_computed(mask, tiles, ctas):
    """A tile is five products. As dQ comes a tile late, a CTA of several tiles has one product more."""
    task = problem(seqlen_q=512, seqlen_k=512, num_heads=1, head_dim=128, mods=f"mask={mask}")
    config = RUNG.config_for(task)
    product = 2 * config.block_m * config.block_n * 128
    assert (config.block_m, config.block_n) == (64, 128)
    assert emulated(RUNG, task).mma_flops == (5 * tiles + ctas) * product


@pytest.mark.parametrize("options", [{"dsinks": True}, {"deterministic": True}, {"dsinks": True, "dlse": True}])
def test_options_beside_a_list(options):
    task = problem(seqlen_q=300, **GROUPS, mods=DOCUMENTS, options=options)
    tensors = make_inputs(task)
    if "dlse" in options:
        tensors.dlse.masked_fill_(tensors.lse.isinf(), 0)
    emulated(RUNG, task, tensors)


def launches(mods, **sizes):
    task = problem(**sizes, mods=mods)
    given = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in task.tensors.items()}
    module = translate(RUNG, RUNG.config_for(task), "sm_90a")
    return Launcher(module).launches(task, Tensors(given, task), num_sms=132)


def test_lists_of_more_sequences_and_heads_than_a_grid_is_wide():
    """There are 70,400 of them, beyond what a grid takes along y and z."""
    first, second, *_ = launches("mask=(k+b)%3!=h", batch=1100, num_heads=64, seqlen_q=70, seqlen_k=130, head_dim=128)
    assert (first.entry, first.grid) == ("classify_tiles", (2 * 70400, 1, 1))
    assert (second.entry, second.grid) == ("list_rows", (2 * 70400, 1, 1))


@pytest.mark.parametrize("mods", ["mask=k<=q", "score=s-b"])
def test_a_kernel_depends_on_the_one_before_it_and_the_first_one_on_none(mods):
    assert [each.is_dependent for each in launches(mods)] == [False, *[True] * (4 if "mask" in mods else 2)]


def test_what_it_refuses():
    for mods, sizes in (
        ("score=s/2", {"head_dim": 128}),
        ("w:fp32;score=s*w;gradients=w", {"extents": ((),)}),
        ("mask=k<=q", {"seqlens_q": (70,), "seqlens_k": (70,)}),
    ):
        with pytest.raises(FlashLadderError):
            RUNG.config_for(problem(**sizes, mods=mods))
