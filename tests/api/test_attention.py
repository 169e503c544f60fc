"""Attention as a function: right on whatever tensors a model has, or refused; and torch can see through it."""

import dataclasses
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

import flashladder
from flashladder.common import catalog
from flashladder.common.api import attention, operator
from flashladder.common.catalog import FASTEST
from flashladder.common.errors import ConfigError, DeviceError, UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import fast_path, ready
from flashladder.tests.support import fake_cuda
from flashladder.tests.support.onlookers import require_an_operator

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def qkv(problem, device):
    tensors = make_inputs(problem, device)
    return tensors, (tensors.q, tensors.k, tensors.v)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(seqlen_q=70, seqlen_k=100, num_heads=4, num_heads_k=2, head_dim=64, causal=True, dtype="fp16"),
        Problem(batch=2, seqlen_q=33, head_dim=96, layout="bhsd", softmax_scale=0.5),
        Problem(seqlen_q=40, seqlen_k=10, head_dim=64, causal=True, layout="padded"),
    ],
    ids=lambda problem: problem.name,
)
def test_it_is_attention(problem, device):
    tensors, inputs = qkv(problem, device)
    scale = problem.softmax_scale if problem.softmax_scale == 0.5 else None
    o, lse = attention(*inputs, causal=problem.causal, softmax_scale=scale, return_lse=True)
    expected = expect(problem, tensors)
    assert (o.shape, o.dtype, lse.dtype) == (tensors.q.shape, tensors.q.dtype, torch.float32)
    assert (o - expected.exact["o"]).abs().max() <= expected.tolerances["o"]
    torch.testing.assert_close(lse.double(), expected.exact["lse"].double(), rtol=0, atol=expected.tolerances["lse"])
    assert torch.equal(attention(*inputs, causal=problem.causal, softmax_scale=scale), o), "without the log-sum-exp"


def test_no_log_sum_exp_is_summed_that_is_not_returned(device, monkeypatch):
    fake_cuda.forget_kernels(monkeypatch)
    _, inputs = qkv(Problem(seqlen_q=48, head_dim=64), device)
    attention(*inputs, version="24")
    _, lse = attention(*inputs, return_lse=True, version="24")
    assert [each.artifact.config.lse for each in dict.fromkeys(ready.by_kind.values())] == [False, True]
    assert lse.isfinite().all()


def test_o_goes_where_it_is_wanted(device):
    _, (q, k, v) = qkv(Problem(batch=2, seqlen_q=40, num_heads=2, head_dim=64), device)
    expected, expected_lse = attention(q, k, v, return_lse=True)
    out = torch.empty(2, 2, 40, 64, dtype=q.dtype, device=device).transpose(1, 2)
    o, lse = attention(q, k, v, return_lse=True, out=out)
    assert o is out
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    for wrong, words in (
        (torch.empty_like(q[:, :20]), r"out is \(2, 20, 2, 64\) .*; O is \(2, 40, 2, 64\)"),
        (torch.empty_like(q).half(), "out is .* torch.float16 on .*; O is .* torch.bfloat16"),
        (q, "out shares memory with q; it takes memory of its own"),
        (k, "out shares memory with k; it takes memory of its own"),
        (out[:, :1].expand_as(out), "out has strides .*, by which elements lie on each other"),
        (torch.empty_like(q).requires_grad_(), "out wants a gradient"),
    ):
        with pytest.raises(UnsupportedProblemError, match=words):
            attention(q, k, v, out=wrong)
        with pytest.raises(UnsupportedProblemError, match=words):
            attention(q, k, v, out=wrong, window=(3, None))


def test_o_beside_inputs_and_on_a_part_of_them(device):
    """Views of one tensor that take turns have no byte in common; the next rows of one do."""
    memory = torch.randn(1, 24, 4, 2, 64).to(device, torch.bfloat16)
    q, k, v, out = memory.unbind(2)
    for options in ({}, {"window": (24, 24)}):
        expected = attention(q.clone(), k.clone(), v.clone(), **options)
        out.zero_()
        assert torch.equal(attention(q, k, v, out=out, **options), expected)
    for options in ({}, {"window": (3, None)}, {"return_lse": True}):
        for inputs, name in (((q[:, :16], k, v), "q"), ((k[:, :16], q, v), "k"), ((k[:, :16], v, q), "v")):
            with pytest.raises(UnsupportedProblemError, match=f"out shares memory with {name}; it takes memory of its"):
                attention(*inputs, out=q[:, 8:], **options)


def test_any_rung_that_takes_the_problem(device):
    problem = Problem(seqlen_q=128, num_heads=2)
    tensors, inputs = qkv(problem, device)
    o = flashladder.attention(*inputs, version="02")
    expected = expect(problem, tensors)
    assert (o - expected.exact["o"]).abs().max() <= expected.tolerances["o"]


