"""Ring attention of one sequence over the GPUs of this machine: right? how near to linear? is the exchange hidden?

flashladder ring --causal                          131,072 tokens on 2 GPUs
flashladder ring --ranks 4 --seqlen 262144 --heads 8
flashladder ring --causal --train                  its gradients too, checked
flashladder ring --device emulator --causal        without GPUs: few tokens, checked, not timed

Every rank also computes the whole sequence alone, which gives the time of one GPU. Nothing is logged. The exit code is
1 where an error is above its tolerance.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from flashladder.common.console import EXIT_ERROR, Parser, console, fail, warn
from flashladder.common.own import FIRST
from flashladder.common.report.tables import numbers, table
from flashladder.tools.commands import arguments as options

EMULATOR_DEFAULTS = {"batch": 1, "num_heads": 1, "seqlen_q": 64, "head_dim": 64}
GPU_DEFAULTS = {"batch": 1, "num_heads": 16, "seqlen_q": 131072, "head_dim": 128}


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("--ranks", type=int, default=2, metavar="N", help="processes, a GPU each (default: 2)")
    made.add_argument("--version", metavar="RUNG", help="the rung that each runs (default: that of attention())")
    made.add_argument("--device", choices=("auto", "gpu", "emulator"), default="auto", help="default: GPUs if any")
    made.add_argument("--train", action="store_true", help="check gradients too")
    options.add_problem(made)
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.catalog import FASTEST
    from flashladder.common.runtime import target
    from flashladder.common.studies import ring_trial

    if arguments.ranks < 1:
        return fail(f"--ranks {arguments.ranks}: there is at least one")
    on_gpu = target.resolve(arguments.device, None).on_gpu
    defaults: dict[str, Any] = GPU_DEFAULTS if on_gpu else EMULATOR_DEFAULTS
    problem = options.problem(arguments, FIRST, **defaults)
    if not on_gpu:
        warn(f"no GPU: {problem.seqlen_q} tokens (--seqlen), on the emulator; the answer is checked, and not timed")
    device, version = "cuda" if on_gpu else "cpu", arguments.version or FASTEST
    trial = ring_trial.hold(problem, arguments.ranks, device, version, arguments.train)
    console.print(f"{arguments.ranks} ranks, {problem.name}", style="bold", soft_wrap=True)
    rows = ((name, f"{error:.2g}", f"{trial.tolerances[name]:.2g}") for name, error in trial.errors.items())
    console.print(table("", ["output", *numbers("error", "tolerance")], rows))
    if trial.times:
        console.print(_timed(trial.times, arguments.ranks))
    return 0 if trial.passed else EXIT_ERROR


def _timed(times: Mapping[str, float], ranks: int) -> Table:
    """The times, and what of linear the ring reaches."""
    rows = (
        (name, f"{milliseconds:.3f}", f"{times['one GPU'] / ranks / milliseconds:.3f}" if name == "ring" else "")
        for name, milliseconds in times.items()
    )
    return table("", ["medians of the slowest rank", *numbers("ms", "of linear")], rows)
