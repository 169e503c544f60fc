"""The exact answer to a problem, and the verdict on an output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flashladder.common.errors import UnsupportedProblemError, VerificationError
from flashladder.common.problem.buffers import Buffer, unwritten
from flashladder.common.problem.config import listing
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import DTYPES, LSE, Problem

_FP64_LIMIT = 2**36  # FLOPs: larger exact answers are computed in fp32 where there is a GPU


@dataclass(frozen=True)
class Expected:
    """The exact outputs that are asked for, and how far a kernel may be from each."""

    exact: dict[str, torch.Tensor]
    tolerances: dict[str, float]


def expect(problem: Problem, tensors: Tensors) -> Expected:
    """The exact answer, in fp64 (fp32 for large problems on a GPU), and the operation's tolerances.

    UnsupportedProblemError where nothing comes out that could be compared.
    """
    if not problem.outputs:
        raise UnsupportedProblemError(
            f"the operation {problem.operation} has no output: it writes to {listing(problem.updated)}, of which "
            "tests/rungs look at each byte"
        )
    large = tensors.device.type == "cuda" and problem.flops > _FP64_LIMIT
    computed = problem.asked.compute(problem, tensors.by_name, torch.float32 if large else torch.float64)
    exact = {name: computed[name] for name in problem.outputs}
    rounded = problem.asked.compute(problem, tensors.by_name, DTYPES[problem.dtype])
    return Expected(exact, {name: problem.asked.tolerance(problem, name, exact[name], rounded[name]) for name in exact})


@dataclass(frozen=True)
class Check:
    """The verdict on one run: the largest errors, and in words everything that is wrong.

    The error is that of the output which comes nearest to its tolerance; lse has one of its own, or 0.
    """

    max_error: float
    tolerance: float
    lse_error: float
    lse_tolerance: float
    faults: tuple[str, ...]
    output: str = "o"  # the one whose error that is

    @property
    def passed(self) -> bool:
        """No fault was found."""
        return not self.faults

    def require(self, what: str) -> None:
        """Raise VerificationError, naming `what` ran, unless the check passed."""
        if self.faults:
            raise VerificationError(f"{what} is wrong:\n  " + "\n  ".join(self.faults))


def verify(expected: Expected, outputs: Mapping[str, torch.Tensor], buffers: tuple[Buffer, ...] = ()) -> Check:
    """Compare outputs with the reference, look for what was not written, and at the canaries of `buffers`.

    Outputs that were left out are not compared.
    """
    faults = [damage for buffer in buffers if (damage := buffer.damage())]
    errors = {
        name: _compare(name, output, expected.exact[name], expected.tolerances[name], faults)
        for name, output in outputs.items()
    }
    main = max((name for name in errors if name != LSE), key=lambda name: errors[name] / expected.tolerances[name])
    lse_tolerance = expected.tolerances.get(LSE, 0.0)
    return Check(errors[main], expected.tolerances[main], errors.get(LSE, 0.0), lse_tolerance, tuple(faults), main)


def _compare(name: str, given: torch.Tensor, exact: torch.Tensor, tolerance: float, faults: list[str]) -> float:
    """The largest error; what is wrong is added to `faults`."""
    if missing := unwritten(given):
        faults.append(f"{missing} of {given.numel()} elements of {name} were not written")
    error = (given.to(exact.dtype) - exact).abs()
    # What the output's type has no number for is infinite.
    rounded = torch.where(given.isinf(), exact.to(given.dtype), exact)
    error.masked_fill_(given == rounded, 0)
    error.nan_to_num_(nan=math.inf, posinf=math.inf)
    index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    largest = float(error[index])
    if largest > tolerance:
        faults.append(
            f"{name}{list(index)} is {float(given[index]):.6g} instead of {float(exact[index]):.6g}: "
            f"error {largest:.3g}, tolerance {tolerance:.3g}"
        )
    return largest
