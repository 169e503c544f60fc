"""What a rung that takes expressions is checked for: masks and scores as text, in `rung_features.cases`."""

import math
import random

import pytest
import torch

from flashladder.common.compiler import build_one
from flashladder.common.errors import EmulatorError
from flashladder.common.expression import Mods
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime import target
from flashladder.tests.support.random_expressions import EXTENT, random_mask, random_score
from flashladder.tests.support.rung_table import climbing, emulated, masked, packed


def masks_by_expressions(rung):
    """Alone and beside what hides keys else; of rows that see no key, and of rows before the first key."""
    sizes = {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 150, "seqlen_k": 200}
    for mask, options in (
        ("k<=q", {}),
        ("k>q-70||k%8==h", {"causal": True}),
        ("(k+q)%3!=0", {"causal": False, "window_left": 90, "window_right": 20, "sinks": True}),
        ("k%40==37&&q<120", {}),
    ):
        emulated(rung, masked(**{"causal": False, **sizes, **options}, mods=f"mask={mask}"))
    early, _ = emulated(rung, masked(seqlen_q=200, seqlen_k=120, causal=False, mods="mask=k<=q&&q!=100"))
    assert not early.o[:, [*range(80), 180]].any()
    assert (early.lse[:, :, [*range(80), 180]] == -math.inf).all()


def a_mask_that_is_the_causal_one(rung):
    """Each bit is that of the causal mask where blocks are gone through alike: in one part."""
    sizes = {"num_heads": 2, "seqlen_q": 40, "seqlen_k": 60}
    in_one_part = {name: value for name, value in {"block_n": 64, "edge_n": 32}.items() if name in rung.choices}
    built_in, _ = emulated(rung, masked(**sizes, head_dim=64), **in_one_part)
    by_text, _ = emulated(rung, masked(**sizes, head_dim=64, causal=False, mods="mask=k<=q"), **in_one_part)
    assert torch.equal(built_in.o, by_text.o)


def tensors_of_expressions(rung):
    """Of every type, and of no dimension up to four."""
    sizes = {"num_heads": 2, "seqlen_q": 50, "seqlen_k": 70, "causal": False, "batch": 2}
    ints = ["bool", "uint8", "int8", "int16", "int32", "int64"]
    declared = "".join(f"t{name}:{name}[];" for name in sorted(ints))
    mask = "||".join(f"t{name}[k]{'' if name == 'bool' else '==1'}" for name in sorted(ints))
    emulated(rung, masked(**sizes, mods=f"{declared}mask={mask}", extents=((70,),) * len(ints)))
    floats = ["bf16", "fp16", "fp32", "fp64"]
    declared = "".join(f"t{name}:{name}{'[]' * rank};" for rank, name in enumerate(floats, 1))
    score = "s*one+tbf16[k]+tfp16[h][k]+tfp32[b][h][k]-tfp64[b][h][q-20][k]"
    shapes = ((), (70,), (2, 70), (2, 2, 70), (2, 2, 50, 70))
    emulated(rung, masked(**sizes, mods=f"one:fp32;{declared}score={score}", extents=shapes))


def scores_by_expressions(rung):
    """Behind a softcap and slopes, and before a mask; every function."""
    bounds = {"softcap": 20.0, "alibi": rung.supports.alibi, "window_left": 120, "sinks": True}
    bounds |= {"dropout_p": 0.2} if rung.supports.dropout else {}
    sizes = {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 130, "seqlen_k": 190}
    emulated(rung, masked(**sizes, mods="mask=k%5!=q%5;score=max(s,-3)*(h+1)-abs(k-q)/64.0"))
    emulated(rung, masked(**sizes, **bounds, mods="mask=k%5!=q%5;score=k<100?s:k==130?-inf:s/2"))
    emulated(rung, masked(**sizes, head_dim=72, mods="score=tanh(s/4)*4+exp2(-sqrt(abs(s)))-log(1+exp(s))"))
    emulated(rung, masked(**sizes, head_dim=128, dtype="fp16", mods="score=sin(s)+cos(s)*log2(float(q+2))+floor(s)/8"))


def expressions_in_packed_sequences(rung):
    """b is a sequence's number; positions and lengths are its own."""
    if not rung.supports.packed:
        pytest.skip(f"{rung.name} takes no packed sequences")
    sizes = {"num_heads": 2, "num_heads_k": 1, "causal": False}
    mods = "image:int32[][];mask=k<=q||image[b][q]==image[b][k];score=s-(seqlen_k-k)/16.0-b"
    emulated(rung, packed((70, 0, 33, 1, 130), (120, 10, 33, 0, 200), **sizes, mods=mods, extents=((5, 200),)))


def scores_that_an_expression_lets_climb(rung):
    climbing(rung, 40, mods="score=s*s", dtype="fp16")
    emulated(rung, masked(seqlen_q=64, seqlen_k=640, causal=False, mods="score=s+(640-k)*50"))


