"""A small GPT, trained with one attention and with another: from the same beginning, on the same text."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median

import torch

from flashladder.common.api import attention
from flashladder.common.errors import ConfigError
from flashladder.common.problem.families import recording
from flashladder.common.studies.models.gpt import Attend, Gpt, Sizes, causal_sdpa

OURS, TORCHS = "attention", "sdpa"
LEARNING_RATE, WARM_UP = 1e-3, 20  # the second in steps
LAST = 50  # steps whose mean loss is compared
MOST_BYTES = 4 << 20  # of text
MOST_HEADS, MOST_TOKENS = 2, 256  # of a layer, that are recorded: 1.2 MB of 6 layers
DTYPE = torch.bfloat16  # of what autocast gives attention


@dataclass(frozen=True)
class Run:
    """What training came to."""

    losses: list[float]
    step_ms: float  # the median, without the first steps

    @property
    def loss(self) -> float:
        """Of the last steps, on average."""
        return fmean(self.losses[-LAST:])


def functions() -> dict[str, Attend]:
    """The attentions that are compared, by name."""
    return {TORCHS: causal_sdpa, OURS: partial(attention, causal=True)}  # type: ignore[dict-item]


@cache
def text() -> torch.Tensor:
    """Real text that is wherever Python is: the sources of its library, with all that they say in words."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found.append(path.read_bytes())
        size += len(found[-1])
        if size >= MOST_BYTES:
            break
    if not found:
        raise ConfigError(f"{sysconfig.get_path('stdlib')} has no Python sources to train on")
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).long()


def new(sizes: Sizes, attend: Attend, seed: int, device: str) -> Gpt:
    """A model that has learnt nothing yet."""
    torch.manual_seed(seed)
    return Gpt(sizes, attend).to(device)


def train(model: Gpt, seed: int, steps: int, on_step: Callable[[int], None] = lambda _: None) -> Run:
    """Trains a model for so many steps; after each, `on_step` is told how many are done."""
    device, source = _device(model), text()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    order = torch.Generator().manual_seed(seed)
    losses, times = [], []
    for _ in range(steps):
        given = batch(source, model.sizes, order, device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        with autocast(device):
            loss = model(given)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())  # waits for the GPU
        times.append(1000 * (time.perf_counter() - begin))
        on_step(len(times))
    return Run(losses, median(times[steps // 10 :]))


def gradient_errors(sizes: Sizes, device: str) -> dict[str, float]:
    """How far the first step's gradients are from those in fp32, relative to the largest, with each attention."""
    given = batch(text(), sizes, torch.Generator().manual_seed(0), device)

    def gradients(attend: Attend, exact: bool) -> list[torch.Tensor]:
        model = new(sizes, attend, 0, device)
        with autocast(device, enabled=not exact):
            model(given).backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    wanted = gradients(causal_sdpa, exact=True)
    return {
        name: max(
            float((given - exact).abs().max() / exact.abs().max())
            for given, exact in zip(gradients(attend, exact=False), wanted, strict=True)
        )
        for name, attend in functions().items()
    }


def verdict(runs: Mapping[int, Mapping[str, Run]]) -> tuple[float, float]:
    """Of runs by seed and attention: the largest difference of the two losses of one seed, and torch's own spread."""
    torchs = [of_seed[TORCHS].loss for of_seed in runs.values()]
    difference = max(abs(of_seed[OURS].loss - of_seed[TORCHS].loss) for of_seed in runs.values())
    return difference, max(torchs) - min(torchs)


@torch.no_grad()
def record(model: Gpt, attend: Attend, path: Path) -> None:
    """Writes Q, K and V as each layer's attention gets them for the first tokens of a sequence of the text, of a few
    heads, to a new file, which common/problem/families/recording.py describes. ResultsError where it is there already.
    """
    layers: list[tuple[torch.Tensor, ...]] = []

    def noting(*qkv: torch.Tensor) -> torch.Tensor:
        layers.append(tuple(tensor[0, :MOST_TOKENS, :MOST_HEADS].transpose(0, 1) for tensor in qkv))
        return attend(*qkv)

    device, sizes = _device(model), replace(model.sizes, batch=1)
    twin = new(sizes, noting, 0, device)
    twin.load_state_dict(model.state_dict())
    with autocast(device):
        twin(batch(text(), sizes, torch.Generator().manual_seed(0), device))
    recording.write(path, *map(torch.stack, zip(*layers, strict=True)))


def autocast(device: str, enabled: bool = True) -> AbstractContextManager[object]:
    """As models are trained here."""
    return torch.autocast(device, DTYPE, enabled=enabled)


def batch(source: torch.Tensor, sizes: Sizes, order: torch.Generator, device: str) -> torch.Tensor:
    """(batch, seqlen + 1) bytes from places drawn at random."""
    begins = torch.randint(len(source) - sizes.seqlen - 1, (sizes.batch,), generator=order)
    return torch.stack([source[begin : begin + sizes.seqlen + 1] for begin in begins.tolist()]).to(device)


def _device(model: Gpt) -> str:
    return next(model.parameters()).device.type
