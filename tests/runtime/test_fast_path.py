"""attention() in C++ launches what it launches in Python, and gives the same; or leaves it to Python."""

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashladder.common.api import attention
from flashladder.common.errors import DeviceError, UnsupportedProblemError
from flashladder.common.problem import inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import fast_path, ready
from flashladder.tests.support import fake_cuda
from flashladder.tests.support.onlookers import require_an_operator

VERSIONS = ("24", "34")  # plain; a persistent grid, with a counter and tensor maps


@pytest.fixture
def driver(monkeypatch):
    """CPU tensors are taken for ones on a GPU, whose launches are noted."""
    made = fake_cuda.for_attention(monkeypatch)
    made.parts["attention_forward"] = (fake_cuda.PARAMS_BYTES,)
    return made


@pytest.fixture
def short(driver, monkeypatch):
    """What C++ answered, from now on: None is left to Python."""
    extension, answers = fast_path.made(), []
    straight = lambda *given: answers.append(made := extension.straight(*given)) or made  # noqa: E731
    monkeypatch.setattr(fast_path, "extension", SimpleNamespace(**{**vars(extension), "straight": straight}))
    return answers


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


Q, K = bf16(2, 64, 4, 64), bf16(2, 70, 2, 64)


def without_memory(tensor):
    """As sharded training leaves parameters that it has not gathered."""
    shrunk = tensor.clone()
    shrunk.untyped_storage().resize_(0)
    return shrunk


@pytest.mark.parametrize("version", VERSIONS)
def test_it_launches_the_same_as_in_python(driver, short, monkeypatch, version):
    extension = fast_path.extension
    if version == "34":
        driver.parts["attention_forward"] = (fake_cuda.PARAMS_BYTES, 8, 4 * 128)

    @given(
        st.builds(
            lambda heads, group, **rest: Problem(num_heads=heads * group, num_heads_k=heads, head_dim=64, **rest),
            heads=st.integers(1, 3),
            group=st.integers(1, 3),
            batch=st.integers(1, 3),
            seqlen_q=st.integers(1, 300),
            seqlen_k=st.integers(1, 300),
            causal=st.booleans(),
            layout=st.sampled_from(["bshd", "bhsd", "padded"]),
            softmax_scale=st.sampled_from([None, 0.125, 1]),
        ),
        st.booleans(),
        st.booleans(),
    )
    def same(problem, lse, in_place):
        tensors = inputs.make_inputs(problem)
        options = {"causal": problem.causal, "softmax_scale": problem.softmax_scale, "return_lse": lse}

        def called(way):
            monkeypatch.setattr(fast_path, "extension", way)
            driver.launches.clear()
            out = torch.empty_like(tensors.q) if in_place else None
            made = attention(tensors.q, tensors.k, tensors.v, version=version, out=out, **options)
            (launch,) = driver.launches
            parts = made if lse else (made,)
            params = launch.arguments[0]
            addresses = [int.from_bytes(params[place : place + 8], "little") for place in (24, 32)]
            assert addresses == [part.data_ptr() for part in parts] + [0] * (not lse)
            assert parts[0] is out or parts[0].is_contiguous()
            maps = launch.arguments[2][: 3 * 128] if version == "34" else b""  # but for O, which is new
            shapes = [(part.shape, part.dtype, part.stride()) for part in parts]
            return launch.shape, launch.stream, params[:24], params[40:], launch.arguments[1:2], maps, shapes

        in_python = called(None)
        short.clear()
        assert called(extension) == in_python
        assert short[0] is not None

    same()


def test_what_is_new_is_made_ready_in_python(short):
    for options in ({}, {"causal": True}, {"return_lse": True}, {"version": "07"}):
        q = bf16(1, 128, 2, 128)
        for first in (True, False):
            attention(q, q, q, **options)
            assert (short.pop() is None) == first


def test_kinds_in_turns(driver, short, monkeypatch):
    """C++ remembers the last one; each call launches its own kernel all the same, also by an equal name."""
    wide = bf16(1, 64, 4, 128)
    calls = [
        partial(attention, Q, K, K, version="24"),
        partial(attention, Q, K, K, version="34"),
        partial(attention, Q, K, K, version="34", causal=True),
        partial(attention, Q, Q, Q, version="34"),
        partial(attention, Q[:, :, :2], K, K, version="34"),
        partial(attention, Q.half(), K.half(), K.half(), version="34"),
        partial(attention, wide, wide, wide, version="34"),
        partial(attention, Q, K, K, version="34", return_lse=True),
        partial(attention, Q, K, K, version="".join("34")),
    ]
    kernels = [launched_function(driver, call, monkeypatch) for call in calls]
    assert len(set(kernels)) == 5, "one for any numbers of heads and keys, with a log-sum-exp and without"
    for place in (0, 1, 2, 1, 3, 4, 1, 5, 0, 6, 8, 7, 1, 1):
        short.clear()
        assert launched_function(driver, calls[place], monkeypatch) == kernels[place]
        assert short[0] is not None
    fake_cuda.forget_kernels(monkeypatch)
    calls[1]()
    assert short.pop() is None, "what was ready elsewhere is not ready here"


