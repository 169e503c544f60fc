"""Launches in CUDA graphs, on a stand-in for torch: what a graph holds, how a sample is divided, what is refused."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from flashladder.common.errors import DeviceError, VerificationError
from flashladder.common.measure import graphs, l2, timing
from flashladder.common.measure.nvml import GpuState
from flashladder.common.measure.timing import Contender, TimingSettings, measure
from flashladder.common.problem.check import Check

RIGHT = Check(0.0, 1.0, 0.0, 1.0, faults=())
WRONG = Check(1.0, 0.1, 0.0, 1.0, faults=("o is not written",))
FAILS = "CUDA error: operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA"


class Card(timing._GpuTimer):
    """A GPU whose clock goes on by what runs, with torch's interface to its streams and graphs."""

    def __init__(self):
        self.mode, self.now, self.stream, self.graphs, self.capturing = "graph", 0.0, "main", [], None
        self.abandoned = []
        self._warnings = []
        self._monitor = SimpleNamespace(read=GpuState, other_processes=lambda: 0, missing=None)
        self._events = [(Event(self), Event(self))]
        self._held = SimpleNamespace(query=lambda: False)
        self._set_aside = SimpleNamespace(clear=lambda: None, bytes=lambda: 0)

    def _hold(self, microseconds):
        self.now += microseconds

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class Event:
    def __init__(self, card):
        self.card = card

    def record(self):
        self.at = self.card.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e3


class Graph:
    """Takes what is launched amid a capture, and runs it at each replay."""

    def __init__(self, card):
        self.card, self.held, self.replays = card, [], 0

    def capture_begin(self, pool):
        self.card.graphs.append(self)
        self.card.capturing = self

    def capture_end(self):
        self.card.capturing = None

    def replay(self):
        self.replays += 1
        for run in self.held:
            run()


class Kernel:
    """Takes as long as it says, and writes its output."""

    def __init__(self, card, time_us=10.0):
        self.card, self.time_us, self.o, self.launched_on = card, time_us, torch.zeros(1), []

    def __call__(self):
        self.launched_on.append((self.card.stream, self.card.capturing is not None))
        self.card.capturing.held.append(self.run) if self.card.capturing else self.run()
        return (self.o, None)

    def run(self):
        self.card.now += self.time_us
        self.o.fill_(1.0)


@pytest.fixture
def card(monkeypatch):
    made = Card()
    for name, value in {
        "CUDAGraph": lambda: Graph(made),
        "Stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
        "stream": made.on,
        "current_stream": lambda: "main",
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: made.abandoned.append(given), raising=False)
    return made


def verify(launch):
    """As for an official kernel: what it gives must be there."""
    return RIGHT if launch()[0].isfinite().all() else WRONG


def timed(card, rounds=4, **kernels):
    field = [Contender(name, kernel, verify, is_official=name == "official") for name, kernel in kernels.items()]
    return measure(field, TimingSettings("graph", rounds), card)


def test_a_sample_is_a_replay_of_about_2_ms(card):
    result = timed(card, official=Kernel(card, 100.0), ours=Kernel(card, 5.0), slow=Kernel(card, 5000.0))
    launches = {sample.contender: sample.launches for sample in result.samples}
    assert launches == {"official": 20, "control": 20, "ours": timing.MAX_LAUNCHES["graph"], "slow": 1}
    assert {name: result.time_us(name) for name in launches} == pytest.approx(
        {"official": 100.0, "control": 100.0, "ours": 5.0, "slow": 5000.0}
    )
    assert result.mode == "graph"


def test_each_is_captured_for_its_estimate_and_for_all_samples(card):
    kernels = {"official": Kernel(card), "ours": Kernel(card)}
    timed(card, 4, **kernels)
    timed(card, 6, **kernels)
    assert [len(graph.held) for graph in card.graphs] == [1, 200] * 4
    short, long = (sum(graph.replays for graph in card.graphs[begin : begin + 4]) for begin in (0, 4))
    assert long - short == 2 * 2 * 2 * 3  # rounds, turns, replays, of two contenders and the control


def test_warm_up_is_on_the_stream_that_is_captured(card):
    kernel = Kernel(card)
    replay = graphs.Captured(4 * [kernel])
    (stream, _), *_ = kernel.launched_on
    assert kernel.launched_on == [(stream, False)] * graphs.WARM_UP + [(stream, True)] * 4
    assert stream != "main"
    assert card.stream == "main"
    before = card.now
    assert replay() == (kernel.o, None)
    assert card.now == before + 4 * kernel.time_us


