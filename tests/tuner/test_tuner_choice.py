"""Which kernel is next, and which wins: strategies, finals, and replays of the search over recorded studies."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from flashladder.common import console
from flashladder.common.errors import ConfigError, ResultsError
from flashladder.common.measure.statistics import Estimate
from flashladder.tests.support.simulated_bench import time_us
from flashladder.tests.support.tuner_stock import make_predictions, make_space, make_stock
from flashladder.tools.commands import replay as tool
from flashladder.tuner import finalists, strategies, trial_log
from flashladder.tuner.recorded import ExhaustiveStudy, replay
from flashladder.tuner.strategies import Ranked
from flashladder.tuner.strategies.corrected import Corrected
from flashladder.tuner.strategies.guided import Guided
from flashladder.tuner.strategies.in_order import InOrder
from flashladder.tuner.worker import Comparison


@pytest.fixture
def stock(tmp_path):
    return make_stock(tmp_path / "artifacts")


def at_random(kernels, seed):
    """The kernels with predicted times that mean nothing."""
    order = random.Random(seed).sample(kernels, len(kernels))
    return order, {kernel.code: float(place) for place, kernel in enumerate(order, start=1)}


def measured(strategy, trials, time_us=time_us):
    """The kernels that a strategy asks for, each told its ratio."""
    taken = {}
    while len(taken) < trials and (kernel := strategy.propose(taken.keys())):
        assert kernel.code not in taken
        taken[kernel.code] = 100 / time_us(kernel.config)
        strategy.tell(kernel, taken[kernel.code])
    return taken


def test_in_order(stock):
    strategy = InOrder(Ranked(stock.kernels[:3], {}, {}))
    assert [strategy.propose(set()), strategy.propose({stock.kernels[0].code})] == list(stock.kernels[:2])
    assert strategy.propose({kernel.code for kernel in stock.kernels[:3]}) is None


@pytest.fixture
def own_strategy(monkeypatch, tmp_path):
    """A file more among the strategies."""
    (tmp_path / "from_the_end.py").write_text(
        '"""The last one first.\n\nMore."""\n\nfrom flashladder.tuner.strategies.in_order import InOrder\n\n\n'
        "class FromTheEnd(InOrder):\n    def __init__(self, ranked):\n        self._kernels = ranked.kernels[::-1]\n"
    )
    (tmp_path / "empty.py").write_text("")
    for file in strategies.Path(strategies.__file__).parent.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(strategies, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(strategies, "__path__", [str(tmp_path)])


def test_a_file_is_enough_for_a_strategy(stock, recorded, own_strategy, capsys):
    assert strategies.ideas()["from_the_end"] == "The last one first."
    ranked = Ranked(stock.kernels, make_predictions(stock), stock.space.fields)
    assert strategies.strategy("from_the_end", ranked).propose(set()) == stock.kernels[-1]
    study = ExhaustiveStudy.load(recorded)
    assert replay(study, 0, 3, "from_the_end").measured == tuple(kernel.code for kernel in study.kernels[:-4:-1])
    assert "from_the_end: The last one first" in " ".join(tool.parser().format_help().split())
    with pytest.raises(ConfigError, match=r"empty\.py has no class Empty"):
        strategies.strategy("empty", ranked)
    with pytest.raises(ConfigError, match="no strategy guide; did you mean guided"):
        strategies.strategy("guide", ranked)


@pytest.mark.parametrize("name", strategies.ideas())
def test_every_strategy_proposes_each_kernel_once(stock, name):
    kernels = stock.kernels[:24]
    ranked = Ranked(kernels, make_predictions(stock), stock.space.fields, seeds=kernels[5:7])
    assert strategies.ideas()[name].endswith(".")
    found = list(measured(strategies.strategy(name, ranked), 99))
    assert found[:2] == [kernel.code for kernel in kernels[5:7]]
    assert set(found) == {kernel.code for kernel in kernels}


@pytest.mark.parametrize("seed", range(5))
def test_the_guided_search_finds_the_best_in_a_part_of_the_space(stock, seed):
    """Without any help from the cost model: the order is random."""
    strategy = Guided(Ranked(*at_random(stock.kernels, seed), stock.space.fields, seed=seed))
    found = measured(strategy, int(0.15 * stock.num_configs))
    best = max(100 / time_us(kernel.config) for kernel in stock.kernels)
    assert max(found.values()) >= 0.99 * best


def test_the_guided_search_learns(stock):
    strategy = Guided(Ranked(*at_random(stock.kernels, 1), stock.space.fields, seed=1))
    ratios = list(measured(strategy, 60).values())
    asked_for = ratios[8::2]  # the others are the cost model's
    assert np.mean(asked_for[-10:]) > np.mean(ratios[:8])


def test_the_guided_search_proposes_every_kernel_in_the_end(stock):
    kernels = stock.kernels[:20]
    strategy = Guided(Ranked(kernels, make_predictions(stock), stock.space.fields))
    taken = set()
    while kernel := strategy.propose(taken):
        taken.add(kernel.code)
        strategy.tell(kernel, None if len(taken) % 3 == 0 else 1.0)
    assert taken == {kernel.code for kernel in kernels}


class TestLevels:
    """Ptxas's levels differ by what the cost model does not know."""

    LEVELS = ({1: 1.0, 3: 1.06}, {1: 1.06, 3: 1.0})  # by what it multiplies the times

    @pytest.fixture
    def levels(self, tmp_path):
        return make_stock(tmp_path / "artifacts", make_space(levels=(1, 3)))

    def predictions(self, stock, seed, bias):
        """Off by some percent each, and by `bias` at level 1."""
        rng = random.Random(seed)
        return {
            kernel.code: time_us(kernel.config) * rng.uniform(1, 1.04) * (bias if kernel.config.ptxas_level == 1 else 1)
            for kernel in stock.kernels
        }

    def test_the_best_predicted_of_each_is_measured_first(self, levels):
        predicted_us = self.predictions(levels, 0, bias=2)
        found = list(measured(Corrected(Ranked(levels.kernels, predicted_us, {})), 2))
        by_code = {kernel.code: kernel for kernel in levels.kernels}
        assert [by_code[code].config.ptxas_level for code in found] == [3, 1]
        for code in found:
            level = by_code[code].config.ptxas_level
            alike = [kernel.code for kernel in levels.kernels if kernel.config.ptxas_level == level]
            assert predicted_us[code] == min(predicted_us[other] for other in alike)

    def test_the_seeds_come_before_them(self, levels):
        seeds = levels.kernels[40:43]
        strategy = Corrected(Ranked(levels.kernels, self.predictions(levels, 0, bias=2), {}, seeds))
        assert list(measured(strategy, 3)) == [kernel.code for kernel in seeds]

    @pytest.mark.parametrize("bias", [0.9, 1.1])
    @pytest.mark.parametrize("factors", LEVELS)
    def test_a_level_that_is_predicted_wrongly_is_corrected(self, levels, factors, bias):
        def truth(config):
            return time_us(config) * factors[config.ptxas_level]

        predicted_us = self.predictions(levels, 1, bias)
        found = measured(Corrected(Ranked(levels.kernels, predicted_us, {})), 20, truth)
        better = min(factors, key=factors.get)
        by_code = {kernel.code: kernel.config.ptxas_level for kernel in levels.kernels}
        assert sum(by_code[code] == better for code in found) > 12

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("factors", LEVELS)
    def test_the_best_of_both_is_found_in_a_part_of_the_space(self, levels, factors, seed):
        def truth(config):
            return time_us(config) * factors[config.ptxas_level]

        predicted_us = self.predictions(levels, seed, bias=1.1)
        strategy = Guided(Ranked(levels.kernels, predicted_us, levels.space.fields, seed=seed))
        found = measured(strategy, int(0.15 * len(levels.kernels)), truth)
        best = max(100 / truth(kernel.config) for kernel in levels.kernels)
        assert max(found.values()) >= 0.995 * best

    def test_a_kernel_in_quarantine_says_nothing_of_its_level(self, levels):
        strategy = Corrected(Ranked(levels.kernels, self.predictions(levels, 0, bias=1), {}))
        first = strategy.propose(set())
        strategy.tell(first, None)
        assert strategy.propose({first.code}).config.ptxas_level == first.config.ptxas_level


