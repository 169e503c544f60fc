"""Spot checks: calls among the timed ones that are timed too, on new inputs, and whose output is looked at.

A timed call does the same work as the one before it, so that a kernel could look faster than it is by not doing it.
How that shows here, where a call is held in the GPU's queue behind what prepares it:

- It gives the answer of an earlier call, or writes one only where it is asked to prove itself: the outputs hold a
  poison and the inputs are new, so that neither is right.
- It leaves work on another stream, or to another thread: what the outputs hold is taken away on the timed stream, right
  behind the event that stops the clock.
- It skips work for data that it has seen: every spot check is a pair, a call on new inputs and one on those of all
  timed calls with their answer in the outputs. Both follow calls on the latter and the same copies, and take as long.
- It skips some calls, which it counts: one call or two come before each of the pair, by chance, so that no count says
  which are looked at. One call in n that is skipped is met by one check in n.

New inputs are the old ones with the signs of columns changed, as an operation allows it: of Q and K alike, which leaves
the scores as they are, and of V, which changes the signs of O's columns. The exact answer is known, and rounding is the
same. gpu-mode's kernel competitions met such kernels
(gpu-mode/pygpubench), and karpathy/llm.c's pull request 851 describes two.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from flashladder.common.errors import CheatError
from flashladder.common.problem import latent_rows
from flashladder.common.problem.check import Expected, verify
from flashladder.common.problem.inputs import Tensors

COUNT = 8  # of each contender
COUNT_OF_SLOW = 2  # ... whose calls take longer than this, in microseconds
SLOW_US = 100e3
SHARE = 0.5  # of rounds that have one, until there are enough
MARGIN = 0.1  # by which calls on new inputs may take longer: their lower quartile than the upper one of the others
MARGIN_OF_SLOW = 0.5
SKIPPED = 0.5  # of the quickest call on new inputs: a quicker one on seen inputs was skipped
TRIALS = 4  # that all must say so

Queue = Callable[[], None]  # queues work on the device's current stream


class Once(Protocol):
    """What times a single call."""

    def once(self, launch: Callable[[], object], before: Queue, after: Queue) -> float:
        """Microseconds of a launch, with what is queued right before and right behind it, outside the time."""


class Stage:
    """The tensors of a problem, as they are before a call that was seen and before a new one."""

    def __init__(self, tensors: Tensors, expected: Expected, seed: int = 0) -> None:
        self._tensors, self._expected = tensors, expected
        self._signs = torch.Generator().manual_seed(seed)
        self._seen = {name: tensors.by_name[name].clone() for name in tensors.problem.inputs}
        self._new = {name: tensor.clone() for name, tensor in self._seen.items()}
        self._right = {name: expected.exact[name].to(tensor.dtype) for name, tensor in tensors.outputs.items()}
        tensors.poison()
        self._poison = {name: tensor.clone() for name, tensor in tensors.outputs.items()}
        self._kept = {name: torch.empty_like(tensor) for name, tensor in self._right.items()}
        self._wanted = expected

    def seen(self) -> None:
        """Queue the inputs of all timed calls, and the right answer in the outputs."""
        self._put(self._seen | self._right)

    def draw(self) -> None:
        """Make new inputs, and know their answer."""
        wanted = dict(self._expected.exact)
        for names in self._tensors.problem.asked.signed_together:
            signs = self._draw_signs(self._seen[names[0]])
            for name in names:
                if name in self._seen:
                    _flip(self._seen[name], signs, self._new[name])
                else:
                    wanted[name] = wanted[name] * signs[: wanted[name].shape[-1]]
        self._wanted = replace(self._expected, exact=wanted)

    def new(self) -> None:
        """Queue the inputs that were drawn, and the poison in the outputs."""
        self._put(self._new | self._poison)

    def keep(self) -> None:
        """Queue that what the outputs hold is taken away."""
        for name, tensor in self._kept.items():
            tensor.copy_(self._tensors.by_name[name])

    def fault(self) -> str | None:
        """What is wrong with the outputs that were kept, to be read after the contender's name."""
        check = verify(self._wanted, self._kept, self._tensors.buffers)
        if check.passed:
            return None
        faults = "\n  ".join(check.faults)
        if any("not written" in fault for fault in check.faults):
            return f"had not written its output when the clock of a timed call stopped:\n  {faults}"
        if verify(self._expected, self._kept).passed:
            return f"gave the answer of an earlier call to new inputs:\n  {faults}"
        return f"is wrong in a timed call on new inputs:\n  {faults}"

    def _put(self, values: dict[str, torch.Tensor]) -> None:
        for name, tensor in values.items():
            self._tensors.by_name[name].copy_(tensor)

    def _draw_signs(self, like: torch.Tensor) -> torch.Tensor:
        """One for each column."""
        signs = 1 - 2 * torch.randint(2, (like.shape[-1],), generator=self._signs)
        return signs.to(like.device, torch.int8)


