"""Memory that kernels are lent: who shares it, and that nobody comes between the kernels of a call that has it."""

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashladder import flash_attn_with_kvcache
from flashladder.common.api import operator
from flashladder.common.runtime import fast_path, workspaces
from flashladder.tests.support import fake_cuda

HEADS, HEADS_K, COLUMNS = 4, 2, 64
POINTERS = 2 * 8  # bytes: of partial results, and of their log-sum-exps


@pytest.fixture
def driver(monkeypatch):
    """CPU tensors are taken for ones on a GPU; two kernels of a call share partial results."""
    made, extension = fake_cuda.for_attention(monkeypatch), fast_path.made()
    monkeypatch.setattr(fast_path, "extension", extension)
    ready_for = operator.ready_for

    def noting(*given):
        found = ready_for(*given)
        made.parts |= {each.entry: (each.launch.params_bytes, POINTERS) for each in found.artifact.kernels}
        return found

    monkeypatch.setattr(operator, "ready_for", noting)
    return made


def call_of(batch=2, splits=2):
    q, cache = torch.zeros(batch, 1, HEADS, COLUMNS).bfloat16(), torch.zeros(batch, 9, HEADS_K, COLUMNS).bfloat16()
    lengths = torch.zeros(batch, dtype=torch.int32)
    return functools.partial(flash_attn_with_kvcache, q, cache, cache, cache_seqlens=lengths, num_splits=splits)


def known(call):
    """A call that C++ knows."""
    for _ in range(2):
        call()
    return call


def lent(driver, call):
    """What both kernels of a call were lent."""
    driver.launches.clear()
    call()
    first, second = (launch.arguments[1] for launch in driver.launches)
    assert first == second
    return first


def test_scratch_is_of_a_stream_or_of_a_capture(driver, monkeypatch):
    """So that torch need not be asked for it at each call."""
    call = known(call_of())
    first = lent(driver, call)
    kept = [torch.empty(n) for n in range(1, 5000, 500)]  # which would take memory that is free
    assert lent(driver, call) == first
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x99)
    second = lent(driver, call)
    assert second != first
    assert lent(driver, call) == second
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, **options: made.append(empty(*given, **options)) or made[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = {lent(driver, call) for _ in range(3)}
    assert len({first, second, *captured}) == 5
    assert len(made) == 6
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert lent(driver, call) == second
    del kept


def test_scratch_of_a_stream_grows(driver):
    """Calls of other sizes share it, once it is large enough for them; it is never taken from a call that has it."""
    small, large = known(call_of()), known(call_of(batch=40, splits=8))
    begun = lent(driver, small)
    grown = lent(driver, large)
    assert grown != begun
    assert lent(driver, known(call_of(batch=39, splits=8))) == grown
    assert lent(driver, small) == begun


def test_no_pool_has_what_is_kept(driver, monkeypatch):
    """Torch routes what a thread asks for to a pool: another one asks. What is captured is of the graph's pool."""
    asked, empty = [], torch.empty

    def noted(*given, **options):
        asked.append(threading.get_ident())
        return empty(*given, **options)

    call = call_of()
    call()
    monkeypatch.setattr(torch, "empty", noted)
    call()
    assert asked
    assert threading.get_ident() not in asked
    asked.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call()
    assert set(asked) == {threading.get_ident()}


def test_what_is_kept_is_the_callers_streams(monkeypatch):
    """The allocator takes the memory for the stream of who asks: another thread asks for it on the caller's."""
    on, asked = {}, []

    @contextlib.contextmanager
    def stream(given):
        on[threading.get_ident()] = given
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {threading.get_ident()} on {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: asked.append(threading.get_ident()))
    workspaces.Scratch(torch.device("cuda:1")).kept(7, 100)
    assert [on[each] for each in asked] == [f"that of {threading.get_ident()} on cuda:1"]
    assert threading.get_ident() not in asked


def test_what_is_kept_after_the_main_thread_is_there(monkeypatch):
    """A thread cannot be started when the interpreter ends: then the caller asks."""

    def refused(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert workspaces.Scratch(torch.device("cpu")).kept(7, 100).numel() == 128


def test_much_scratch_is_not_kept(driver, monkeypatch):
    monkeypatch.setattr(workspaces, "MOST_KEPT", 100)
    made, empty = [], torch.empty
    call = known(call_of())
    monkeypatch.setattr(torch, "empty", lambda *given, **options: made.append(empty(*given, **options)) or made[-1])
    for _ in range(3):
        call()
    assert [memory.dtype for memory in made] == [torch.uint8] * 3, "and as much as 100 bytes are"


def test_nobody_comes_between_the_kernels_of_a_call(driver):
    """Threads that launch on one stream share its scratch."""
    call, threads = known(call_of()), 4
    driver.launches.clear()
    first = threading.Event()
    driver.on_launch = lambda: first.wait(0.001)  # for others to come
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: call(), range(3 * threads)))
    assert [launch.function for launch in driver.launches] == ["attention_decode", "combine"] * 3 * threads
