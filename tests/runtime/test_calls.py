"""Calls that come often launch what the slow path would launch, or leave it to that; see runtime/calls.py."""

import contextlib
import math
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashladder.common.catalog import Supports
from flashladder.common.compiler.artifact import Artifact, RungKernel
from flashladder.common.compiler.declaration import LaunchInfo, ParamsField, TensorMapInfo, Workspace
from flashladder.common.emulator import tensor_map
from flashladder.common.errors import DeviceError
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors, make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import fast_path
from flashladder.common.runtime.calls import Call
from flashladder.common.runtime.execute import on_gpu
from flashladder.tests.support import fake_cuda
from flashladder.tests.support.attention_params import PARAMS

MAPS = tuple(TensorMapInfo(name, rows, 64, 128) for name, rows in (("q", 128), ("k", 64), ("v", 64), ("o", 16)))
PLAIN = LaunchInfo(128, 49152, 64, 64, **PARAMS)
HOPPER = LaunchInfo(384, 200000, 128, 64, ctas_per_sm=1, tensor_maps=MAPS, **PARAMS)
AFTER = LaunchInfo(32, 0, 1, 1, grid=("seqlen_q", "num_heads_k", "1"), **PARAMS)
OWN = (
    ParamsField("seqlen_k", "q", 0),
    ParamsField("o_stride", "s", 8),
    ParamsField("softmax_scale", "f", 32),
    ParamsField("num_heads", "i", 36),
    ParamsField("k", "Q", 40),
)
OTHER = LaunchInfo(96, 16, 1, 1, params_bytes=48, grid=("3", "cdiv(seqlen_q, block_n)", "batch"), fields=OWN)
COUNTERS = Workspace("next", 4, "1", zeroed=True), Workspace("partial", 4, "batch * seqlen_k * block_m", zeroed=False)
KINDS = {
    "plain": ({"attention_forward": PLAIN}, ()),
    "tensor maps and counters": ({"attention_forward": HOPPER}, COUNTERS),
    "tensor maps and a counter": ({"attention_forward": HOPPER}, COUNTERS[:1]),
    "counters by the batch": ({"attention_forward": PLAIN}, (Workspace("next", 4, "batch", zeroed=True),)),
    "a struct of its own": ({"attention_forward": PLAIN, "combine": OTHER}, COUNTERS[1:]),
    "two kernels": ({"attention_forward": PLAIN, "combine": AFTER}, COUNTERS),
}
RUNG = SimpleNamespace(supports=Supports(dtype=("bf16",), head_dim=(64,), causal=True, gqa=True))


@pytest.fixture(scope="module")
def extension():
    """Of C++, compiled now."""
    return fast_path.made()


@pytest.fixture
def driver(extension, monkeypatch):
    """With both ways of a call."""
    made = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(fast_path, "extension", extension)
    return made


ASKED = Problem(num_heads=4, num_heads_k=2, head_dim=64)


def call_of(made, rung=None, device=fake_cuda.DEVICE):
    return Call(rung or RUNG, made, ASKED, device)


def artifact(tmp_path, kind="plain", **config):
    """As the compiler would have made it."""
    (tmp_path / "kernel.cubin").write_bytes(b"")
    launches, workspaces = KINDS[kind]
    kernels = tuple(RungKernel(entry, launch, 32, 0, 0, 0) for entry, launch in launches.items())
    fields = {"dtype": "bf16", "head_dim": 64, "block_m": 64, **config}
    made = Artifact(
        "07_tiny",
        KernelConfig.of(**fields),
        "sm_90a",
        tmp_path,
        kernels,
        "forward",
        workspaces,
        compile_seconds=0.0,
        cached=True,
    )
    made.__dict__["code"] = kind
    return made


def notes(driver, made):
    """Tells the driver how long the arguments of the kernels are."""
    pointers = (8 * len(made.workspaces),) if made.workspaces else ()
    for kernel in made.kernels:
        maps = (128 * len(kernel.launch.tensor_maps),) if kernel.launch.tensor_maps else ()
        driver.parts[kernel.entry] = (kernel.launch.params_bytes, *pointers, *maps)


def done(driver):
    """What was launched, but for where the memory lies that was lent."""
    launched = [
        (each.function, each.shape, each.stream, *(part for part in each.arguments if len(part) > 16))
        for each in driver.launches
    ]
    driver.launches.clear()
    return launched


LENGTHS = st.integers(1, 300)
PROBLEMS = st.builds(
    lambda heads, group, **rest: Problem(num_heads=heads * group, num_heads_k=heads, head_dim=64, **rest),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    batch=st.integers(1, 3),
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    lse=st.booleans(),
    layout=st.sampled_from(["bshd", "bhsd", "padded"]),
    softmax_scale=st.sampled_from([0.125, 1.0]),
)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_launch_the_same(driver, tmp_path, kind):
    """In C++, in Python, and as a benchmark does."""
    made = artifact(tmp_path, kind)
    notes(driver, made)
    call = call_of(made)

    @given(PROBLEMS)
    def same(problem):
        tensors = make_inputs(problem)
        given = [tensors.by_name.get(name) for name in ("q", "k", "v", "o", "lse")]
        assert call.launch_fast(given, problem.softmax_scale)
        fast = done(driver)
        call(problem, tensors)
        assert fast == done(driver)
        on_gpu(made, problem, tensors)()
        assert fast == done(driver)
        assert len(fast) == len(made.kernels)

    same()


