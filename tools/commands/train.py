"""Train a small GPT with attention() and with torch's own, from the same beginning and on the same text.

flashladder train                          11.2 M parameters, 16 x 1,024 bytes a step, 300 steps, three seeds
flashladder train --steps 100 --seeds 1
flashladder train --device emulator        without a GPU: 2 layers, 64 bytes, two steps
flashladder train --picture losses.png     with the losses as a picture
flashladder train --record FILE.npz        with Q, K and V of each layer, as attention() got them, in a new file
flashladder train --ways                   what a step costs in each way of training, beside torch's own attention
flashladder train --ways --way ddp,d96-compiled --steps 30

The text is what Python's library says of itself: its sources. Models are in fp32 under autocast to bf16, trained by
AdamW. The exit code is 2 where the first step's gradients are further from those in fp32 than twice as far as with
torch's attention, or where the mean loss of the last 50 steps differs from torch's of the same seed by more than
torch's own does from seed to seed (with several seeds). Nothing is logged.

What is recorded is of the model that was trained with attention() and the first seed: bf16 numbers of the first two
heads of each layer, for the first 256 bytes of one sequence. In the place of common/problem/families/trained.npz such a
file is the family of inputs `trained`.

--ways trains a GPT of 4 layers with 12 heads of 64 columns on 16 x 1,024 bytes: under autocast and in bf16, with
checkpoints, dropout and both, deterministic, with groups of heads, other head_dims and packed sequences, in DDP and
FSDP2 (one process), under accelerate and lightning where they are installed, and by torch's switch; the first 12 of
them also under torch.compile. The first loss and gradients are to be torch's but for rounding; with dropout they
cannot be. A ratio is the median over pairs of runs, ours and torch's, that take turns. MiB are those of a step at its
peak, beside what stays. Forward and backward pass of a short call come first, unless --way names ways. A way that fails
says so in its row. The exit code is 2 where one fails with our attention and not with torch's.
"""

from __future__ import annotations

import argparse
import os
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from flashladder.common.console import Parser, console, duration, fail, progress, warn
from flashladder.common.errors import ConfigError
from flashladder.common.report.tables import folding, numbers, table
from flashladder.tools.commands.arguments import chosen, count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashladder.common.studies.models.gpt import Attend, Sizes
    from flashladder.common.studies.models.step_costs import Costs
    from flashladder.common.studies.models.training import Run
    from flashladder.common.studies.models.ways import Way

SIZES = {  # on a GPU, and on the emulator
    "layers": (6, 2),
    "heads": (6, 2),
    "head_dim": (64, 64),
    "batch": (16, 1),
    "seqlen": (1024, 64),
    "steps": (300, 2),
    "seeds": (3, 1),
}
WAYS_STEPS, WAYS_RUNS = (100, 2), (5, 1)
BAR = 1.03  # of a step's time, to torch's
STEP_SECONDS, FIRST_SECONDS, COMPILE_SECONDS = (0.02, 1), 10, 60  # about: of a step, of a way's first steps


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("--device", choices=("auto", "gpu", "emulator"), default="auto", help="default: a GPU if any")
    for name, (on_gpu, emulated) in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        made.add_argument(option, type=count, metavar="N", help=f"default: {on_gpu}; {emulated} on the emulator")
    made.add_argument("--picture", type=Path, metavar="FILE", help="where the losses are drawn")
    made.add_argument("--record", type=Path, metavar="FILE", help="a new .npz for Q, K and V of the trained layers")
    made.add_argument("--ways", action="store_true", help="time a step in each way of training, and nothing else")
    made.add_argument("--way", metavar="NAME[,NAME]", help="of --ways, these alone")
    steps, few = WAYS_STEPS
    runs, one = WAYS_RUNS
    told = f"pairs of runs of --ways, {steps} steps each (default: {runs}; {one}, of {few} steps, on the emulator)"
    made.add_argument("--runs", type=count, metavar="N", help=told)
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.runtime import target
    from flashladder.common.studies.models import training
    from flashladder.common.studies.models.gpt import Gpt, Sizes, parameters

    _check_options(arguments)
    record: Path | None = arguments.record
    if record:
        _check_new(record)
    on_gpu = target.resolve(arguments.device, None).on_gpu
    device = "cuda" if on_gpu else "cpu"
    if arguments.ways:
        return _time_ways(arguments, device)
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


