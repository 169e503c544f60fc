"""Time packed sequences beside FlashAttention-2 and 3, and beside the same sequences padded to the longest.

flashladder packed                                   equal lengths, a spread of them, one long among short ones
flashladder packed --head-dim 64 --causal both --rounds 8
flashladder packed --version 46@block_m=192,block_n=64,q_in_registers=false --causal yes
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashladder.common.catalog import FASTEST
from flashladder.common.console import Parser, aside, console
from flashladder.common.report import display
from flashladder.tools.commands import arguments as options


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument(
        "--version",
        default=FASTEST,
        metavar="RUNG",
        help="a rung, @ a configuration; default: what attention() takes for them",
    )
    made.add_argument("--tokens", type=int, default=16384, help="of all sequences (default: 16384)")
    made.add_argument("--heads", type=int, default=16)
    made.add_argument("--heads-k", type=int, help="heads of K and V (default: as Q)")
    made.add_argument("--head-dim", type=int, default=128)
    made.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    made.add_argument("--causal", choices=("no", "yes", "both"), default="both")
    made.add_argument("--seed", type=int, default=0, help="of the inputs and of the spread")
    options.add_timing(made)
    made.add_argument("--no-log", action="store_true", help="write nothing to results/")
    made.add_argument("--out", type=Path, metavar="FILE", help="write what is printed to a file too")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.measure import packing
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.problem.problem import Problem
    from flashladder.common.records import records
    from flashladder.common.runtime import target

    place = target.resolve("gpu", None)
    settings = TimingSettings(arguments.mode, arguments.rounds, arguments.seed)
    run, log = records.new_run(), records.packed(place.gpu.name)
    for causal in {"no": (False,), "yes": (True,), "both": (False, True)}[arguments.causal]:
        for mix in packing.MIXES:
            seqlens = packing.lengths(mix, arguments.tokens, arguments.seed)
            problem = Problem(
                operation="packed",
                seqlens_q=seqlens,
                num_heads=arguments.heads,
                num_heads_k=arguments.heads_k,
                head_dim=arguments.head_dim,
                dtype=arguments.dtype,
                causal=causal,
                seed=arguments.seed,
            )
            kernels = packing.kernels(problem, arguments.version, place)
            measured = packing.contest(problem, kernels, settings)
            if not arguments.no_log:
                log.append(records.of_packing(measured, run, mix, problem, kernels))
            mask = "causal" if causal else "full"
            console.print(f"\n{mix}, {mask}: {len(seqlens)} sequences of {min(seqlens)} to {max(seqlens)} tokens")
            console.print(display.times(measured, problem))
            for note in (*measured.absent.values(), *measured.notes()):
                aside(note)
    if not arguments.no_log:
        log.seal()
        aside(f"logged to {log.path}")
    if arguments.out:
        arguments.out.write_text(console.export_text())
    return 0