def _flip(tensor: torch.Tensor, signs: torch.Tensor, out: torch.Tensor) -> None:
    """A tensor times the signs of its columns. torch multiplies no 8-bit floats, whose sign is their upper bit."""
    if tensor.dtype == torch.uint8:
        out.copy_(latent_rows.times_signs(tensor, signs))
        return
    signs = signs[: tensor.shape[-1]]
    if tensor.element_size() == 1:
        torch.bitwise_xor(tensor.view(torch.uint8), (signs < 0).to(torch.uint8) << 7, out=out.view(torch.uint8))
    else:
        torch.mul(tensor, signs, out=out)


class SpotChecks:
    """Those of one contender. CheatError, naming it, as soon as one fails."""

    def __init__(self, name: str, launch: Callable[[], object], stage: Stage, seed: int) -> None:
        self._name, self._launch, self._stage = name, launch, stage
        self._random = random.Random(f"{name} {seed}")
        self._seen_us: list[float] = []
        self._new_us: list[float] = []

    def now_and_then(self, timer: Once) -> None:
        """One, or not: a kernel that counts its calls cannot tell."""
        if len(self._new_us) < self._wanted() and self._random.random() < SHARE:
            self.take(timer)

    def finish(self, timer: Once) -> None:
        """Those that are missing, and the verdict on all; who is suspect has all of them again, for a busy machine."""
        for _ in range(TRIALS):
            while len(self._new_us) < self._wanted():
                self.take(timer)
            seen, new = (f"{min(us):.1f} to {max(us):.1f}" for us in (self._seen_us, self._new_us))
            if not self._is_suspect():
                return
            self._seen_us, self._new_us = [], []
        raise CheatError(
            f"{self._name} takes {seen} us for inputs that it has seen, and {new} us for new ones: it does not "
            "compute in every timed call"
        )

    def _is_suspect(self) -> bool:
        margin = MARGIN if self._wanted() == COUNT else MARGIN_OF_SLOW
        all_are_quicker = np.quantile(self._new_us, 0.25) > (1 + margin) * np.quantile(self._seen_us, 0.75)
        return bool(all_are_quicker or min(self._seen_us) < SKIPPED * min(self._new_us))

    def take(self, timer: Once) -> None:
        """A call on new inputs and one on those that were seen, in either order."""
        self._stage.draw()
        for call in self._random.sample((self._on_new, self._on_seen), 2):
            call(timer)
        self._stage.seen()

    def _on_new(self, timer: Once) -> None:
        self._new_us.append(self._time(timer, self._stage.new))
        if fault := self._stage.fault():
            raise CheatError(f"{self._name} {fault}")

    def _on_seen(self, timer: Once) -> None:
        self._seen_us.append(self._time(timer, self._stage.seen))

    def _time(self, timer: Once, prepare: Queue) -> float:
        calls = self._random.randint(1, 2)

        def before() -> None:
            self._stage.seen()
            for _ in range(calls):
                self._launch()
            prepare()

        return timer.once(self._launch, before, self._stage.keep)

    def _wanted(self) -> int:
        return COUNT_OF_SLOW if self._new_us and self._new_us[0] > SLOW_US else COUNT
