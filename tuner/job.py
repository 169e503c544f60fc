"""One rung to be tuned for one GPU: from its space to a winner in configs/tuned."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.compiler.compile import NVCC_FLAGS, PTXAS_FLAGS, BuildProgress
from flashladder.common.compiler.sources import Sources
from flashladder.common.compiler.toolchain import toolchain, version_text
from flashladder.common.console import progress, warn
from flashladder.common.errors import ConfigError, DeviceError
from flashladder.common.measure.timing import BUDGET_S, Mode
from flashladder.common.problem.config import GpuDescription, spell
from flashladder.common.runtime.gpu import require_gpu
from flashladder.tuner import AUTO, candidates
from flashladder.tuner.candidates import Candidate, Stock
from flashladder.tuner.forecast import Forecast
from flashladder.tuner.gpu_bench import OnGpu, opponents
from flashladder.tuner.ledger import Ledger
from flashladder.tuner.space import Space
from flashladder.tuner.storage import default_url
from flashladder.tuner.strategies import USUAL, WHOLE, Ranked, Strategy, strategy
from flashladder.tuner.study_runner import ROUNDS, Budget, Effort, StudyRunner
from flashladder.tuner.worker import Worker

FEW = 20  # kernels that are all measured; of more, a part, and no fewer than these
PART = 0.15
LEAST_SECONDS = 2.0  # of measuring, however little time is left: some kernels, the default among them


@dataclass(frozen=True)
class SearchSettings:
    """How to search; None is what the tuner thinks best."""

    trials: int | None = None
    seconds: float = math.inf
    exhaustive: bool = False
    compiled: int | None = None  # configurations
    spills: int = candidates.SPILLS
    mode: Mode = "hot"
    rounds: int = ROUNDS
    seed: int = 0
    strategy: str = USUAL  # a file of strategies/, for a search of a part of the kernels
    study: str | None = None
    storage: str | None = field(default=None, repr=False)  # it may hold a password


@dataclass(frozen=True)
class Ranking:
    """A compiled space, its kernels in the order in which they should be measured."""

    stock: Stock
    order: tuple[Candidate, ...]
    predicted_us: dict[str, float]  # by code


@dataclass(frozen=True)
class Job:
    """A space, the GPU, and how to search."""

    space: Space
    gpu: GpuDescription
    settings: SearchSettings
    winners: Path | None = None  # the folder that winners go to, if not the rung's own

    @property
    def home(self) -> Path | None:
        """Where winners are kept, as winners.path_of takes it."""
        return self.winners or self.space.version.home

    @property
    def study(self) -> str:
        """The study's name: '16_static_stride-h100-bf16-d128-full', and to what the space was narrowed."""
        if self.settings.study:
            return self.settings.study
        narrowed = [f"{name}={'+'.join(map(spell, values))}" for name, values in self.space.only.items()]
        return "-".join([self.space.version.file_name, self.gpu.name, self.space.words, *narrowed])

    @property
    def storage(self) -> str:
        """The URL of the study's storage."""
        return self.settings.storage or default_url(self.folder)

    @property
    def folder(self) -> Path:
        """Of results: this repository's, or those of a ladder of one's own."""
        return catalog.results_of([self.space.version])

    def ledger(self) -> Ledger:
        """The study, new or as it was left. Raises as Ledger does."""
        return Ledger(self.storage, self.study, self.identity(), self.space.fields, self.folder)

    def identity(self) -> dict[str, Any]:
        """What every search of one study must have in common."""
        compiler = toolchain()
        tools = (version_text(compiler.nvcc), version_text(compiler.ptxas), *NVCC_FLAGS, *PTXAS_FLAGS)
        return {
            "rung": self.space.version.name,
            "kernel": _source_digest(self.space),
            "gpu": self.gpu.name,
            "compiler": f"CUDA {compiler.release}, {_digest(*tools)}",
            "problems": [problem.name for problem in self.space.problems],
            "fields": {name: list(values) for name, values in self.space.fields.items()},
            "timing": self.settings.mode,
            "baseline": opponents(self.space.problems),
        }

    def rank(self, on_progress: BuildProgress | None = None) -> Ranking:
        """Compile everything, or as much as the settings say, and rank it."""
        settings = self.settings
        stock = candidates.compile_all(self.space, self.gpu, settings.spills, on_progress, settings.compiled)
        predicted_us = candidates.predict(stock, self.gpu, on_progress)
        ranked = sorted(stock.kernels, key=lambda kernel: predicted_us[kernel.code])
        order = tuple(dict.fromkeys([*stock.seeds(self.gpu.name), *ranked]))
        return Ranking(stock, order, predicted_us)

    def forecast(self) -> Forecast:
        """The prices of the cost model that are known, which the GPU need not be there for."""
        decisive = {name: self.identity()[name] for name in ("rung", "kernel", "compiler", "problems")}
        return Forecast(self.space, self.gpu, self.settings.spills, str(decisive))

    def budget(self, ranking: Ranking, seconds: float = math.inf) -> Budget:
        """How much to measure; `seconds`: what is left of a time that rungs share, the final included."""
        total = len(ranking.order)
        trials = self.settings.trials or usual_trials(total)
        search = max(LEAST_SECONDS, seconds - BUDGET_S[self.settings.mode] * len(self.space.problems))
        trials = total if self.settings.exhaustive else min(trials, total)
        return Budget(trials, min(search, self.settings.seconds), may_grow=self.settings.trials is None)

    def strategy(self, ranking: Ranking, budget: Budget) -> Strategy:
        """What chooses among the kernels."""
        name = WHOLE if budget.trials >= len(ranking.order) else self.settings.strategy
        seeds = ranking.stock.seeds(self.gpu.name)
        known = Ranked(ranking.order, ranking.predicted_us, self.space.fields, seeds, self.settings.seed)
        return strategy(name, known)

    def tune(
        self, ranking: Ranking, workers: Sequence[Worker], ledger: Ledger, seconds: float = math.inf
    ) -> tuple[dict[str, Any] | None, Effort]:
        """Search, hold the final, and save the winner. The final's record is None where every kernel failed."""
        budget = self.budget(ranking, seconds)
        with progress(f"{self.space.version.name}: kernels measured") as update:
            runner = StudyRunner(
                ranking.stock,
                ranking.predicted_us,
                self.gpu,
                ledger,
                self.strategy(ranking, budget),
                workers,
                budget,
                rounds=self.settings.rounds,
                progress=update,
                warn=warn,
            )
            effort = runner.run()
            final = runner.conclude()
        if final:
            self.save(ranking.stock, final)
        return final, effort

    def save(self, stock: Stock, final: dict[str, Any]) -> None:
        """Write the winner to its file, with its evidence."""
        winner = next(kernel for kernel in stock.kernels if kernel.code == final["winner"])
        standing = next(each for each in final["standings"] if each["code"] == final["winner"])
        evidence = {
            "ratio": _interval(standing, "ratio", "low", "high"),
            "to_default": _interval(standing, "to_default", "to_default_low", "to_default_high"),
            "measured": f"{final['trials']} kernels, which are {stock.num_configs} of "
            f"{len(self.space.configs)} valid configurations",
            "problems": [problem.name for problem in self.space.problems],
            "times_us": [round(time, 1) for time in standing["times_us"]],
            "baseline_us": [round(time, 1) for time in final["baseline_us"]],
            "baseline": opponents(self.space.problems),
            "timing": self.settings.mode,
            **{name: final.get(name) for name in ("device", "driver", "torch", "toolkit", "commit", "time")},
            "study": self.study,
        }
        name, values = self.space.version.name, self.space.declared(winner.config)
        winners.save(self.gpu.name, name, self.space.kind, values, evidence, self.home)


