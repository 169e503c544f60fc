"""By predicted times, corrected at each of ptxas's levels by what was measured there; the seeds go first.

The cost model ranks kernels of one level better than levels. So the best predicted kernel of every level is measured
before levels are compared. From then on a prediction is multiplied by the median of measured / predicted times of its
level.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median
from typing import TYPE_CHECKING

from flashladder.common.catalog import PTXAS_LEVEL
from flashladder.tuner.strategies import first_free

if TYPE_CHECKING:
    from flashladder.common.problem.config import Value
    from flashladder.tuner.candidates import Candidate
    from flashladder.tuner.strategies import Ranked


class Corrected:
    """What was measured of each level corrects what is predicted for the others of it."""

    def __init__(self, ranked: Ranked) -> None:
        self._seeds, self._predicted_us = ranked.seeds, ranked.predicted_us
        self._levels: dict[Value, list[Candidate]] = {}  # the best predicted first
        for kernel in sorted(ranked.kernels, key=lambda kernel: ranked.predicted_us[kernel.code]):
            self._levels.setdefault(_level(kernel), []).append(kernel)
        self._errors: dict[Value, list[float]] = {level: [] for level in self._levels}  # measured / predicted times

    def propose(self, taken: Collection[str]) -> Candidate | None:
        if seed := first_free(self._seeds, taken):
            return seed
        best = (first_free(kernels, taken) for kernels in self._levels.values())
        return min(filter(None, best), key=self._expected, default=None)

    def tell(self, kernel: Candidate, ratio: float | None) -> None:
        if ratio is not None:
            self._errors[_level(kernel)].append(1 / ratio / self._predicted_us[kernel.code])

    def _expected(self, kernel: Candidate) -> float:
        """A time in units of the baseline's; 0 where nothing of the level was measured yet."""
        errors = self._errors[_level(kernel)]
        return self._predicted_us[kernel.code] * median(errors) if errors else 0.0


def _level(kernel: Candidate) -> Value:
    """The ptxas level of a kernel; of one that several levels give, its first configuration's."""
    return kernel.config.as_dict().get(PTXAS_LEVEL, "")