def test_torch_sees_through_it(device, monkeypatch):
    """Its schema and its shapes are what torch.compile needs, which then takes a model in one piece."""
    monkeypatch.setattr(fast_path, "extension", fast_path.made())
    _, inputs = qkv(Problem(seqlen_q=16, seqlen_k=32, num_heads=2, num_heads_k=1, head_dim=64), device)
    ops = torch.ops.flashladder
    torch.library.opcheck(ops.attention.default, (*inputs, True, 0.125, FASTEST, True))
    torch.library.opcheck(ops.attention_out.default, (*inputs, inputs[0].clone(), True, None, FASTEST, False))

    def model(q, k, v):
        o, lse = attention(q, k, v, return_lse=True)
        attention(q * 2, k, v, causal=True, out=(room := torch.empty_like(o)))
        return attention(q * 2, k, v, causal=True).transpose(1, 2) + 1, o, lse + 1, room * 2

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*inputs), model(*inputs)))


@pytest.mark.parametrize("name", ["attention", "attention_out", "attention_general", "attention_backward"])
def test_torch_compile_may_pad_rows(name):
    """It pads what its own kernels write on a GPU, and with the usual tag would copy that to unpadded rows."""
    assert operator.STRIDES[0] in getattr(torch.ops.flashladder, name).default.tags


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_whoever_looks_on_sees_an_operator(device):
    _, inputs = qkv(Problem(seqlen_q=16, head_dim=64), device)
    watched, profiled = require_an_operator(*inputs)
    assert torch.equal(watched, profiled)
    meta = attention(*(tensor.to("meta") for tensor in inputs))
    assert (meta.shape, meta.device.type) == (inputs[0].shape, "meta")


def test_what_it_cannot_do_is_said(device):
    _, (q, k, v) = qkv(Problem(seqlen_q=64, head_dim=64), device)
    for arguments, options, words in (
        ((q.float(), k, v), {}, "q is torch.float32; kernels take torch.bfloat16, torch.float16"),
        ((q[0], k, v), {}, r"q has shape \(64, 1, 64\); it should be \(batch, seqlen, heads, head_dim\)"),
        ((q, k, v[:, :32]), {}, r"v is \(1, 32, 1, 64\) .*; with the other tensors it is \(1, 64, 1, 64\)"),
        (
            [torch.zeros(1, 9, 1, 520, dtype=q.dtype, device=device)] * 3,
            {},
            "takes head_dim 64, .* 512, or .*, not 520",
        ),
        ((q, k, v), {"version": "16"}, "nearest rung that takes the problem is"),
        ((q, k, v), {"softmax_scale": -1.0}, "softmax_scale=-1.0"),
    ):
        with pytest.raises(UnsupportedProblemError, match=words):
            attention(*arguments, **options)
    with pytest.raises(ConfigError, match=re.escape("no version 99; there are 00_minimal")):
        attention(q, k, v, version="99")


class Odd:
    """No number."""

    def __float__(self):
        raise TypeError("it is none")


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        *((name, "x", f"{name}='x' is of type str; it should be a torch.Tensor") for name in ("q", "k", "v", "out")),
        ("k", None, "k=None is of type NoneType; it should be a torch.Tensor"),
        ("v", np.zeros(3), "v is of type numpy.ndarray; it should be a torch.Tensor"),
        ("causal", "no", "causal='no' is of type str; it should be True or False"),
        ("causal", 1, "causal=1 is of type int; it should be True or False"),
        ("return_lse", None, "return_lse=None is of type NoneType; it should be True or False"),
        ("softmax_scale", "1", "softmax_scale='1' is of type str; it should be a number"),
        ("softmax_scale", torch.ones(2), "softmax_scale is of type torch.Tensor; it should be a number"),
        ("softmax_scale", Odd(), "softmax_scale is of type test_attention.Odd; it should be a number"),
        ("softcap", None, "softcap=None is of type NoneType; it should be a number"),
        ("version", 24, 'version=24 is of type int; it should be text, such as "24"'),
        ("version", ["24"], "version is of type list; it should be text"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_arguments_of_other_types_are_named(argument, value, words):
    q = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    given = {"q": q, "k": q, "v": q, argument: value}
    for options in ({}, {"window": (3, None)}):
        with pytest.raises(UnsupportedProblemError, match=words):
            attention(**given, **options)


def test_a_nested_tensor_is_told_of_packed_attention():
    jagged = torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged)
    words = r"q is a nested tensor; packed_attention takes its values\(\) and, as cu_seqlens, its off"
    test_arguments_of_other_types_are_named("q", jagged, words)


def test_numbers_of_numpy_and_torch_are_numbers():
    q = torch.randn(1, 16, 1, 64).bfloat16()
    expected = attention(q, q, q, softmax_scale=0.5)
    for scale in (np.float32(0.5), torch.tensor(0.5), Fraction(1, 2)):
        assert torch.equal(attention(q, q, q, softmax_scale=scale), expected)


