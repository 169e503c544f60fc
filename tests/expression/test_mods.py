"""Mods: a mask and a score with what they read, as a configuration and a problem have them."""

import pytest

from flashladder.common.catalog import kind_of
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.expression import Declared, Mods
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.problem import Problem

NAMED = (Declared("slope", "fp32", 1), Declared("image", "int64", 2), Declared("w", "bf16", 0))
MODS = Mods.of("k <= q || image[b, q] == image[b, k]", "s * w + slope[h]", NAMED)
SPELLED = "image:int64[][];slope:fp32[];w:bf16;mask=k<=q||image[b][q]==image[b][k];score=s*w+slope[h]"
GRADIENTS = {
    "operation": "backward",
    "mods": "w:bf16;bias:fp32[][];score=s*w+bias[q][k];gradients=w+bias",
    "extents": ((7, 300), ()),
}


def test_they_are_spelled_in_one_way_and_read_back():
    assert MODS.spelled == SPELLED
    assert Mods.parse(SPELLED) == MODS
    assert Mods.parse("").spelled == Mods().spelled == ""
    assert KernelConfig.parse(f"head_dim=64,mods={SPELLED},block_m=64").mods == SPELLED


def test_the_header_declares_tensors_and_their_sizes():
    header = KernelConfig.of(mods=SPELLED).header()
    assert "constexpr bool has_mask = true;" in header
    assert "    const long long *of_image;\n" in header
    assert "    const __nv_bfloat16 *of_w;\n" in header
    assert "FLASHLADDER_FURTHER_FIELDS(Params, of_image, of_slope, of_w, extent_1_of_image)" in header
    assert list(MODS.extents()) == [("extent_1_of_image", 0, 1)]
    assert "has_score = false" in KernelConfig.of(mods="mask=k<=q").header()
    assert "using Reading = Params;" in KernelConfig.of(mods="").header()


def test_no_name_of_a_tensor_is_that_of_a_size():
    mods = Mods.of("x[q][k] + x_1[k] > 0", tensors=(Declared("x", "int32", 2), Declared("x_1", "int32", 1)))
    named = [*(tensor.field for tensor in mods.tensors), *(extent for extent, _, _ in mods.extents())]
    assert len(set(named)) == len(named) == 3


def test_a_kind_has_the_text_and_no_size():
    extents = ((2, 100), (4,), ())
    problem = Problem(num_heads=4, seqlen_q=100, mods=SPELLED.replace("<=", " <= "), extents=extents)
    other = Problem(num_heads=4, seqlen_q=300, mods=SPELLED, extents=((7, 300), (4,), ()))
    assert kind_of(problem) == kind_of(other)
    assert kind_of(problem).mods == SPELLED
    assert kind_of(problem).any_size == "dtype=bf16,head_dim=128,causal=false,mods=true"
    assert problem.inputs == ("q", "k", "v", "of_image", "of_slope", "of_w")
    assert [problem.tensors[name].shape for name in problem.inputs[3:]] == [(200,), (4,), (1,)]
    assert problem.asked.argument(problem, "extent_1_of_image") == 100


def test_gradients_of_tensors_are_outputs_of_the_backward_pass():
    problem = Problem(**GRADIENTS)
    assert problem.mods == "bias:fp32[][];w:bf16;score=s*w+bias[q][k];gradients=bias+w"
    assert problem.outputs == ("dq", "dk", "dv", "d_of_bias", "d_of_w")
    assert [problem.tensors[name].shape for name in problem.outputs[3:]] == [(2100,), (1,)]
    assert problem.asked.argument(problem, "count_of_bias") == 2100
    alone = Problem(**{**GRADIENTS, "options": {"wants_dq": False, "wants_dkv": False}})
    assert alone.outputs == ("d_of_bias", "d_of_w")
    header = KernelConfig.of(mods=problem.mods).header()
    assert "    float *d_of_bias;\n" in header
    assert "    visit(-1, params.d_of_bias, " in header
    assert "    visit(0, params.d_of_w, 0, params.count_of_w, s);" in header
    assert "has_gradients = false" in KernelConfig.of(mods=SPELLED).header()


def test_the_tensors_that_a_score_grows_with():
    texts = {"s*w+t[k]": ("t", "w"), "s+floor(w)+i[k]": (), "t[k]>0?s:w": ("w",), "s+int(t[k])": ()}
    named = [Declared("w", "fp64", 0), Declared("t", "fp16", 1), Declared("i", "int32", 1)]
    for score, growing in texts.items():
        read = [tensor for tensor in named if tensor.name in score.replace("int", "").replace("floor", "")]
        assert Mods.of(score=score, tensors=read).growing == growing
    assert Mods.of("w > 0", tensors=named[:1]).growing == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mods": "mask=k"}, "a mask is a truth value"),
        ({"mods": "k<=q"}, "is no mask=, no score=, and no tensor"),
        ({"mods": "t:int32[];mask=k<=q", "extents": ((3,),)}, "no expression reads t"),
        ({"mods": "t:int4[];mask=t[k]==0", "extents": ((3,),)}, "t is int4; expressions read bool, uint8"),
        ({"mods": "t:int32[];mask=t[k]==0"}, "reads t, each with a shape"),
        ({"mods": "t:int32[];mask=t[k]==0", "extents": ((3, 4),)}, "reads t, each with a shape"),
        ({"mods": "t:int32[];mask=t[k]==0", "extents": ((0,),)}, "reads t, each with a shape"),
        ({"extents": ((3,),)}, "reads nothing"),
        ({"mods": "t:fp32[];mask=t[k]>0;gradients=t", "extents": ((3,),)}, "no score grows with t, so"),
        ({"mods": "t:int32[];score=s+t[k];gradients=t", "extents": ((3,),)}, "no score grows with t, so"),
        ({"mods": "score=s;gradients=t"}, "no score grows with t, so"),
        (
            {**GRADIENTS, "options": {"deterministic": True}},
            "gradients of bias, w, which a score reads, are summed in any order",
        ),
        ({"mods": "mask=k<=q", "operation": "decode"}, "the operation decode knows no mods"),
    ],
)
def test_what_is_no_problem_is_refused(fields, said):
    with pytest.raises(UnsupportedProblemError) as refused:
        Problem(**fields)
    assert said in str(refused.value)


def test_more_tensors_than_kernels_take():
    named = [Declared(f"t{n}", "int32", 0) for n in range(9)]
    with pytest.raises(UnsupportedProblemError, match="read 9 tensors; kernels take 8"):
        Mods.of("+".join(tensor.name for tensor in named) + " > 0", "", named)


def test_commas_within_brackets_part_no_values():
    assert KernelConfig.parse("mods=score=min(s,max(k,q)),block_m=16").block_m == 16
    with pytest.raises(ConfigError, match="is not field=value"):
        KernelConfig.parse("block_m=16,min(s)")
