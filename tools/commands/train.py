"""Train a small GPT with attention() and with torch's own, from the same beginning and on the same text.

flashladder train                          11.2 M parameters, 16 x 1,024 bytes a step, 300 steps, three seeds
flashladder train --steps 100 --seeds 1
flashladder train --device emulator        without a GPU: 2 layers, 64 bytes, two steps
flashladder train --picture losses.png     with the losses as a picture
flashladder train --record FILE.npz        with Q, K and V of each layer, as attention() got them, in a new file

The text is what Python's library says of itself: its sources. Models are in fp32 under autocast to bf16, trained by
AdamW. The exit code is 2 where the first step's gradients are further from those in fp32 than twice as far as with
torch's attention, or where the mean loss of the last 50 steps differs from torch's of the same seed by more than
torch's own does from seed to seed (with several seeds). Nothing is logged.

What is recorded is of the model that was trained with attention() and the first seed: bf16 numbers of the first two
heads of each layer, for the first 256 bytes of one sequence. In the place of common/problem/families/trained.npz such a
file is the family of inputs `trained`.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from flashladder.common.console import Parser, console, fail, progress
from flashladder.common.errors import ConfigError
from flashladder.common.report.tables import numbers, table
from flashladder.tools.commands.arguments import count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashladder.common.studies.models.gpt import Attend, Sizes
    from flashladder.common.studies.models.training import Run

SIZES = {  # on a GPU, and on the emulator
    "layers": (6, 2),
    "heads": (6, 2),
    "head_dim": (64, 64),
    "batch": (16, 1),
    "seqlen": (1024, 64),
    "steps": (300, 2),
    "seeds": (3, 1),
}


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("--device", choices=("auto", "gpu", "emulator"), default="auto", help="default: a GPU if any")
    for name, (on_gpu, emulated) in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        made.add_argument(option, type=count, metavar="N", help=f"default: {on_gpu}; {emulated} on the emulator")
    made.add_argument("--picture", type=Path, metavar="FILE", help="where the losses are drawn")
    made.add_argument("--record", type=Path, metavar="FILE", help="a new .npz for Q, K and V of the trained layers")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.runtime import target
    from flashladder.common.studies.models import training
    from flashladder.common.studies.models.gpt import Gpt, Sizes, parameters

    record: Path | None = arguments.record
    if record:
        _check_new(record)
    on_gpu = target.resolve(arguments.device, None).on_gpu
    device = "cuda" if on_gpu else "cpu"
    given = {
        name: defaults[not on_gpu] if (value := getattr(arguments, name)) is None else value
        for name, defaults in SIZES.items()
    }
    steps, seeds = given.pop("steps"), given.pop("seeds")
    sizes, functions = Sizes(**given), training.functions()
    millions = parameters(Gpt(sizes, functions[training.OURS])) / 1e6
    told = f"{millions:.1f} M parameters, {steps} steps of {sizes.batch} x {sizes.seqlen} bytes"
    console.print(f"{told}, {seeds} times with each attention", style="bold")
    errors = training.gradient_errors(sizes, device)
    runs = _trained(sizes, functions, seeds, steps, device, record)
    difference, spread = training.verdict(runs)
    _show(errors, runs)
    console.print(f"losses of one seed differ by {difference:.4f} at most, torch's of all seeds by {spread:.4f}")
    if arguments.picture:
        _draw(runs, arguments.picture)
    if errors[training.OURS] > 2 * errors[training.TORCHS]:
        return fail("the first step's gradients are wrong by more than twice as much as with torch's attention")
    if seeds > 1 and difference > spread:
        return fail("losses differ by more than torch's own do from seed to seed")
    return 0


def _check_new(path: Path) -> None:
    """ConfigError where a file cannot be written, or is there already: training takes long."""
    if path.exists():
        raise ConfigError(f"{path} is there already: name a new file with --record")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"--record {path}: nothing can be written to {path.parent} ({error.strerror})") from None


def _trained(
    sizes: Sizes, functions: Mapping[str, Attend], seeds: int, steps: int, device: str, record: Path | None
) -> dict[int, dict[str, Run]]:
    """The runs, by seed and attention. The first model that was trained with ours is recorded."""
    from flashladder.common.studies.models import training

    runs: dict[int, dict[str, Run]] = {seed: {} for seed in range(seeds)}
    total = seeds * len(functions) * steps
    with progress("steps") as update:
        for number, (seed, name) in enumerate(product(runs, functions)):

            def on_step(done: int, before: int = number * steps, detail: str = f"seed {seed}, {name}") -> None:
                update(before + done, total, detail)

            model = training.new(sizes, functions[name], seed, device)
            runs[seed][name] = training.train(model, seed, steps, on_step)
            if record and (seed, name) == (0, training.OURS):
                training.record(model, functions[name], record)
    return runs


def _show(errors: dict[str, float], runs: dict[int, dict[str, Run]]) -> None:
    """A row a seed and attention."""
    rows = [
        (str(seed), name, f"{run.losses[0]:.4f}", f"{run.loss:.4f}", f"{run.step_ms:.2f}", f"{errors[name]:.2g}")
        for seed, of_seed in runs.items()
        for name, run in of_seed.items()
    ]
    columns = numbers("first loss", "loss of the last steps", "a step, ms", "error of the first gradients")
    console.print(table("", ["seed", "attention", *columns], rows))


def _draw(runs: dict[int, dict[str, Run]], path: Path) -> None:
    """The losses of all runs, step by step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    styles = dict(zip(next(iter(runs.values())), ("-", "--"), strict=True))
    for seed, of_seed in runs.items():
        for name, run in of_seed.items():
            axes.plot(run.losses, styles[name], color=f"C{seed}", label=f"{name}, seed {seed}")
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
