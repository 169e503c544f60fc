"""How figures are spelled, wherever they are read."""

from __future__ import annotations

from collections.abc import Iterable

from flashladder.common.escape import Markdown, markdown


def rate(value: float, unit: str = "TFLOP/s") -> str:
    """A speed in its unit; of what is slower than one, as CPUs are, two digits. Memory's speed has two decimals."""
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.2f}" if unit == "TB/s" else f"{value:.1f}"


def mean_rate(value: float, unit: str = "TFLOP/s") -> str:
    """A mean of speeds, in whole TFLOP/s; memory's with two decimals. Of times, in us, three digits."""
    decimals = {"TB/s": 2, "us": max(0, 3 - len(str(int(value))))}
    return f"{value:.{decimals.get(unit, 0)}f}"


def ratio(value: float) -> str:
    """A ratio of times."""
    return f"{value:.3f}"


def interval(low: float, high: float) -> str:
    """A 95 % interval of a ratio."""
    return f"{low:.3f} to {high:.3f}"


def with_interval(value: float, low: float, high: float) -> str:
    """A ratio and its interval."""
    return f"{ratio(value)} ({interval(low, high)})"


def half(value: float, low: float, high: float) -> float:
    """Half of an interval, the wider one."""
    return max(high - value, value - low)


def change(values: Iterable[float]) -> str:
    """Before and after; what does not change stands once."""
    return " → ".join(f"{value:,.0f}" for value in dict.fromkeys(values))


def bold(text: str) -> Markdown:
    """In Markdown."""
    return Markdown(f"**{markdown(text)}**")
