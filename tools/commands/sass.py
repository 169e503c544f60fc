"""The machine code of a rung: opcode counts, resources, occupancy and what each pipe of an SM needs. No GPU needed.

python tools/sass.py 08                                tables for an H100
python tools/sass.py 08 --gpu a100 --config block_n=32
python tools/sass.py 08 --loop --listing               the main loop, instruction by instruction
python tools/sass.py --diff 07 08                      two rungs: sources, main loops side by side, opcode counts
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.compiler.sass import Code, read
from flashladder.common.compiler.sass.diff import RungPair
from flashladder.common.console import EXIT_ERROR, Parser, console
from flashladder.common.problem.config import GpuDescription, load_gpu
from flashladder.common.report import sass as show
from flashladder.tools.commands import arguments as options


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("version", nargs="?", help="a rung: 02, or swizzling")
    made.add_argument("--diff", nargs=2, metavar=("LOWER", "UPPER"), help="compare two rungs, in UPPER's configuration")
    options.add_config(made)
    made.add_argument("--gpu", default="h100", metavar="NAME", help="compile for and reckon with it (default: h100)")
    made.add_argument("--loop", action="store_true", help="the main loop alone")
    made.add_argument("--listing", action="store_true", help="the instructions too; with --diff, of all the kernel")
    made.add_argument("--csv", type=Path, metavar="FILE", help="write the opcode counts to a file")
    return made


def main(arguments: argparse.Namespace) -> int:
    if (arguments.version is None) == (arguments.diff is None):
        parser().print_help()
        return EXIT_ERROR
    gpu = load_gpu(arguments.gpu)
    codes = _compare(arguments, gpu) if arguments.diff else _inspect(arguments, gpu)
    if arguments.csv:
        pd.DataFrame([row for code in codes for row in show.rows(code)]).to_csv(arguments.csv, index=False)
        console.print(f"[dim]opcode counts written to {arguments.csv}")
    return 0


def _inspect(arguments: argparse.Namespace, gpu: GpuDescription) -> list[Code]:
    version = catalog.find(arguments.version)
    code = read(build_one(version, version.config(gpu, **options.config_values(arguments.config)), gpu.arch))
    console.print(show.summary(version, code, gpu))
    console.print(show.bounds(code, gpu))
    console.print(show.limit(code, gpu), end="\n\n")
    console.print(show.lines(code))
    console.print(show.opcodes(code, loop_only=arguments.loop))
    if arguments.listing:
        console.print(show.listing(code.loop if arguments.loop else code.instructions, code), soft_wrap=True, end="")
    return [code]


def _compare(arguments: argparse.Namespace, gpu: GpuDescription) -> list[Code]:
    lower, upper = (catalog.find(name) for name in arguments.diff)
    pair = RungPair.of(lower, upper, gpu.arch, options.config_values(arguments.config))
    left, right = pair.left, pair.right
    console.print(show.compared(pair))
    console.print(show.source(lower, upper), end="\n\n")
    is_whole = arguments.listing and not arguments.loop
    listings = (left.instructions, right.instructions) if is_whole else (left.loop, right.loop)
    what = "The kernel" if is_whole else "The main loop"
    console.print(show.side_by_side(f"{what}, registers' names aside", *listings))
    console.print(show.resources(left, right))
    console.print(show.count_changes("Opcodes of the main loop", left.loop_counts, right.loop_counts))
    if not arguments.loop:
        console.print(show.count_changes("Opcodes of the kernel", left.counts, right.counts))
    return [left, right]
