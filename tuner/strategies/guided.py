"""In turns what the corrected cost model asks for, and what Optuna's TPE makes of the results so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState

from flashladder.tuner.storage import distributions, quietly
from flashladder.tuner.strategies.corrected import Corrected

if TYPE_CHECKING:
    from flashladder.common.problem.config import KernelConfig, Value
    from flashladder.tuner.candidates import Candidate
    from flashladder.tuner.strategies import Ranked

STARTUP = 8  # kernels that the cost model asks for before TPE has a say
DRAWS = 32  # of TPE for a kernel that is not taken, before the one nearest to its last wish has to do


class Guided:
    """The corrected cost model alone at first, until TPE has something to learn from."""

    def __init__(self, ranked: Ranked) -> None:
        self._corrected = Corrected(ranked)
        self._kernels = ranked.kernels
        self._kernel_of = {_values(config): kernel for kernel in ranked.kernels for config in kernel.configs}
        self._distributions = distributions(ranked.fields)
        sampler = optuna.samplers.TPESampler(seed=ranked.seed, n_startup_trials=STARTUP, constant_liar=False)
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


def _values(config: KernelConfig) -> tuple[Value, ...]:
    return tuple(value for _, value in config.items)


def _distance(kernel: Candidate, wish: Mapping[str, Value]) -> int:
    """The fields in which the kernel's nearest configuration differs from a wish."""
    return min(sum(config.as_dict()[name] != value for name, value in wish.items()) for config in kernel.configs)