def bf16(*shape, stride=None):
    return (
        torch.zeros(*shape, dtype=torch.bfloat16) if stride is None else torch.empty_strided(shape, stride).bfloat16()
    )


Q, K = bf16(2, 64, 4, 64), bf16(2, 70, 2, 64)
LONG, PAIR = bf16(2, 96, 4, 64), bf16(2, 64, 2, 4, 64)
LEFT = {
    "three dimensions": {"q": Q[0]},
    "another batch": {"k": K[:1], "v": K[:1]},
    "another head_dim": {"k": K[..., :32], "v": K[..., :32]},
    "k and v differ": {"v": K[:, :69]},
    "no keys": {"k": K[:, :0], "v": K[:, :0]},
    "no rows": {"q": Q[:, :0], "o": Q[:, :0]},
    "heads that are no groups": {"q": bf16(2, 64, 3, 64), "o": bf16(2, 64, 3, 64)},
    "two types": {"v": K.half()},
    "O of another shape": {"o": Q[:, :32]},
    "O is an input": {"o": Q},
    "O begins amid an input": {"q": LONG[:, :64], "o": LONG[:, 32:]},
    "O ends amid an input": {"q": LONG[:, 32:], "o": LONG[:, :64]},
    "O lies on itself": {"o": bf16(2, 1, 4, 64).expand_as(Q)},
    "O and an input take turns": {"q": PAIR[:, :, 0], "o": PAIR[:, :, 1]},
    "odd rows": {"q": bf16(2, 64, 4, 68)[..., :64]},
    "columns apart": {"k": bf16(2, 70, 2, 128)[..., ::2]},
    "misaligned": {"q": bf16(2 * 64 * 4 * 64 + 1)[1:].view(2, 64, 4, 64)},
    "one row of an odd stride": {"q": bf16(2, 4, 68)[:, None, :, :64], "o": Q[:, :1]},
    "a scale of nothing": {"softmax_scale": 0.0},
    "no number": {"softmax_scale": math.nan},
}


@pytest.mark.parametrize("changed", LEFT.values(), ids=LEFT.keys())
def test_what_is_not_plainly_right_is_left(driver, tmp_path, changed):
    call = call_of(artifact(tmp_path))
    given = {"q": Q, "k": K, "v": K, "o": torch.empty_like(Q), "lse": None, "softmax_scale": 0.125}
    *usual, scale = given.values()
    assert call.launch_fast(usual, scale)
    driver.launches.clear()
    *others, scale = (given | changed).values()
    assert not call.launch_fast(others, scale)
    assert not driver.launches


def test_tensors_on_another_device_are_left(driver, tmp_path):
    call = call_of(artifact(tmp_path), device=torch.device("cuda", 3))
    assert not call.launch_fast((Q, K, K, torch.empty_like(Q), None), 0.125)


def test_what_a_rung_does_not_take_is_left(driver, tmp_path):
    o, k = torch.empty_like(Q), bf16(2, 64, 4, 64)
    for supports, config, taken, left in (
        ({"gqa": False}, {}, (Q, k, k, o), (Q, K, K, o)),
        ({"seqlen_k": "block_m"}, {}, (Q, k, k, o), (Q, K, K, o)),
        ({}, {"row_stride": 256}, (Q, k, k, o), (Q, K, K, o)),
    ):
        rung = SimpleNamespace(supports=RUNG.supports.model_copy(update=supports))
        call = call_of(artifact(tmp_path, **config), rung)
        assert call.launch_fast((*taken, None), 0.125)
        assert not call.launch_fast((*left, None), 0.125)


def test_a_grid_that_is_too_large_is_left(driver, tmp_path):
    call = call_of(artifact(tmp_path))
    for batch, launched in ((65535, True), (65536, False)):
        q = bf16(1, 1, 1, 64).expand(batch, 1, 1, 64)
        assert call.launch_fast((q, q, q, bf16(batch, 1, 1, 64), None), 0.125) == launched


USUAL = Problem(batch=2, num_heads=4, num_heads_k=2, seqlen_q=64, seqlen_k=70, head_dim=64, softmax_scale=0.125)


def usual(o=None):
    """The tensors of a call, by name."""
    return Tensors({"q": Q, "k": K, "v": K, "o": torch.empty_like(Q) if o is None else o}, USUAL)


def by(way, call, o=None):
    """One of the two ways of a call."""
    tensors = usual(o)
    if way == "Python":
        call(USUAL, tensors)
    else:
        assert call.launch_fast((*tensors.by_name.values(), None), 0.125)


WAYS = pytest.mark.parametrize("way", ["C++", "Python"])


