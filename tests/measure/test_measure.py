"""Paired timing without a GPU: the order of rounds, when they end, and that the verdicts are right on known times."""

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from flashladder.common.errors import VerificationError
from flashladder.common.measure import cpu_timer, timing
from flashladder.common.measure.nvml import GpuState
from flashladder.common.measure.statistics import (
    Estimate,
    geometric_mean,
    harmonic_mean,
    noise_floor,
    paired_ratio,
    verdict,
)
from flashladder.common.measure.timing import CONTROL, Contender, Measurement, Sample, TimingSettings, measure
from flashladder.common.problem.check import Check

RIGHT = Check(0.0, 1.0, 0.0, 1.0, faults=())


class FakeTimer:
    """Asks the launch itself for its time."""

    def __init__(self, mode):
        self.mode = mode

    def plan(self, launch, elsewhere=None):
        return timing.SamplePlan(launch, launches=10, lead=1, hold_us=0)

    def sample(self, plan):
        return plan.launch(), GpuState(sm_mhz=1980)

    def warnings(self):
        return ()


@pytest.fixture
def fake_timer(monkeypatch):
    monkeypatch.setattr(timing, "_GpuTimer", FakeTimer)


def contender(name, time_us, verify=lambda launch: RIGHT):
    return Contender(name, time_us if callable(time_us) else lambda: time_us, verify)


def noisy_gpu(rng, noise):
    """Times that share a drift, each with its own noise and now and then a disturbance."""
    drift = [1.0]

    def launch(time_us):
        drift[0] *= 1 + rng.gauss(0, 0.0005)
        disturbance = rng.expovariate(30) if rng.random() < 0.05 else 0
        return time_us * drift[0] * (1 + rng.gauss(0, noise) + disturbance)

    return launch


@pytest.mark.parametrize(("factor", "wanted"), [(1.0, "tied"), (1.01, "slower"), (0.99, "faster")])
def test_forty_trials(fake_timer, factor, wanted):
    """A against A is tied, and one per cent is found, in at least 95 % of 40 trials."""
    verdicts = Counter()
    for trial in range(40):
        rng = random.Random(trial)
        gpu = noisy_gpu(rng, noise=0.003)
        field = [contender("fa2", lambda gpu=gpu: gpu(100.0)), contender("07", lambda gpu=gpu: gpu(100.0 * factor))]
        verdicts[measure(field, TimingSettings(rounds=24, seed=trial)).verdict("07")] += 1
    assert verdicts[wanted] >= 38, verdicts


def test_rounds_are_mirrored_and_shuffled(fake_timer):
    result = measure([contender("fa2", 2.0), contender("07", 1.0)], TimingSettings(rounds=10))
    by_round = [[s.contender for s in result.samples if s.round == number] for number in range(10)]
    assert all(order == order[::-1] and sorted(order[:3]) == ["07", CONTROL, "fa2"] for order in by_round)
    assert len({tuple(order) for order in by_round}) > 2
    assert result.ratio("07").value == 2.0
    assert result.verdict("07") == "faster"
    assert result.control == Estimate(1.0, 1.0, 1.0)


def test_quiet_times_end_early_and_noisy_ones_at_the_budget(fake_timer):
    quiet = measure([contender("fa2", 2.0), contender("07", 1.0)])
    assert quiet.rounds == timing.MIN_ROUNDS["hot"]
    rng = random.Random(0)
    field = [contender(name, lambda: rng.uniform(1, 2)) for name in ("fa2", "07")]
    noisy = measure(field, TimingSettings(budget_s=0.3))
    assert noisy.rounds > timing.MIN_ROUNDS["hot"]


def test_a_very_slow_kernel_is_not_timed_for_ever(fake_timer, monkeypatch):
    monkeypatch.setitem(timing.BUDGET_S, "hot", 0.0)
    assert measure([contender("fa2", 2.0), contender("00", 1e7)]).rounds == 2


def test_a_wrong_output_gets_no_figure(fake_timer):
    wrong = Check(1.0, 0.1, 0.0, 1.0, faults=("o[0, 0, 0, 0] is 1 instead of 0",))
    launched = []
    with pytest.raises(VerificationError, match=r"07, before it was timed, is wrong:\n  o\[0, 0, 0, 0\]"):
        measure([contender("fa2", lambda: launched.append(1)), contender("07", 1.0, lambda launch: wrong)])
    assert not launched
    answers = iter([RIGHT, wrong])
    with pytest.raises(VerificationError, match="07, after it was timed, is wrong"):
        measure([contender("fa2", 1.0), contender("07", 1.0, lambda launch: next(answers))], TimingSettings(rounds=2))


