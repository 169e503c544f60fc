"""What a step of a small GPT costs with our attention beside torch's own, in a way of training of ways.py.

Both models begin with the same weights and see the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashladder.common.errors import VerificationError, first_line
from flashladder.common.runtime import fast_path
from flashladder.common.studies.models import training
from flashladder.common.studies.models.gpt import Attend, Gpt
from flashladder.common.studies.models.training import DTYPE, OURS, TORCHS
from flashladder.common.studies.models.ways import Way

WARM_UPS = {"cuda": 6, "cpu": 2}  # steps: a kind of call goes through C++ from its second one on
LOSS_TOLERANCE = 0.01  # of the first loss, relative: bf16 has 8 bits
GRADIENT_TOLERANCE = 0.05  # of the first gradients of what makes a layer's Q, K or V, relative to their norm
BOTH = "both"
PASSES, PASS_RUNS, PASS_WARM_UPS = 100, 20, 200  # of one call's passes: a run, runs, and before them


@dataclass(frozen=True)
class Costs:
    """Of a step by attention: milliseconds by run, and MiB at the peak beside what stays; or what failed, of BOTH
    where it was not an attention."""

    ms: dict[str, list[float]]
    mib: dict[str, float]
    failures: dict[str, str]

    @property
    def ratio(self) -> float:
        """Ours to torch's: the median over pairs of runs."""
        return median(ours / torchs for ours, torchs in zip(self.ms[OURS], self.ms[TORCHS], strict=True))


def measure(way: Way, device: str, steps: int, runs: int, on_run: Callable[[int], None] = lambda _: None) -> Costs:
    """Runs of so many steps, ours and torch's in turn; after each, `on_run` is told how many are done.

    The first loss and gradients are compared before. What fails is in the result, and ends the way.
    """
    _make_ready(device)
    trainers: dict[str, _Trainer] = {}
    costs = Costs({OURS: [], TORCHS: []}, {}, {})
    try:
        with _noted(costs.failures, BOTH), way.within(device):
            for name, attend, within in ((OURS, way.ours, way.within_ours), (TORCHS, way.torchs, nullcontext)):
                with _noted(costs.failures, name):
                    trainers[name] = _Trainer(way, attend, within, device)
                    costs.mib.update({name: peak} if (peak := trainers[name].peak_mib()) else {})
            if way.comparable and not costs.failures:
                with _noted(costs.failures, OURS):
                    _require_near(trainers[OURS].first, trainers[TORCHS].first)
            _take_turns(costs, {name: partial(each.ms, steps) for name, each in trainers.items()}, runs, on_run)
    finally:
        torch.compiler.reset()
    return costs


def measure_pass(head_dim: int) -> Costs:
    """Forward and backward pass of one call through autograd, 1 x 512 rows of 16 heads, beside FlashAttention-2."""
    _make_ready("cuda")
    order = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = torch.randn(4, 1, 512, 16, head_dim, device="cuda", dtype=DTYPE, generator=order)
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def backward(attend: Attend) -> None:
        attend(*inputs).backward(do)

    calls = {name: partial(backward, attend) for name, attend in training.functions().items()}
    costs = Costs({OURS: [], TORCHS: []}, {}, {})
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for name, call in calls.items():
            with _noted(costs.failures, name):
                _ms(call, PASS_WARM_UPS)
        _take_turns(costs, {name: partial(_ms, call, PASSES) for name, call in calls.items()}, PASS_RUNS)
    return costs


def _make_ready(device: str) -> None:
    """The C++ way of a call is there, which else comes amid the runs."""
    if device == "cuda":
        fast_path.load()


def _take_turns(
    costs: Costs, timed: Mapping[str, Callable[[], float]], runs: int, on_run: Callable[[int], None] = lambda _: None
) -> None:
    """Adds the milliseconds of each run, until one fails."""
    for done, name in enumerate(_turns(runs), 1):
        if not costs.failures:
            with _noted(costs.failures, name):
                costs.ms[name].append(timed[name]())
        on_run(done)


def _turns(runs: int) -> list[str]:
    """So many pairs of runs, of which neither is always the first."""
    return [(OURS, TORCHS, TORCHS, OURS)[turn % 4] for turn in range(2 * runs)]


def _ms(call: Callable[[], object], times: int) -> float:
    """Of a call, by the host's clock."""
    _wait()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    _wait()
    return 1e3 * (time.perf_counter() - begin) / times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _First(NamedTuple):
    """Of the first step."""

    loss: float
    gradients: dict[str, Tensor]


class _Trainer:
    """A model in training, after some steps to warm up; `first` is the first one's loss and gradients."""

    def __init__(self, way: Way, attend: Attend, within: Callable[[], Any], device: str) -> None:
        self.device, self.within = device, within
        model = training.new(way.sizes, attend, 0, device)
        model.checkpoints = way.checkpoints
        self.prepared = way.prepare(model, device)
        self.call = torch.compile(self.prepared.module) if way.compiled else self.prepared.module
        self.text = training.batch(training.text(), way.sizes, torch.Generator().manual_seed(0), device)
        with within():
            self.first = _First(float(self._gradients()), _gradients_by_name(model))
            self._update()
        self.ms(WARM_UPS[device] - 1)

    def ms(self, steps: int) -> float:
        """Of a step, by the host's clock."""
        with self.within():
            return _ms(self._step, steps)

    def peak_mib(self) -> float | None:
        """Memory that a step takes beside what stays; None without a GPU."""
        if self.device != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.ms(1)
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def _gradients(self) -> Tensor:
        """The loss."""
        with self.prepared.cast(self.device):
            loss = self.call(self.text)
        self.prepared.backward(loss)
        return loss.detach()

    def _update(self) -> None:
        self.prepared.optimizer.step()
        self.prepared.optimizer.zero_grad()

    def _step(self) -> None:
        self._gradients()
        self._update()


def _gradients_by_name(model: Gpt) -> dict[str, Tensor]:
    """Of the weights that make Q, K and V of each layer, in fp32."""
    found: dict[str, Tensor] = {}
    blocks: Any = model.blocks
    for layer, block in enumerate(blocks):
        gradient = block.qkv.weight.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # of all processes
        parts = whole.float().clone().split([heads * block.head_dim for heads in block.heads])
        found |= {f"{name} of layer {layer}": part for name, part in zip("QKV", parts, strict=True)}
    return found


def _require_near(ours: _First, torchs: _First) -> None:
    """VerificationError where the first loss or gradients are not torch's but for rounding."""
    if not abs(ours.loss - torchs.loss) <= LOSS_TOLERANCE * torchs.loss:
        raise VerificationError(f"the first loss is {ours.loss:.4f}, with torch's attention {torchs.loss:.4f}")
    for name, wanted in torchs.gradients.items():
        error = float((ours.gradients[name] - wanted).norm() / wanted.norm())
        if not error <= GRADIENT_TOLERANCE:
            raise VerificationError(f"the first gradient of {name} is {error:.2g} of its norm from torch's")


@contextmanager
def _noted(failures: dict[str, str], name: str) -> Iterator[None]:
    """An error is noted as this one's, and goes no further: other ways are to run."""
    try:
        yield
    except Exception as error:
        failures[name] = shorten(f"{type(error).__name__}: {first_line(error)}", 200)