def test_a_failure_is_told(driver, tmp_path):
    """C++ leaves it to Python, which says what is wrong, unless it was that this thread had no context yet."""
    call = call_of(artifact(tmp_path))
    driver.statuses = [201]
    assert not call.launch_fast((*usual().by_name.values(), None), 0.125)
    assert not driver.launches
    driver.statuses = [700]
    with pytest.raises(DeviceError, match=r"cannot launch 07_tiny with dtype=bf16.*CUDA_ERROR_MADE_UP"):
        call(USUAL, usual())


@WAYS
def test_threads_do_not_share_arguments(driver, tmp_path, way):
    """All are amid a launch at the same time; each launches what it was given."""
    call, threads = call_of(artifact(tmp_path)), 8
    driver.on_launch = threading.Barrier(threads).wait
    outputs = [torch.empty_like(Q) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda o: by(way, call, o), outputs))
    launched = {int.from_bytes(each.arguments[0][24:32], "little") for each in driver.launches}
    assert launched == {o.data_ptr() for o in outputs}


@WAYS
@pytest.mark.parametrize("kind", ["tensor maps and a counter", "tensor maps and counters", "counters by the batch"])
def test_counters_are_of_a_stream_or_of_a_capture(driver, tmp_path, monkeypatch, kind, way):
    """They stay zero, so none is cleared: runs that follow each other share one, and a captured one shares none."""
    made = artifact(tmp_path, kind)
    notes(driver, made)
    call = call_of(made)

    def counter():
        by(way, call)
        return int.from_bytes(driver.launches[-1].arguments[1][:8], "little")

    first = counter()
    assert counter() == first
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x99)
    second = counter()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = {counter() for _ in range(5)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert len({first, second, *captured}) == 7
    assert counter() == second
    monkeypatch.setattr(call._lenders[0]._zeros, "_left", 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x55)
    assert counter() not in {first, second, *captured}, "more streams than counters"


def test_maps_tell_of_the_tensors_that_a_call_was_given(driver, tmp_path):
    """Alike but for one thing, one after the other, also in memory that was another's just before."""
    made = artifact(tmp_path, "tensor maps and a counter")
    notes(driver, made)
    call = call_of(made)
    wide = bf16(2, 70, 4, 64)
    for q, k in (
        (Q, K),
        (Q.clone(), K),  # at another address
        (Q, wide[:, :, :2]),  # of other strides
        (Q[:, :63], K[:, :69]),  # of other lengths
        (Q[:1], K[:1]),
        *((bf16(2, 64, 4, 64), bf16(2, 70, 2, 64)) for _ in range(3)),  # freed, and made anew
    ):
        o = torch.empty_like(q)
        assert call.launch_fast((q, k, k, o, None), 0.125)
        maps = driver.launches[-1].arguments[2]
        for number, tensor in enumerate((q, k, k, o)):
            told = tensor_map.decode(maps[128 * number : 128 * (number + 1)])
            batch, seqlen, heads, head_dim = tensor.shape
            assert (told.address, told.dims) == (tensor.data_ptr(), (head_dim, seqlen, heads, batch))
            of_batch, of_row, of_head, _ = (2 * stride for stride in tensor.stride())
            assert told.strides == (of_row, of_head, of_batch if batch > 1 else 16)


def test_a_stride_whose_highest_bits_lie_elsewhere(driver, tmp_path):
    """It is in the map all the same. The memory is never touched."""
    made = artifact(tmp_path, "tensor maps and a counter")
    notes(driver, made)
    call = call_of(made)
    apart = 1 << 36  # bytes: one more than C++ writes itself
    private, unbacked = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x4000  # MAP_NORESERVE
    far = torch.frombuffer(mmap.mmap(-1, apart + (1 << 20), flags=private | unbacked), dtype=torch.bfloat16)
    for bytes_apart in (apart - 16, apart):
        k = far.as_strided((2, 70, 2, 64), (bytes_apart // 2, 128, 64, 1))
        o = torch.empty_like(Q)
        if not call.launch_fast((Q, k, k, o, None), 0.125):
            call(USUAL, Tensors({"q": Q, "k": k, "v": k, "o": o}, USUAL))
        maps = driver.launches[-1].arguments[2]
        assert tensor_map.decode(maps[128:256]).strides == (256, 128, bytes_apart)


def test_a_driver_that_makes_other_maps_makes_them_all(driver, tmp_path, monkeypatch):
    """C++ knows one layout; where the driver has another, the calls go through Python."""
    made = artifact(tmp_path, "tensor maps and a counter")
    notes(driver, made)
    encoded = fake_cuda._encoded
    monkeypatch.setattr(fake_cuda, "_encoded", lambda *given: encoded(*given)[:-1] + b"\1")
    call = call_of(made)
    assert call.plan is None
    by("Python", call)
    assert {driver.launches[-1].arguments[2][at] for at in (127, 255, 383, 511)} == {1}


def test_the_device_is_made_current(driver, tmp_path, monkeypatch):
    call, entered = call_of(artifact(tmp_path)), []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    by("C++", call)
    assert entered == [fake_cuda.DEVICE]