def _check_options(arguments: argparse.Namespace) -> None:
    """ConfigError for options of the other mode."""
    others = ({*SIZES} | {"picture", "record"}) - {"steps"} if arguments.ways else {"way", "runs"}
    if given := [f"--{name.replace('_', '-')}" for name in sorted(others) if getattr(arguments, name) is not None]:
        told = "not for --ways, which takes --way, --steps and --runs" if arguments.ways else "for --ways alone"
        raise ConfigError(f"{', '.join(given)}: {told}")


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


def _time_ways(arguments: argparse.Namespace, device: str) -> int:
    """--ways."""
    from flashladder.common.studies.models import step_costs
    from flashladder.common.studies.models.training import OURS
    from flashladder.common.studies.models.ways import ways

    emulated = device == "cpu"
    if not emulated:  # read once; torch's deterministic products ask for it. It is as much memory as Hopper's usual
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    steps, runs = arguments.steps or WAYS_STEPS[emulated], arguments.runs or WAYS_RUNS[emulated]
    known = ways(device)
    taken = {name: known[name] for name in chosen("way", arguments.way, known)}
    for name, way in taken.items():
        if way.missing:
            warn(f"{name} is left out: it needs {way.missing}")
    taken = {name: way for name, way in taken.items() if not way.missing}
    if not taken:
        raise ConfigError(f"--way {arguments.way}: nothing is left to time")
    told = f"{len(taken)} ways, {runs} x {steps} steps with each attention"
    console.print(f"{told}: about {_ways_take(taken, steps, runs, emulated)}", style="bold")
    head_dims = () if emulated or arguments.way else (64, 128)
    passes = {f"1 x 512 rows, head_dim {head_dim}": step_costs.measure_pass(head_dim) for head_dim in head_dims}
    if passes:
        _show_costs("forward and backward pass", passes, "FlashAttention-2")
    found: dict[str, Costs] = {}
    try:
        with progress("runs") as update:
            for number, (name, way) in enumerate(taken.items()):

                def on_run(done: int, before: int = 2 * runs * number, name: str = name) -> None:
                    update(before + done, 2 * runs * len(taken), name)

                on_run(0)
                found[name] = step_costs.measure(way, device, steps, runs, on_run)
    finally:  # also of what was done before an interruption
        _show_costs("a step", found, "torch")
    console.print("times of the emulator, which tell nothing of a GPU's" if emulated else _verdict(found))
    if failed := [name for name, costs in {**passes, **found}.items() if list(costs.failures) == [OURS]]:
        return fail(f"failed with our attention alone: {', '.join(failed)}")
    return 0


def _verdict(found: Mapping[str, Costs]) -> str:
    ratios = [costs.ratio for costs in found.values() if not costs.failures]
    return f"{sum(ratio <= BAR for ratio in ratios)} of {len(ratios)} ways take at most {BAR} x torch's own step"


def _ways_take(taken: Mapping[str, Way], steps: int, runs: int, emulated: bool) -> str:
    """About how long, from guesses of what a step takes."""
    of_runs = 2 * runs * steps * STEP_SECONDS[emulated]
    return duration(sum(FIRST_SECONDS + way.compiled * COMPILE_SECONDS + of_runs for way in taken.values()))


def _show_costs(title: str, found: Mapping[str, Costs], torchs: str) -> None:
    """A row a way."""
    from flashladder.common.studies.models.training import OURS, TORCHS

    with_mib = any(costs.mib for costs in found.values())
    with_failures = any(costs.failures for costs in found.values())
    columns = ["way", *numbers("ours, ms", f"{torchs}, ms", "ratio")]
    columns += numbers("ours, MiB", f"{torchs}, MiB") * with_mib + folding("failed") * with_failures
    rows = []
    for name, costs in found.items():
        failed = bool(costs.failures)
        row = [name, *("" if failed else f"{median(costs.ms[each]):.3f}" for each in (OURS, TORCHS))]
        row.append("" if failed else f"{costs.ratio:.3f}")
        row += [f"{costs.mib[each]:.0f}" if each in costs.mib else "" for each in (OURS, TORCHS)] * with_mib
        row += ["; ".join(f"{which}: {error}" for which, error in costs.failures.items())] * with_failures
        rows.append(row)
    console.print(table(title, columns, rows))
