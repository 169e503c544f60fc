"""A search without a GPU: configurations are compiled and priced by the cost model, as many as there is time for.

The default and earlier winners come first, then a configuration of each layout, then in turns one that is near to the
best so far and one that is far from all. Each price is kept in the cache as soon as it is known, so that the next
search of the same kernel for the same problems goes on where this one ended or was killed.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.compile import build
from flashladder.common.compiler.sass import occupancy
from flashladder.common.errors import DeviceError
from flashladder.common.paths import cache_dir
from flashladder.common.predict import cost
from flashladder.common.problem.config import GpuDescription, KernelConfig
from flashladder.common.records.cells import PositiveFloat
from flashladder.common.records.log import Log, Schema
from flashladder.tuner import candidates
from flashladder.tuner.candidates import Candidate
from flashladder.tuner.space import Space
from flashladder.tuner.worker import die_with_the_search

SECONDS = 60.0  # for each rung, where nobody says
SCHEMA = Schema(
    {
        "config": str,
        "code": str,
        "predicted_us": PositiveFloat,
        "registers": int,
        "local_bytes": int,
        "ctas_per_sm": int,
        "reason": str,
    }
)


@dataclass(frozen=True)
class Price:
    """What a configuration's kernel should take, or the reason why it is left out."""

    config: KernelConfig
    code: str = ""  # equal where the machine code is
    predicted_us: float = math.inf
    registers: int = 0
    local_bytes: int = 0
    ctas_per_sm: int = 0
    reason: str = ""


class Forecast:
    """The prices of a space, as far as they are known; `extend` adds to them."""

    def __init__(self, space: Space, gpu: GpuDescription, spills: int, identity: str) -> None:
        """Identity: what else decides a price, the kernel, the compiler and the problems."""
        self.space = space
        self._gpu = gpu
        self._spills = spills
        self.seeds = space.seeds(gpu.name)  # the default first
        self.configs = list(dict.fromkeys([*self.seeds, *space.configs]))
        digest = hashlib.sha256(f"{identity} {gpu} {spills} {cost.digest(*cost.PRICE_CODE)}".encode()).hexdigest()[:16]
        self._log = Log(cache_dir() / "prices" / f"{space.version.file_name}-{gpu.name}-{digest}.csv", SCHEMA)
        known = {config.name: config for config in self.configs}
        prices = (_price_of(row, known) for row in self._log.read()[0].to_dict("records"))
        self.prices = {price.config: price for price in prices if price}

    @property
    def total(self) -> int:
        """Configurations of the space."""
        return len(self.configs)

    @property
    def is_whole(self) -> bool:
        return len(self.prices) == self.total

    @property
    def extent(self) -> str:
        """How much of the space is priced, in words."""
        if self.is_whole:
            return f"all {self.total} configurations"
        return f"partial: {len(self.prices)} of {self.total} configurations"

    @property
    def kernels(self) -> list[list[Price]]:
        """Those that are worth a launch, by machine code, the fastest first."""
        alike: dict[str, list[Price]] = {}
        for price in sorted(self.prices.values(), key=lambda price: price.predicted_us):
            if not price.reason:
                alike.setdefault(price.code, []).append(price)
        return list(alike.values())

    @property
    def left_out(self) -> Counter[str]:
        """Reasons, with how many configurations they cost."""
        return Counter(price.reason for price in self.prices.values() if price.reason)

    def extend(self, seconds: float, limit: int | None, progress: Callable[..., None]) -> None:
        """Price configurations until the seconds are over, the limit is reached, or none is left; one at least.

        What is under way then is still waited for. Raises ToolchainError, and DeviceError where memory runs out.
        """
        begin, known = time.monotonic(), len(self.prices)
        most = min(self.total, limit or self.total)
        guide = _Guide(self)
        under_way: set[Future[Price]] = set()
        with _processes(self.space, self._gpu, self._spills) as submit:
            while True:
                begun = len(self.prices) + len(under_way)
                is_time = time.monotonic() - begin < seconds and begun < most
                if (is_time or not begun) and len(under_way) < _cores() and (config := guide.propose()):
                    under_way.add(submit(config))
                    continue
                if not under_way:
                    return
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    self._keep(future.result())
                within = (len(self.prices) - known) / (time.monotonic() - begin) * seconds
                progress(len(self.prices), max(len(self.prices), math.floor(min(most, known + within))))

    def _keep(self, price: Price) -> None:
        self.prices[price.config] = price
        known = None if price.reason else price.predicted_us
        self._log.append([{**vars(price), "config": price.config.name, "predicted_us": known}])