def contest(times, rounds=32, noise=0.002, seed=0):
    """Times of kernels by code, as a final would have measured them."""
    rng = np.random.default_rng(seed)
    drift = rng.normal(1, 0.02, rounds)
    times = {"fa2": 100.0, "control": 100.0, **times}
    return Comparison("fa2", "control", ({n: t * drift * rng.normal(1, noise, rounds) for n, t in times.items()},))


def decide(stock, times, default=None, **options):
    chosen = [kernel for kernel in stock.kernels if kernel.code in times]
    return finalists.decide(contest(times, **options), chosen, default)


def test_the_fastest_wins(stock):
    a, b, c = stock.kernels[:3]
    final = decide(stock, {a.code: 90.0, b.code: 80.0, c.code: 85.0}, default=a)
    assert final.winner == b
    assert [standing.kernel for standing in final.standings] == [b, c, a]
    assert final.standings[0].ratio.value == pytest.approx(1.25, rel=0.01)
    assert final.standings[0].to_default.value == pytest.approx(90 / 80, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_where_nobody_can_tell_the_default_wins(stock, seed):
    times = {kernel.code: 90.0 for kernel in stock.kernels[:5]}
    assert decide(stock, times, default=stock.kernels[3], seed=seed).winner == stock.kernels[3]


@pytest.mark.parametrize("seed", range(10))
def test_ties_are_broken_by_preference_not_by_noise(stock, seed):
    times = {kernel.code: 80.0 for kernel in stock.kernels[:4]} | {stock.kernels[4].code: 90.0}
    final = decide(stock, times, default=stock.kernels[4], seed=seed)
    assert final.winner == stock.kernels[0]


def test_a_winner_is_never_slower_than_the_default(stock):
    """A tie with the fastest is not enough where the default is between the two."""
    a, b, default = stock.kernels[:3]
    for seed in range(20):
        final = decide(stock, {a.code: 90.1, b.code: 89.9, default.code: 90.0}, default, noise=0.01, seed=seed)
        ratios = {standing.kernel: standing.ratio.value for standing in final.standings}
        assert ratios[final.winner] >= ratios[default]


def test_preference(stock):
    def kernel(name, registers, shared):
        launch = SimpleNamespace(shared_bytes=shared, num_threads=128)
        config = SimpleNamespace(name=name)
        return SimpleNamespace(artifacts=(SimpleNamespace(registers=registers, launch=launch),), config=config)

    a, b, c, d = kernel("a", 255, 1), kernel("b", 128, 2), kernel("c", 128, 1), kernel("d", 255, 1)
    assert finalists.by_preference([a, b, c, d], first=[d]) == [d, c, b, a]


def test_finalists_are_those_that_noise_may_have_put_below_the_best(stock):
    kernels = stock.kernels[:6]
    values = [1.00, 0.995, 0.97, 0.90, 0.80, 0.50]
    results = {k.code: Estimate(v, v - 0.01, v + 0.01) for k, v in zip(kernels, values, strict=True)}
    assert finalists.choose(results, kernels, [kernels[4]]) == [kernels[4], *kernels[:2]]
    assert finalists.choose({}, kernels, []) == []
    same = {kernel.code: Estimate(1.0, 0.9, 1.1) for kernel in stock.kernels[:40]}
    assert len(finalists.choose(same, stock.kernels, [])) == finalists.LIMIT


@pytest.fixture
def recorded(stock, monkeypatch, tmp_path):
    """The name of a study in which every kernel was measured, with a cost model that is often wrong."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    predicted = {
        code: time * (1 + 0.4 * random.Random(code).random()) for code, time in make_predictions(stock).items()
    }
    rows = [
        {
            "study": "recorded",
            "trial": number,
            "config": kernel.config.name,
            "code": kernel.code,
            "same_code": ";".join(config.name for config in kernel.configs[1:]),
            "predicted_us": predicted[kernel.code],
            "verdict": "measured",
            "ratio": 100 / time_us(kernel.config),
        }
        for number, kernel in enumerate(stock.kernels)
    ]
    trial_log.replace(trial_log.path_of("recorded"), trial_log.SCHEMA, rows)
    return "recorded"


def test_a_recorded_study_is_read_back(stock, recorded):
    found = ExhaustiveStudy.load(recorded)
    assert found.num_configs == stock.num_configs
    assert {kernel.configs for kernel in found.kernels} == {kernel.configs for kernel in stock.kernels}
    predicted = [found.predicted_us[kernel.code] for kernel in found.kernels]
    assert predicted == sorted(predicted)
    assert 0.5 < found.rank_correlation < 1


def test_replays_are_as_good_as_they_are_said_to_be(stock, recorded):
    found = ExhaustiveStudy.load(recorded)
    replays = [replay(found, seed, trials=40) for seed in range(3)]
    for each in replays:
        assert len(each.progress) == 40
        assert list(each.progress) == sorted(each.progress)
        assert each.found == each.progress[-1] <= 1
        before = [0.0, *each.progress]
        assert before[each.trials_to_close] >= 0.99 > before[each.trials_to_close - 1]
    assert len({each.measured for each in replays}) > 1, "seeds differ"
    assert replay(found, 0, trials=40) == replays[0]


def test_the_tool_reports_every_seed(recorded, capsys):
    assert console.run(tool.main, tool.parser(), ["recorded", "--seeds", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "528 configurations are 144 kernels" in out
    assert "Spearman's rank correlation with the predicted times: 0." in out
    assert out.count("of the best") == 2


def test_a_study_that_is_not_there(recorded, capsys):
    with pytest.raises(ResultsError, match=r"nothing\.csv has no measured trials"):
        ExhaustiveStudy.load("nothing")
