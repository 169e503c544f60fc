"""Which kernel to measure next: all of them in turn, or those that the corrected cost model and TPE ask for.

A strategy only proposes. It keeps what it is told in memory; the study's storage is the ledger's business.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState

from flashladder.common.catalog import PTXAS_LEVEL
from flashladder.common.problem.config import KernelConfig, Value
from flashladder.tuner.candidates import Candidate

STARTUP = 8  # kernels that the cost model asks for before TPE has a say
DRAWS = 32  # of TPE for a kernel that is not taken, before the one nearest to its last wish has to do


class Strategy(Protocol):
    """What proposes kernels."""

    def propose(self, taken: Collection[str]) -> Candidate | None:
        """A kernel whose code is not taken; None when all are."""

    def tell(self, kernel: Candidate, ratio: float | None) -> None:
        """What came of a kernel: its ratio to the baseline; None where it is in quarantine."""


class InOrder:
    """Every kernel, in the given order."""

    def __init__(self, kernels: Sequence[Candidate]) -> None:
        self._kernels = kernels

    def propose(self, taken: Collection[str]) -> Candidate | None:
        return next((kernel for kernel in self._kernels if kernel.code not in taken), None)

    def tell(self, kernel: Candidate, ratio: float | None) -> None:
        """Whatever it is, the order stays."""


class Corrected:
    """First the seeds, then by predicted times, corrected at each of ptxas's levels by what was measured there.

    The cost model ranks kernels of one level better than levels. So the best predicted kernel of every level is
    measured before levels are compared. From then on a prediction is multiplied by the median of measured / predicted
    times of its level.
    """

    def __init__(
        self, kernels: Sequence[Candidate], predicted_us: Mapping[str, float], seeds: Sequence[Candidate] = ()
    ) -> None:
        self._seeds = InOrder(seeds)
        self._predicted_us = predicted_us
        self._levels: dict[Value, list[Candidate]] = {}  # the best predicted first
        for kernel in sorted(kernels, key=lambda kernel: predicted_us[kernel.code]):
            self._levels.setdefault(_level(kernel), []).append(kernel)
        self._errors: dict[Value, list[float]] = {level: [] for level in self._levels}  # measured / predicted times

    def propose(self, taken: Collection[str]) -> Candidate | None:
        if seed := self._seeds.propose(taken):
            return seed
        best = (InOrder(kernels).propose(taken) for kernels in self._levels.values())
        return min(filter(None, best), key=self._expected, default=None)

    def tell(self, kernel: Candidate, ratio: float | None) -> None:
        if ratio is not None:
            self._errors[_level(kernel)].append(1 / ratio / self._predicted_us[kernel.code])

    def _expected(self, kernel: Candidate) -> float:
        """A time in units of the baseline's; 0 where nothing of the level was measured yet."""
        errors = self._errors[_level(kernel)]
        return self._predicted_us[kernel.code] * median(errors) if errors else 0.0


class Guided:
    """In turns what the corrected cost model asks for, and what TPE makes of the results so far."""

    def __init__(
        self,
        kernels: Sequence[Candidate],
        predicted_us: Mapping[str, float],
        fields: Mapping[str, Sequence[Value]],
        seed: int,
        seeds: Sequence[Candidate] = (),
    ) -> None:
        self._corrected = Corrected(kernels, predicted_us, seeds)
        self._kernels = kernels
        self._kernel_of = {_values(config): kernel for kernel in kernels for config in kernel.configs}
        self._distributions = distributions(fields)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, constant_liar=False)
        self._study = quietly(lambda: optuna.create_study(direction="maximize", sampler=sampler))

    def propose(self, taken: Collection[str]) -> Candidate | None:
        if len(taken) < STARTUP or len(taken) % 2:
            return self._corrected.propose(taken)
        wish: dict[str, Value] = {}
        for _ in range(DRAWS):
            trial = self._study.ask(self._distributions)
            self._study.tell(trial, state=TrialState.FAIL)
            wish = trial.params
            kernel = self._kernel_of.get(tuple(wish[name] for name in self._distributions))
            if kernel and kernel.code not in taken:
                return kernel
        free = [kernel for kernel in self._kernels if kernel.code not in taken]
        return min(free, key=lambda kernel: _distance(kernel, wish), default=None)

    def tell(self, kernel: Candidate, ratio: float | None) -> None:
        self._corrected.tell(kernel, ratio)
        state = TrialState.PRUNED if ratio is None else TrialState.COMPLETE
        self._study.add_trial(
            optuna.create_trial(
                state=state, value=ratio, params=kernel.config.as_dict(), distributions=self._distributions
            )
        )


def distributions(fields: Mapping[str, Sequence[Value]]) -> dict[str, BaseDistribution]:
    """The fields as Optuna sees them."""
    return {name: CategoricalDistribution(tuple(values)) for name, values in fields.items()}


def quietly(make: Callable[[], optuna.Study]) -> optuna.Study:
    """Calls Optuna without its chatter."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return make()


def _level(kernel: Candidate) -> Value:
    """The ptxas level of a kernel; of one that several levels give, its first configuration's."""
    return kernel.config.as_dict().get(PTXAS_LEVEL, "")


def _values(config: KernelConfig) -> tuple[Value, ...]:
    return tuple(value for _, value in config.items)


def _distance(kernel: Candidate, wish: Mapping[str, Value]) -> int:
    """The fields in which the kernel's nearest configuration differs from a wish."""
    return min(sum(config.as_dict()[name] != value for name, value in wish.items()) for config in kernel.configs)
