"""How far outputs are from attention in fp64 over the same 16-bit inputs, and the bars that they are held against.

The error of an element of O is divided by sum_j p_j |v_j|, what the element weighs together: that is what roundings of
P are relative to, and where V is positive it is O itself. Below the smallest normal number of the dtype it is divided
by that number, since outputs are no finer there. One unit in the last place of O is then 2^-8 to 2^-7 in bf16, and
2^-11 to 2^-10 in fp16. The mean counts an error as positive where it makes O larger: weights that are lost show as a
negative mean, whatever the signs in V.

The errors of a gradient are divided by the RMS of the gradient's elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import DTYPES, LSE, Problem

OF_O, GRADIENTS = ("o", LSE), ("dq", "dk", "dv")  # the outputs that can be judged
RMS_FACTOR = 1.15  # of the yardstick's RMS error
RMS_FLOOR = 1 / 16  # of half a unit in the last place: where the yardstick is exact by the family's making
GRADIENT_FACTOR = 1.05  # of the yardstick's RMS error, of a gradient
STANDARD_ERRORS = 3  # by which a mean may be above the yardstick's
CUT_OFF = 2.0**-23  # of a sum, by each mma: tensor cores drop what is below its last bit (Fasi et al., 2021)
KEYS_PER_MMA = 16
LSE_FLOOR = 1e-5
LSE_ULPS = 2.0**-22  # of the largest LSE: a score's scale, product, maximum and logarithm are rounded to fp32
LEAST_TIME_RATIO = 0.9  # time on normal inputs / on the family's


@dataclass(frozen=True)
class Exact:
    """An output in fp64, and by what the error of each element is divided; LSE, with O. How many heads have columns of
    their own: those of K and V, and of a gradient its own."""

    values: torch.Tensor
    weight: torch.Tensor
    heads: int
    lse: torch.Tensor | None = None

    def sequences(self) -> list[Exact]:
        """Those of the batch, one by one."""
        parts = enumerate(zip(self.values.split(1), self.weight.split(1), strict=True))
        lse = self.lse
        return [
            Exact(values, weight, self.heads, None if lse is None else lse[i : i + 1]) for i, (values, weight) in parts
        ]


@dataclass(frozen=True)
class Deviation:
    """The errors of one output. All relative, but for `max_ulps` and `lse_error` (absolute)."""

    mean_error: float
    mean_stderr: float
    rms_error: float
    max_error: float
    max_ulps: float
    lse_error: float | None  # None: there is none


@dataclass(frozen=True)
class Bars:
    """What an output's errors may be at most; `max_ulps` only where the family's rows are one-hot, of a gradient
    `rms_error` alone.

    A mean may be above its bar by the standard errors that chance takes.
    """

    rms_error: float
    mean_error: float | None = None
    lse_error: float | None = None
    max_ulps: float | None = None

    def missed(self, ours: Deviation) -> tuple[str, ...]:
        """The bars that the output misses, in words."""
        tests = {
            "rms": ours.rms_error <= self.rms_error,
            "mean": _is_within(abs(ours.mean_error) - STANDARD_ERRORS * ours.mean_stderr, self.mean_error),
            "lse": ours.lse_error is None or _is_within(ours.lse_error, self.lse_error),
            "ulps": _is_within(ours.max_ulps, self.max_ulps),
        }
        return tuple(name for name, is_met in tests.items() if not is_met)


def exact(problem: Problem, tensors: Tensors) -> Exact:
    """O in fp64, over the inputs as they were rounded."""
    compute, v = problem.asked.compute, problem.inputs[2]
    found = compute(problem, tensors.by_name, torch.float64)
    weight = compute(problem, {**tensors.by_name, v: tensors.by_name[v].abs()}, torch.float64)["o"]
    return Exact(found["o"], weight, problem.num_heads_k, found[LSE])


def exact_gradients(problem: Problem, tensors: Tensors) -> dict[str, Exact]:
    """dQ, dK and dV in fp64, over the inputs as they were rounded."""
    found = problem.asked.compute(problem, tensors.by_name, torch.float64)
    return {
        name: Exact(x, x.square().mean((1, 2, 3), keepdim=True).sqrt().expand_as(x), x.shape[2])
        for name, x in found.items()
    }


def compare(truth: Exact, output: torch.Tensor, lse: torch.Tensor | None = None) -> Deviation:
    """The errors of an output; infinite where it is not finite."""
    lse_error = None
    if lse is not None and truth.lse is not None:
        lse_error = _largest((lse.double() - truth.lse).masked_fill(lse == truth.lse, 0))
    error = output.double() - truth.values
    if not error.isfinite().all():
        return Deviation(math.inf, 0.0, math.inf, math.inf, math.inf, lse_error)
    relative = error / truth.weight.clamp(min=torch.finfo(output.dtype).tiny)
    signed = _by_heads(relative * truth.values.sign(), truth.heads)
    return Deviation(
        mean_error=float(signed.mean()),
        mean_stderr=_stderr(signed),
        rms_error=float(relative.square().mean().sqrt()),
        max_error=_largest(relative),
        max_ulps=_largest(error / _ulp(truth.values, output.dtype)),
        lse_error=lse_error,
    )


def bars(truth: Exact, yardstick: Deviation, dtype: str, keys: int, one_hot: bool) -> Bars:
    """What is asked of O, from what the yardstick does on the same inputs.

    Half a unit in the last place is granted to the mean where all outputs are one number, which is rounded one way; n
    different ones are rounded n ways, whose mean is smaller by the root of n. O may also lose what tensor cores cut off
    its sums. The yardstick may lose less: sums of equal weights are exact, and of few rows it splits the keys.
    """
    cut_off = keys / KEYS_PER_MMA * CUT_OFF
    half_ulp = torch.finfo(DTYPES[dtype]).eps / 2
    different = truth.values.float().unique().numel()
    assert truth.lse is not None
    largest_lse = float(truth.lse[truth.lse.isfinite()].abs().max()) if truth.lse.isfinite().any() else 0.0
    return Bars(
        rms_error=RMS_FACTOR * yardstick.rms_error + RMS_FLOOR * half_ulp + cut_off,
        mean_error=abs(yardstick.mean_error) + half_ulp / math.sqrt(different) + cut_off,
        lse_error=(yardstick.lse_error or 0.0) + LSE_FLOOR + LSE_ULPS * largest_lse,
        max_ulps=max(1.0, yardstick.max_ulps) if one_hot else None,
    )


def bars_of_gradient(yardstick: Deviation, dtype: str) -> Bars:
    """What is asked of a gradient, from what the yardstick does on the same inputs."""
    least = RMS_FLOOR * torch.finfo(DTYPES[dtype]).eps / 2
    return Bars(rms_error=max(GRADIENT_FACTOR * yardstick.rms_error, least))


def _is_within(error: float, bar: float | None) -> bool:
    return bar is None or error <= bar


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().nan_to_num(nan=math.inf).max())


def _ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a unit in the last place of each number is worth in a dtype."""
    limits = torch.finfo(dtype)
    _, exponent = x.abs().clamp(min=limits.tiny).frexp()
    return torch.ldexp(torch.full_like(x, limits.eps), exponent - 1)


def _by_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, seqlen, heads, columns) as (rows, `heads`, columns): all that sees one head of K is in its rows."""
    return x.unflatten(2, (heads, -1)).transpose(2, 3).flatten(0, 2)


def _stderr(x: torch.Tensor) -> float:
    """Of the mean over (rows, heads, columns), where errors of a row are alike and so are those of a column.

    Clustered by both (Cameron, Gelbach and Miller, 2011): the two variances, less what both count.
    """
    by_row, by_column, alone = x.mean(2), x.mean(0), x
    variances = [float(part.var()) / part.numel() for part in (by_row, by_column, alone)]
    return math.sqrt(max(*variances, variances[0] + variances[1] - variances[2]))