class _Guide:
    """What is priced next."""

    def __init__(self, forecast: Forecast) -> None:
        self._prices = forecast.prices
        self._seeds = forecast.seeds
        self._layouts: set[tuple[object, ...]] = set()  # of which a configuration is taken
        free = random.Random(0).sample(forecast.configs, forecast.total)  # among equals, chance decides
        self._gaps = dict.fromkeys(free, math.inf)  # fields in which one that is free differs from the nearest taken
        for config in forecast.prices:
            self._take(config)

    def propose(self) -> KernelConfig | None:
        """A configuration that was not proposed yet; None where there is none left."""
        if not self._gaps:
            return None
        config = self._choose()
        self._take(config)
        return config

    def _choose(self) -> KernelConfig:
        for seed in self._seeds:
            if seed in self._gaps:
                return seed
        if new := [config for config in self._gaps if cost.layout_of(config) not in self._layouts]:
            return min(new, key=lambda config: _differences(config, self._seeds[0]))
        worthy = [price for price in self._prices.values() if not price.reason]
        best = min(worthy, key=lambda price: price.predicted_us, default=None)
        if best is None or len(self._gaps) % 2:
            return max(self._gaps, key=self._gaps.__getitem__)
        return min(self._gaps, key=lambda config: _differences(config, best.config))

    def _take(self, taken: KernelConfig) -> None:
        del self._gaps[taken]
        self._layouts.add(cost.layout_of(taken))
        self._gaps = {config: min(gap, _differences(config, taken)) for config, gap in self._gaps.items()}


def _differences(config: KernelConfig, other: KernelConfig) -> int:
    """The fields in which two configurations of one space differ."""
    return sum(mine != theirs for mine, theirs in zip(config.items, other.items, strict=True))


class _Pricer:
    """The side of a process. Kernels that were priced, and the conflicts of layouts, are not looked at twice."""

    def __init__(self, space: Space, gpu: GpuDescription, spills: int) -> None:
        self._space = space
        self._gpu = gpu
        self._spills = spills
        self._known: dict[str, float] = {}
        self._factors: dict[object, float] = {}

    def price(self, config: KernelConfig) -> Price:
        """Compiles a configuration and prices it. Raises as `build` does, but for what does not compile."""
        space, gpu = self._space, self._gpu
        results = build(candidates.requests(space, config, gpu.arch), on_error="return")
        reason = candidates.unfit(results, gpu, None if config == space.default else self._spills)
        if reason:
            return Price(config, reason=reason)
        artifacts = tuple(result for result in results if isinstance(result, Artifact))
        kernel = Candidate(candidates.code_of(artifacts), (config,), artifacts)
        if kernel.code not in self._known:
            if cost.layout_of(config) not in self._factors:
                self._factors |= cost.conflicts(space.version, space.problems[0], [config], gpu)
            workloads = candidates.workloads(kernel, space, gpu, self._factors)
            self._known[kernel.code] = cost.mean_us([workload.time_us() for workload in workloads])
        one = artifacts[0]
        resident = occupancy(one, gpu).ctas
        return Price(config, kernel.code, self._known[kernel.code], one.registers, one.local_bytes, resident)


_pricer: _Pricer | None = None  # of a process


def _start(*arguments: Any) -> None:
    """The beginning of a process, which Ctrl-C does not concern and which does not outlive the search."""
    global _pricer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_the_search, daemon=True).start()
    _pricer = _Pricer(*arguments)


def _price(config: KernelConfig) -> Price:
    assert _pricer
    return _pricer.price(config)


@contextmanager
def _processes(*arguments: Any) -> Iterator[Callable[[KernelConfig], Future[Price]]]:
    """A process a core; gives what submits a configuration to them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "flashladder.common.runtime.execute"])
    try:
        with ProcessPoolExecutor(_cores(), context, _start, arguments) as pool:
            yield lambda config: pool.submit(_price, config)
    except BrokenProcessPool:
        raise DeviceError(
            "a process that compiles was killed: is the machine out of memory? The same command goes on"
        ) from None


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _price_of(row: dict[str, Any], known: dict[str, KernelConfig]) -> Price | None:
    """A row of the log; None where its configuration is not, or no longer, in the space."""
    if row["config"] not in known:
        return None
    price = {**row, "config": known[row["config"]]}
    return Price(**(price if not row["reason"] else {"config": price["config"], "reason": row["reason"]}))
