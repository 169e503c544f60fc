"""Every kernel, the default and earlier winners first, then by predicted times."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from flashladder.tuner.strategies import first_free

if TYPE_CHECKING:
    from flashladder.tuner.candidates import Candidate
    from flashladder.tuner.strategies import Ranked


class InOrder:
    """Whatever it is told, the order stays."""

    def __init__(self, ranked: Ranked) -> None:
        self._kernels = tuple(dict.fromkeys([*ranked.seeds, *ranked.kernels]))

    def propose(self, taken: Collection[str]) -> Candidate | None:
        return first_free(self._kernels, taken)

    def tell(self, kernel: Candidate, ratio: float | None) -> None:
        pass