def test_a_throttled_or_shared_gpu_is_said_so():
    cool, capped = GpuState(sm_mhz=1980), GpuState(sm_mhz=1600, slowdowns=("power cap",))
    samples = tuple(Sample(0, name, 1, 1.0, state) for name, state in zip("abba", [cool] * 3 + [capped], strict=True))
    result = Measurement("hot", "a", samples, {}, warnings=("the GPU is shared with 2 other processes",))
    assert result.notes() == [
        "power cap in 25% of samples",
        "b ran at 1980 MHz, a at 1790",
        "the GPU is shared with 2 other processes",
    ]
    assert result.clock_mhz("a") == 1790
    assert Measurement("sustained", "a", samples, {}).notes() == ["power cap in 25% of samples"]


def test_what_else_runs_on_the_cpu_is_left_out(monkeypatch):
    """Half of all launches are disturbed for long, and the figures are those of the undisturbed ones."""
    now, rng = [0.0], random.Random(0)
    monkeypatch.setattr(cpu_timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def launch(time_us):
        disturbance = rng.uniform(0, 20) if rng.random() < 0.5 else 0
        now[0] += time_us * 1e-6 * (1 + disturbance + rng.uniform(0, 0.01))

    field = [contender("sdpa", lambda: launch(560)), contender("c", lambda: launch(810))]
    result = measure(field, TimingSettings(rounds=16), cpu_timer.CpuTimer("hot"))
    assert result.time_us("sdpa") == pytest.approx(560, rel=0.02)
    assert result.time_us("c") == pytest.approx(810, rel=0.02)
    assert result.ratio("c").value == pytest.approx(560 / 810, rel=0.02)
    assert result.verdict("c") == "slower"


def test_a_loud_machine_is_said_to_be_so(fake_timer):
    rng = random.Random(0)
    loud = measure([contender(name, lambda: rng.uniform(1, 3)) for name in ("fa2", "07")], TimingSettings(rounds=8))
    assert any("the same kernel differs from itself by" in note for note in loud.notes())
    quiet = measure([contender(name, 1.0) for name in ("fa2", "07")], TimingSettings(rounds=8))
    assert quiet.notes() == []


def test_ratio_ignores_drift_and_the_odd_disturbance():
    drift = np.linspace(1, 2, 20)
    ours = 100 * drift
    ours[3] *= 5
    ratio = paired_ratio(120 * drift, ours)
    assert ratio.value == pytest.approx(1.2)
    assert ratio.low == pytest.approx(1.2)
    assert ratio.high == pytest.approx(1.2)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    trials = [paired_ratio(rng.normal(1.1, 0.01, 25), rng.normal(1, 0.01, 25), seed) for seed in range(200)]
    covered = sum(trial.low <= 1.1 <= trial.high for trial in trials)
    assert covered >= 0.9 * 200


def test_geometric_and_harmonic_means():
    pairs = [(np.full(5, 2.0), np.full(5, 1.0)), (np.full(5, 1.0), np.full(5, 8.0))]
    assert geometric_mean(pairs).value == pytest.approx(0.5)
    assert harmonic_mean([100.0, 300.0]) == pytest.approx(150.0)


QUIET = Estimate(1.0, 0.9995, 1.0004)
LOUD = Estimate(1.0, 0.97, 1.03)


@pytest.mark.parametrize(
    ("ratio", "control", "wanted"),
    [
        (Estimate(1.02, 1.015, 1.025), QUIET, "faster"),
        (Estimate(0.99, 0.988, 0.992), QUIET, "slower"),
        (Estimate(1.001, 0.998, 1.004), QUIET, "tied"),
        (Estimate(1.004, 1.0, 1.008), QUIET, "unclear"),
        (Estimate(1.02, 1.015, 1.025), LOUD, "unclear"),
        (Estimate(1.0, 0.98, 1.02), LOUD, "unclear"),
        (Estimate(1.1, 1.08, 1.12), LOUD, "faster"),
    ],
)
def test_verdicts(ratio, control, wanted):
    assert verdict(ratio, control) == wanted


def test_no_control_is_quieter_than_the_clock():
    assert noise_floor(Estimate(1.0, 1.0, 1.0)) == 0.001
    assert noise_floor(LOUD) == pytest.approx(0.03)
