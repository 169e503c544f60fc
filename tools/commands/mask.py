"""Which blocks of keys a mask costs: whole, partial, where it is evaluated, and empty ones, which are skipped.

flashladder mask "k <= q" --seqlen 4096                   counts, and a map of the blocks
flashladder mask "k < 4 || q - k < 1024" --causal --seqlen 4096 --picture mask.svg
flashladder mask "document[q] == document[k]" --tensor document=FILE.npy --seqlen 2048

The lists are made by the kernels of rung 52, on the emulator: no GPU is needed. docs/masks.md has the language.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashladder.common.console import Parser, aside, console
from flashladder.tools.commands import arguments as options


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("mask", metavar="TEXT", help='which keys a row sees: "k <= q || image[q] == image[k]"')
    options.add_tensors(made)
    options.add_problem(made)
    made.add_argument("--picture", type=Path, metavar="FILE", help="write the map as SVG")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.api.mask_blocks import mask_blocks
    from flashladder.common.expression import given
    from flashladder.common.problem.operations import forward
    from flashladder.common.report import masks as report

    plain = options.problem(arguments, forward.OPERATION.name, "small")
    tensors = given.tensors(arguments.tensor, plain.seed)
    with console.status("the mask is compiled, and its blocks are listed on the emulator"):
        found = mask_blocks(plain, arguments.mask, tensors)
    for part in report.terminal(found):
        console.print(part)
    if arguments.picture:
        arguments.picture.write_text(report.draw(found))
        aside(f"the picture is {arguments.picture}")
    return 0