def terms_of_keys_and_rows(rung):
    """What a mask has of the key or of the row alone: documents by a square root, by a tensor, and behind conditions.

    Lengths end within a block; rows see no key, or come before the first one. No tensor goes on behind what is seen.
    """
    sizes = {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 150, "seqlen_k": 203}
    documents = "int(8*sqrt((k+0.5)/seqlen_k))==int(8*sqrt((q+0.5)/seqlen_k))"
    for mask, extents, options in (
        (f"k<=q&&{documents}", (), {}),
        (f"{documents}&&(k/3%2==0||q%7<3)", (), {"seqlen_q": 203, "seqlen_k": 150, "causal": True}),
        ("doc[q]==doc[k]", ((203,),), {"sinks": True}),
        ("doc[k-133]==doc[q-133]||k%8==h", ((70,),), {"seqlen_q": 20, "causal": True, "window_left": 50}),
        ("doc[q]!=doc[k]%2", ((120,),), {"seqlen_q": 200, "seqlen_k": 120, "causal": True}),
        ("k<90&&doc[k]!=0||q<80||exp(-k/50.0)<0.2", ((90,),), {}),
        ("(doc[k]>0)!=(q%2==0)&&(k<150?q*0.5<k:doc[k-53]<1)", ((203,),), {"batch": 2}),
    ):
        declared = "doc:int32[];" if extents else ""
        emulated(rung, masked(**{"causal": False, **sizes, **options}, mods=f"{declared}mask={mask}", extents=extents))
    if "edge_n" in rung.config().as_dict():  # of a rung whose blocks may have fewer keys than a warp has lanes
        narrow = {"block_m": 32, "block_n": 16, "edge_n": 16, "num_warps": 2, "copy_pieces": 1, "ctas_per_sm": 1}
        problem = masked(**sizes | {"seqlen_k": 70}, causal=False, mods="doc:int32[];mask=doc[k]!=7", extents=((70,),))
        emulated(rung, problem, **narrow)
    if rung.supports.packed:
        mods = f"doc:int32[][];mask={documents}||doc[b][k]==doc[b][q]+2147483648*(q-k)"
        lengths = (70, 0, 33, 1, 130), (120, 10, 33, 0, 200)
        emulated(rung, packed(*lengths, num_heads=2, causal=False, mods=mods, extents=((5, 200),)))


def masks_of_random_expressions(rung):
    """What the host's compiler and torch agree on (tests/expression), by the device's compiler and the emulator."""
    chance = random.Random(53)
    for _ in range(5):
        mods = random_mask(chance, depth=5)
        extents = [(EXTENT,) * tensor.rank for tensor in mods.tensors]
        emulated(rung, masked(batch=2, num_heads=2, seqlen_q=40, seqlen_k=70, mods=mods.spelled, extents=extents))


def scores_of_random_expressions(rung):
    """Beside a mask, where the exact answer is finite and fp32 has its scores."""
    chance, compared = random.Random(53), 0
    while compared < 2:
        mask, score = random_mask(chance, depth=2), random_score(chance, depth=2)
        mods = Mods.parse(Mods(mask=mask.mask, score=score).spelled)
        extents = [(EXTENT,) * tensor.rank for tensor in mods.tensors]
        problem = masked(batch=2, num_heads=2, seqlen_q=40, seqlen_k=70, mods=mods.spelled, extents=extents)
        exact = expect(problem, make_inputs(problem)).exact
        if not (exact["o"].isfinite().all() and exact["lse"].nan_to_num(neginf=0).abs().max() < 100):
            continue
        compared += 1
        emulated(rung, problem)


def an_expression_has_registers(rung):
    """As it is configured by itself nothing spills. Of rungs of Hopper test_listed_blocks.py asks it."""
    if rung.instruction_set == "hopper":
        pytest.skip(f"{rung.name} has a rare path in local memory")
    arch = target.resolve("emulator", None).arch
    mods = "image:int32[];slope:fp32[];mask=k<=q||image[q]==image[k];score=s+slope[h]*(k-q)"
    for head_dim in rung.supports.head_dim:
        assert build_one(rung, rung.config(head_dim=head_dim, mods=mods), arch).local_bytes == 0, head_dim


def an_index_beyond_its_tensor(rung):
    """The memory of a tensor ends where it does; what a mask hides is not read."""
    problem = masked(seqlen_q=64, seqlen_k=70, causal=False, mods="t:int32[];mask=t[k]==0", extents=((60,),))
    with pytest.raises(EmulatorError, match=r"read out of bounds: tensor of_t, byte offset 2[45]\d of 240"):
        emulated(rung, problem)
    emulated(rung, masked(seqlen_q=70, seqlen_k=70, mods="t:int32[];score=s+t[q-k]", extents=((70,),)))


OF_EXPRESSIONS = (
    masks_by_expressions,
    a_mask_that_is_the_causal_one,
    tensors_of_expressions,
    scores_by_expressions,
    expressions_in_packed_sequences,
    scores_that_an_expression_lets_climb,
    terms_of_keys_and_rows,
    masks_of_random_expressions,
    scores_of_random_expressions,
    an_expression_has_registers,
    an_index_beyond_its_tensor,
)
