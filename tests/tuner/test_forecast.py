"""The search without a GPU: which configurations are priced, what is kept, and what a kill leaves."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager

import pandas as pd
import pytest

from flashladder.common import catalog
from flashladder.common.paths import ROOT
from flashladder.common.problem.config import KernelConfig, load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.problem.rules import Expression
from flashladder.tests.support.simulated_bench import time_us
from flashladder.tests.support.tuner_stock import make_space
from flashladder.tuner import forecast
from flashladder.tuner.forecast import Forecast, Price
from flashladder.tuner.space import Space

pytestmark = pytest.mark.slow

A100, H100 = load_gpu("a100"), load_gpu("h100")
TOP = 0.05  # of the kernels that are worth a launch
AFFORDED = 30  # configurations that two cores price in a minute, when they have nothing else to do


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def priced(monkeypatch):
    """Prices are made up, at once; gives the configurations in the order in which they were asked for."""
    asked = []

    def price(config):
        if config.block_n == 32:
            return Price(config, reason="does not compile")
        return Price(config, config.name, time_us(config), 128, 0, 2)

    install(monkeypatch, price, asked)
    return asked


def install(monkeypatch, price, asked):
    @contextmanager
    def processes(*_):
        def submit(config):
            asked.append(config)
            future = Future()
            future.set_result(price(config))
            return future

        yield submit

    monkeypatch.setattr(forecast, "_processes", processes)


def make(identity="kernel", space=None, gpu=A100):
    return Forecast(space or make_space(), gpu, 256, identity)


def extend(found, limit=None, seconds=math.inf):
    steps = []
    found.extend(seconds, limit, lambda *step: steps.append(step))
    return steps


def test_the_default_and_earlier_winners_come_first(priced):
    found = make()
    extend(found, limit=len(found.space.seeds("a100")))
    assert priced == found.space.seeds("a100")
    assert priced[0] == found.space.default


def test_a_ranking_goes_on_where_another_ended(priced):
    extend(make(), limit=20)
    found = make()
    assert len(found.prices) == 20
    assert found.extent == "partial: 20 of 528 configurations"
    extend(found, limit=50)
    assert len(priced) == len(set(priced)) == 50
    assert make().prices == found.prices


def test_all_of_a_space_is_priced_in_the_end(priced):
    found = make()
    steps = extend(found)
    assert found.is_whole
    assert found.extent == "all 528 configurations"
    assert sorted(priced, key=str) == sorted(found.space.configs, key=str)
    assert steps[-1] == (528, 528)
    assert found.left_out == {"does not compile": 144}
    times = [kernel[0].predicted_us for kernel in found.kernels]
    assert times == sorted(times)
    assert len(times) == 384


def test_without_time_one_is_priced(priced):
    found = make()
    extend(found, seconds=0)
    assert priced == [found.space.default]
    extend(found, seconds=0)
    assert len(priced) == 1, "nothing is begun after the time is over"


def test_the_count_s_end_is_what_the_time_allows(priced, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(forecast.time, "monotonic", lambda: float(next(clock)))
    steps = extend(make(), seconds=100)
    assert steps[-1][0] == len(priced)
    assert all(done <= total <= 528 for done, total in steps)
    assert 20 < steps[2][1] < 60, "the end is foreseen early"


def test_prices_of_another_kernel_are_not_those_of_this_one(priced):
    extend(make("a kernel"), limit=3)
    assert make("a kernel").prices
    assert not make("another").prices
    assert not make("a kernel", gpu=H100).prices


def test_a_torn_line_costs_one_price(priced, cache):
    extend(make(), limit=5)
    (log,) = (cache / "prices").glob("*.csv")
    log.write_bytes(log.read_bytes()[:-10])
    found = make()
    assert len(found.prices) == 4
    extend(found, limit=5)
    assert len(make().prices) == 5


def test_kernels_of_one_code_are_one(monkeypatch):
    install(monkeypatch, lambda config: Price(config, str(config.block_m), 100.0 + config.block_m, 128, 0, 2), [])
    found = make()
    extend(found, limit=100)
    assert [kernel[0].code for kernel in found.kernels] == ["64", "128"]
    assert sum(map(len, found.kernels)) == 100


def recorded(name):
    """The predicted times of a study in which every kernel was measured, by configuration, and the space."""
    (path,) = (ROOT / "results" / "tuning").glob(f"{name}_*-h100-bf16-d128-full.csv")
    space = Space.of(catalog.find(name), [Problem(batch=4, num_heads=16, seqlen_q=4096)], H100)
    rows = pd.read_csv(path, keep_default_na=False)
    times = {}
    for row in rows.itertuples():
        for each in filter(None, [row.config, *row.same_code.split(";")]):
            values = {"ptxas_level": 3, **KernelConfig.parse(each).as_dict()}
            times[KernelConfig.of(**{field: values[field] for field in space.fields})] = float(row.predicted_us)
    levels = tuple({config.ptxas_level for config in times})
    return Space.of(space.version, space.problems, H100, {"ptxas_level": levels}), times


@pytest.mark.parametrize("name", ["02", "09", "16", "22"])
def test_a_minute_s_prices_hold_a_good_configuration(name, monkeypatch):
    """Told nothing of earlier winners: over the predictions of whole spaces, of which a sixth to a half is left out."""
    space, times = recorded(name)
    monkeypatch.setattr(Space, "seeds", lambda self, gpu: [self.default])
    install(
        monkeypatch,
        lambda config: (
            Price(config, config.name, times[config], 128, 0, 2) if config in times else Price(config, reason="spills")
        ),
        [],
    )
    found = make(space=space, gpu=H100)
    extend(found, limit=AFFORDED)
    bar = sorted(times.values())[math.ceil(TOP * len(times)) - 1]
    assert found.kernels[0][0].predicted_us <= bar


def test_a_space_can_be_sent_to_another_process():
    space = make_space()
    again = pickle.loads(pickle.dumps(space))
    assert again == space
    expression = Expression("cdiv(a, 2) + 1")
    assert expression.value({"a": 3}) == pickle.loads(pickle.dumps(expression)).value({"a": 3}) == 3


COMMAND = [sys.executable, str(ROOT / "tuner" / "search.py"), "02", "--gpu", "a100", "--offline"]
SMALL = ["--seqlens", "256", "--tokens", "256", "--heads", "1"]


def rank(*arguments):
    return subprocess.Popen([*COMMAND, *SMALL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_ranking_that_is_killed_goes_on(cache, monkeypatch, tmp_path):
    """Kernels of rung 02, compiled and priced; then kill -9, and what is left of it."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    search = rank("--exhaustive")
    while not (prices := read_prices(cache)):
        assert search.poll() is None, search.stdout.read()
        time.sleep(0.1)
    os.kill(search.pid, signal.SIGKILL)
    search.wait()
    deadline = time.monotonic() + 60
    while processes_that_name(str(cache)):
        assert time.monotonic() < deadline, "a process outlives the search"
        time.sleep(0.1)
    again = rank("--compile", "3", "--exhaustive")
    out = " ".join(again.communicate(timeout=120)[0].split())
    assert again.returncode == 0, out
    assert "PREDICTED by the cost model, nothing was measured; partial: 3 of 1056 configurations" in out
    assert "The same command goes on with the others." in out
    assert read_prices(cache)[: len(prices)] == prices
    assert len(read_prices(cache)) == 3
    assert list((cache / "building").iterdir()) == [], "what the killed search left is swept away"
    (ranking,) = (tmp_path / "results" / "predicted").glob("02_swizzling-a100-*.csv")
    rows = pd.read_csv(ranking)
    assert set(rows["verdict"]) == {"predicted"}
    assert set(rows["ranking"]) == {"partial: 3 of 1056 configurations"}
    assert rows["predicted_us"].is_monotonic_increasing


def read_prices(cache):
    return [line for path in (cache / "prices").glob("*.csv") for line in path.read_text().splitlines()[1:]]


def processes_that_name(text):
    """Of the search's children: ninja and compilers name the cache in their arguments."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if text in line]