def usual_trials(kernels: int) -> int:
    """How many of a space's kernels are measured where nobody says."""
    return kernels if kernels <= FEW else max(FEW, int(PART * kernels))


def workers(number: str, gpu: GpuDescription, mode: Mode, patience: float) -> list[Worker]:
    """One worker a GPU, for as many as asked for ('auto': all that are visible). DeviceError where there are fewer."""
    import torch

    try:
        require_gpu()
    except DeviceError as error:
        raise DeviceError(
            f"{error}. To tune for {gpu.title} a machine with one is needed; without it, and without --workers, "
            "configurations are ranked by the cost model"
        ) from None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if (number != AUTO and not number.isdigit()) or number == "0":
        raise ConfigError(f"--workers {number} is neither auto nor a number of GPUs, 1 to {len(devices)}")
    wanted = len(devices) if number == AUTO else int(number)
    if wanted > len(devices):
        raise DeviceError(f"--workers {number}: each needs a GPU of its own, and {len(devices)} are visible")
    bench = OnGpu(gpu.name, mode)
    return [Worker(bench, {"CUDA_VISIBLE_DEVICES": device.strip()}, patience) for device in devices[:wanted]]


def _source_digest(space: Space) -> str:
    """A hash of the kernel's sources that does not depend on where the checkout is."""
    files = Sources().closure(space.version.kernel)
    return _digest(*(f"{path.name}\n{path.read_text()}" for path in sorted(files, key=lambda path: path.name)))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _interval(values: dict[str, Any], *names: str) -> str | None:
    if names[0] not in values:
        return None
    value, low, high = (values[name] for name in names)
    return f"{value:.4f} [{low:.4f}, {high:.4f}]"