def test_the_default_takes_what_models_have():
    for launch in catalog.ladder_of("forward").launches:
        supports = catalog.find(launch.rung).supports
        assert (supports.causal, supports.gqa, supports.seqlen_q, supports.seqlen_k) == (True, True, "any", "any")


def fastest(problem, gpu="h100", emulated=False):
    card = catalog.Card(load_gpu(gpu).arch, load_gpu(gpu), emulated)
    return catalog.choice(problem, card)[0]


def test_the_fastest_rung_that_the_gpu_has_is_taken():
    problem = Problem(num_heads=4, num_heads_k=2, seqlen_q=100, causal=True)
    assert fastest(problem).name == "49_every_width"
    assert fastest(problem, emulated=True).name == "24_woven_general"
    assert fastest(problem, "a100").name == "24_woven_general"
    wide, wider, too_wide = (dataclasses.replace(problem, head_dim=d, head_dim_v=d) for d in (192, 256, 520))
    assert fastest(wide, emulated=True).name == "24_woven_general"
    for each in (
        wide,
        wider,
        *(dataclasses.replace(problem, **asked) for asked in ({"softcap": 30.0}, {"alibi": True})),
    ):
        assert fastest(each).name == "49_every_width"
    with pytest.raises(UnsupportedProblemError, match=r"24_woven_general takes head_dim .*, not 520"):
        fastest(too_wide, "a100")


def test_heads_without_columns_are_refused():
    with pytest.raises(UnsupportedProblemError, match="head_dim=0: must be at least 1"):
        attention(*(torch.zeros(1, 4, 2, 0, dtype=torch.bfloat16) for _ in range(3)))


def test_nothing_else_is_in_the_package():
    with pytest.raises(AttributeError, match="module 'flashladder' has no attribute 'atention'"):
        flashladder.atention  # noqa: B018


@pytest.fixture(params=["Python", "C++"])
def driver(request, monkeypatch):
    """CPU tensors are taken for ones on a GPU, whose launches are noted; with both ways of a call."""
    made = fake_cuda.for_attention(monkeypatch)
    if request.param == "C++":
        monkeypatch.setattr(fast_path, "extension", fast_path.made())
    return made


def test_a_length_that_is_new_is_a_launch_and_nothing_else(driver, monkeypatch):
    q, k = (torch.zeros(1, rows, 4, 64, dtype=torch.bfloat16) for rows in (1, 100))
    attention(q, k, k, causal=True)
    for name in ("choice", "target", "build_one", "Call"):
        monkeypatch.setattr(ready, name, None)  # not even asked
    for seqlen in (101, 3000):
        more = torch.zeros(1, seqlen, 4, 64, dtype=torch.bfloat16)
        attention(q, more, more, causal=True)
        attention(more, k, k, causal=True)
    assert len(driver.launches) == 5
    assert driver.loads == 1
    assert {launch.stream for launch in driver.launches} == {fake_cuda.STREAM}


def test_a_first_call_cannot_be_captured_and_says_so(driver, monkeypatch):
    q = torch.zeros(1, 64, 4, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(DeviceError, match="which a CUDA graph cannot capture: call attention once before the capture"):
        attention(q, q, q)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    attention(q, q, q)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attention(q, q, q)
    assert len(driver.launches) == 2


def test_what_is_not_plainly_right_takes_the_slow_path(driver):
    one_row = torch.zeros(2000, dtype=torch.bfloat16).as_strided((1, 1, 4, 64), (77, 13, 64, 1))
    attention(one_row, one_row, one_row)
    assert len(driver.launches) == 1, "strides mean nothing where there is one row"
    q = torch.zeros(1, 64, 4, 64, dtype=torch.bfloat16)
    attention(q, q, torch.zeros(1, 64, 4, 68, dtype=torch.bfloat16)[..., :64])
    assert len(driver.launches) == 2, "copied"


def test_compiling_is_told(driver, monkeypatch, capsys):
    q = torch.zeros(1, 64, 4, 64, dtype=torch.bfloat16)
    attention(q, q, q)
    capsys.readouterr()
    fake_cuda.forget_kernels(monkeypatch)
    attention(q, q, q)
    assert capsys.readouterr().err == ""
    fake_cuda.forget_kernels(monkeypatch)
    monkeypatch.setattr(ready, "cached", lambda *_: None)
    attention(q, q, q)
    said = capsys.readouterr().err
    assert "note: compiling 49_every_width for sm_90a, once" in said
    assert re.search(r"note: compiled in \d+\.\d s", said)
    fake_cuda.forget_kernels(monkeypatch)
    monkeypatch.setenv("FLASHLADDER_QUIET", "1")
    attention(q, q, q)
    assert capsys.readouterr().err == ""