def test_what_launches_hold_stays_as_long_as_their_graph(card):
    kernel = Kernel(card)
    held = weakref.ref(kernel.o)
    replay = graphs.Captured([lambda kernel=kernel: kernel() and None])
    card.graphs[-1].held.clear()  # a graph knows addresses alone
    del kernel
    assert held() is not None
    del replay
    card.graphs.clear()
    assert held() is None


def test_cold_launches_go_from_one_copy_to_the_next(card):
    """All of them in each replay, the tensors that are verified last."""
    card.mode, card._l2_bytes, copies = "cold_graph", 1000, []

    def elsewhere(l2_bytes):
        copies[:] = [Kernel(card, 300.0) for _ in range(l2_bytes // 500)]
        return copies

    ours = Kernel(card, 300.0)
    contender = Contender("ours", ours, verify, elsewhere=elsewhere)
    result = measure([contender], TimingSettings("cold_graph", 4), card)
    held = card.graphs[-1].held
    assert held == [run for _ in range(3) for run in (*(copy.run for copy in copies), ours.run)]
    assert result.samples[0].launches == 9
    assert result.time_us("control") == pytest.approx(300.0)


def test_l2_is_flushed_by_reading(monkeypatch):
    """All of the memory; nothing of it is written."""
    read, whole_sum = [], torch.sum
    monkeypatch.setattr(torch, "sum", lambda x, *rest, **named: read.append(x) or whole_sum(x, *rest, **named))
    flush = l2.Flush(1 << 20, "cpu")
    before = flush.memory._version
    flush()
    assert [x.data_ptr() for x in read] == [flush.memory.data_ptr()]
    assert flush.memory.nbytes == read[0].nbytes == 2 << 20
    assert flush.memory._version == before


@pytest.mark.parametrize(("num_bytes", "more"), [(4 << 20, 25), (64 << 20, 2), (100 << 20, 1), (1000 << 20, 0)])
def test_so_many_copies_that_none_is_in_l2_when_its_turn_comes(num_bytes, more):
    assert l2.copies(num_bytes, 50 << 20) == more


class Refused(Kernel):
    """It waits for the GPU, say."""

    def __call__(self):
        if self.card.capturing:
            raise RuntimeError(FAILS)
        return super().__call__()


def test_an_official_kernel_that_fails_amid_a_capture_is_absent(card):
    result = timed(card, official=Refused(card, 1.0), ours=Kernel(card), other=Kernel(card, 20.0))
    reason = "official cannot be captured in a CUDA graph: CUDA error: operation not permitted when stream is capturing"
    assert result.absent == {"official": reason}
    assert (result.baseline, {*result.names}, {*result.checks}) == ("ours", {"control", "other"}, {"ours", "other"})
    assert result.ratio("other").value == pytest.approx(0.5)
    assert (card.capturing, card.abandoned, card.stream) == (None, [(0, (0, 1))], "main")


def test_one_of_ours_that_fails_amid_a_capture_is_an_error(card):
    with pytest.raises(DeviceError, match="ours cannot be captured in a CUDA graph: CUDA error: operation not"):
        timed(card, official=Kernel(card), ours=Refused(card))


class Lazy(Kernel):
    """One launch of each capture is captured, the first."""

    def __call__(self):
        captured = self.card.capturing
        return (self.o, None) if captured and captured.held else super().__call__()


def test_launches_that_are_not_captured_are_missed(card):
    reason = (
        r"ours takes 0.05 us in a CUDA graph of 200 launches and 10.00 us alone: its graph does not hold all of them"
    )
    with pytest.raises(DeviceError, match=reason):
        timed(card, official=Kernel(card), ours=Lazy(card))


class Elsewhere(Kernel):
    """It runs amid the capture, on a stream that is not captured; what is captured writes nothing."""

    def __call__(self):
        if self.card.capturing:
            self.card.capturing.held.append(lambda: self.card._hold(self.time_us))
        self.run()
        return (self.o, None)


def test_what_a_replay_does_not_compute_is_found(card):
    with pytest.raises(VerificationError, match="ours, after it was timed, is wrong"):
        timed(card, official=Kernel(card), ours=Elsewhere(card))
