"""Cheats that only a GPU has room for, on stand-ins for it: a part of L2, a held queue, another clock."""

import time
from types import SimpleNamespace

import pytest
import torch

from flashladder.common.errors import VerificationError
from flashladder.common.measure import l2, timing
from flashladder.common.measure.nvml import GpuState
from flashladder.common.measure.timing import Contender, Sample, TimingSettings, measure
from flashladder.common.problem.check import Check

RIGHT = Check(0.0, 1.0, 0.0, 1.0, faults=())


class Driver:
    """A context's limit on the part of L2 that is set aside."""

    CUlimit = SimpleNamespace(CU_LIMIT_PERSISTING_L2_CACHE_SIZE=6)

    def __init__(self):
        self.limit, self.resets = 0, 0

    def cuCtxGetLimit(self, _):
        return 0, self.limit

    def cuCtxSetLimit(self, _, size):
        self.limit = size
        return (0,)

    def cuCtxResetPersistingL2Cache(self):
        self.resets += 1
        return (0,)


class Gpu(timing._GpuTimer):
    """A queue that is held for a while by the host's clock; what is launched takes as long as it says."""

    def __init__(self, mode):
        self.mode = mode
        self.asked = []
        self._warnings = []
        self._monitor = SimpleNamespace(read=GpuState, other_processes=lambda: 0, missing=None)
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 1.0)
        self._events = [(event, event)] * 10
        self._flush = lambda: None
        self._held = SimpleNamespace(query=lambda: time.perf_counter() > self._until)
        self._set_aside = l2.SetAside()

    def plan(self, launch, elsewhere=None):
        return timing.SamplePlan(launch, launches=3, lead=1, hold_us=getattr(launch, "hold_us", 2000.0))

    def _hold(self, microseconds):
        self.asked.append(microseconds)
        self._until = time.perf_counter() + microseconds * 1e-6


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(l2, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def right(launch):
    return RIGHT


def field(launch):
    return [Contender("fa2", lambda: None, right), Contender("ours", launch, right)]


@pytest.mark.parametrize("mode", ["hot", "cold"])
def test_inputs_kept_in_a_persisting_window_of_l2(driver, mode):
    with pytest.raises(VerificationError, match=r"ours sets 48\.0 MiB of L2 aside"):
        measure(field(lambda: driver.cuCtxSetLimit(6, 48 * 2**20)), TimingSettings(rounds=2), Gpu(mode))
    assert driver.limit == 0


def test_a_window_that_was_set_before_is_taken_away(driver):
    driver.limit = 48 * 2**20
    assert measure(field(lambda: None), TimingSettings(rounds=2), Gpu("cold")).rounds == 2
    assert (driver.limit, driver.resets) == (0, 1)


def test_a_launch_that_lets_the_gpu_idle_first(driver):
    calls = iter(range(10**6))
    with pytest.raises(VerificationError, match="ours lets the GPU idle before it is timed"):
        measure(field(lambda: time.sleep(0.2) if next(calls) % 4 == 0 else None), TimingSettings(rounds=2), Gpu("hot"))


def test_a_host_that_is_late_once_is_waited_for(driver):
    naps = iter([0.004])
    gpu = Gpu("hot")
    measure(field(lambda: time.sleep(next(naps, 0))), TimingSettings(rounds=2), gpu)
    assert max(gpu.asked) >= 8 * 2000.0


def test_all_hold_the_queue_for_as_long(driver):
    """Or who has a slow host would come upon a card that idled for longer."""
    slow = SimpleNamespace(hold_us=3000.0)
    gpu = Gpu("hot")
    measure(field(type("Launch", (), {"__call__": lambda self: None, **vars(slow)})()), TimingSettings(rounds=3), gpu)
    assert set(gpu.asked) == {3000.0}


def test_another_clock_than_the_baselines_is_said():
    def samples(mhz):
        return tuple(
            Sample(0, name, 1, 1.0, GpuState(sm_mhz=mhz if name == "ours" else 1755)) for name in ("fa2", "ours") * 2
        )

    assert timing.Measurement("hot", "fa2", samples(1980), {}).notes() == ["ours ran at 1980 MHz, fa2 at 1755"]
    assert timing.Measurement("hot", "fa2", samples(1765), {}).notes() == []
