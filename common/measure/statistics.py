"""What paired times say: ratios with intervals, and the verdict on them. Pure functions of arrays.

A round times every contender under the same conditions, so the ratio within a round is what is estimated; its median
over rounds ignores the odd disturbed round, and a bootstrap over rounds gives the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Verdict = Literal["faster", "slower", "tied", "unclear"]

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST_FLOOR = 0.001  # no clock is trusted below 0.1 %, however quiet the control was
TIE_BAND = 0.005  # differences that nobody would act on ...
WIDEST_TIE_BAND = 0.01  # ... which a noisy control widens, but never so far that it hides a per cent


@dataclass(frozen=True)
class Estimate:
    """A ratio (baseline's time / ours: above 1 is faster) or a time, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(baseline: Times, ours: Times, seed: int = 0) -> Estimate:
    """The median over rounds of baseline / ours, arrays of one time a round."""
    ratios = baseline / ours
    return _estimate(float(np.median(ratios)), _bootstrap_medians(ratios, seed))


def median_time(times: Times, seed: int = 0) -> Estimate:
    """The median over rounds of one contender's times, with its interval."""
    return _estimate(float(np.median(times)), _bootstrap_medians(times, seed))


def geometric_mean(pairs: Sequence[tuple[Times, Times]], seed: int = 0) -> Estimate:
    """The geometric mean over shapes of the median paired ratios; each shape's rounds are resampled on their own."""
    medians = [np.log(_bootstrap_medians(baseline / ours, seed + i)) for i, (baseline, ours) in enumerate(pairs)]
    value = np.mean([np.log(np.median(baseline / ours)) for baseline, ours in pairs])
    return _estimate(float(np.exp(value)), np.exp(np.mean(medians, axis=0)))


def noise_floor(control: Estimate) -> float:
    """How far from 1 a ratio may be for no reason: the reach of the baseline's interval against itself."""
    return max(abs(control.low - 1), abs(control.high - 1), LEAST_FLOOR)


def verdict(ratio: Estimate, control: Estimate) -> Verdict:
    """Faster or slower where the whole interval clears the control's noise; tied where it stays near 1."""
    floor = noise_floor(control)
    band = min(max(floor, TIE_BAND), WIDEST_TIE_BAND)
    if ratio.low > 1 + floor:
        return "faster"
    if ratio.high < 1 - floor:
        return "slower"
    if ratio.low > 1 - band and ratio.high < 1 + band:
        return "tied"
    return "unclear"


def harmonic_mean(rates: Sequence[float]) -> float:
    """The mean of rates of equal work: of TFLOP/s over shapes of equal FLOPs."""
    return float(len(rates) / np.sum(1 / np.asarray(rates)))


def _bootstrap_medians(values: Times, seed: int) -> Times:
    """The medians of resampled rounds."""
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    medians: Times = np.median(values[picks], axis=1)
    return medians


def _estimate(value: float, resampled: Times) -> Estimate:
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))