def launched_function(driver, call, monkeypatch):
    """The driver's handle of the kernel that a call launches."""
    launched, usual = [], type(driver).cuLaunchKernel
    noted = lambda function, *rest: launched.append(function) or usual(driver, function, *rest)  # noqa: E731
    monkeypatch.setattr(driver, "cuLaunchKernel", noted)
    call()
    return launched.pop()


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "changed",
    [
        {"q": Q.as_subclass(Sub)},
        {"k": torch.nn.Parameter(K, requires_grad=False)},
        {"out": torch.nn.Parameter(torch.empty_like(Q), requires_grad=False)},
        {"window": (None, 5)},
        {"softcap": 3.0},
    ],
)
def test_what_is_out_of_the_ordinary_goes_the_long_way(driver, short, changed):
    arguments = {"q": Q, "k": K, "v": K}
    attention(**arguments)
    short.clear()
    attention(**arguments | changed)
    assert not any(answer is not None for answer in short)
    assert len(driver.launches) == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"out": torch.empty_like(Q).requires_grad_()}, "out wants a gradient"),
        ({"out": Q}, "out shares memory with q"),
        ({"out": Q[:1].clone()}, "out is .*; O is"),
        ({"v": K[:, :69]}, "v is .*; with the other tensors it is"),
        ({"q": Q[0]}, "q has shape"),
        ({"v": without_memory(K)}, "v has no memory"),
        ({"softmax_scale": -1.0}, "softmax_scale=-1.0"),
        ({"deterministic": "1"}, "deterministic='1' is of type str"),
        ({"softmax_scale": "1"}, "softmax_scale='1' is of type str"),
        ({"causal": []}, "causal is of type list"),
        ({"causal": 1, "return_lse": True}, "causal=1 is of type int"),
        ({"causal": True, "return_lse": 1}, "return_lse=1 is of type int"),
        ({"softcap": torch.zeros(2)}, "softcap is of type torch.Tensor"),
        ({"version": None}, "version=None is of type NoneType"),
        ({"k": None}, "k=None is of type NoneType"),
        ({"out": 5}, "out=5 is of type int"),
    ],
)
def test_what_is_wrong_is_said(driver, short, changed, words):
    """Also what equals an argument for which a kernel stands ready, but is of another type."""
    arguments = {"q": Q, "k": K, "v": K}
    attention(**arguments)
    attention(**arguments, causal=True, return_lse=True)
    driver.launches.clear()
    with pytest.raises(UnsupportedProblemError, match=words):
        attention(**arguments | changed)
    assert not driver.launches


def test_a_scale_of_any_number(driver, short):
    """What is no number of Python's own is made one on the slow path."""
    for scale, is_short in ((1, True), (1.0, True), (np.float32(1), False), (torch.tensor(1.0), False)):
        attention(Q, K, K)
        short.clear()
        attention(Q, K, K, softmax_scale=scale)
        assert (short[0] is not None) == is_short
    launched = {each.arguments[0][-4:] for each in driver.launches[1::2]}
    assert launched == {struct.pack("f", 1.0)}


def test_gradients_are_no_matter_where_none_are_computed(driver, short):
    attention(Q, K, K)
    with torch.no_grad():
        attention(Q.clone().requires_grad_(), K, K)
    assert short.pop() is not None


def test_a_failure_is_told(driver, short):
    attention(Q, K, K)
    driver.statuses = [700] * 3
    with pytest.raises(DeviceError, match=r"cannot launch .*CUDA_ERROR_MADE_UP"):
        attention(Q, K, K)


def test_an_interrupt_is_none_of_its_business(short, monkeypatch):
    attention(Q, K, K, version="34")
    (found,) = set(ready.by_kind.values())

    def interrupted(*_):
        raise KeyboardInterrupt

    found.plan.workspaces[0].lend, found.plan.workspaces[0].of_stream = interrupted, {}
    with pytest.raises(KeyboardInterrupt):
        attention(Q, K, K, version="34")


def test_another_device_is_left(driver, short, monkeypatch):
    attention(Q, K, K)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    attention(Q, K, K)
    assert short.pop() is None
    assert len(driver.launches) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_whoever_looks_on_sees_an_operator(short):
    attention(Q, K, K)
    short.clear()
    require_an_operator(Q, K, K)
    assert attention(*(tensor.to("meta") for tensor in (Q, K, K))).is_meta
    assert short[:1] == [None], "C++ is asked within the operator alone"


@pytest.mark.parametrize("version", VERSIONS)
def test_threads_launch_what_they_were_given(driver, short, version):
    """All are amid a launch at the same time."""
    attention(Q, K, K, version=version)
    driver.launches.clear()
    threads = 8
    driver.on_launch = threading.Barrier(threads).wait
    outputs = [torch.empty_like(Q) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(lambda o: attention(Q, K, K, out=o, version=version) is o, outputs))
    launched = {int.from_bytes(each.arguments[0][24:32], "little") for each in driver.launches}
    assert launched == {o.data_ptr() for o in outputs}
    assert not any(answer is None for answer in short[1:])
