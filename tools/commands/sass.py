"""The machine code of a rung: opcode counts, resources, occupancy and what each pipe of an SM needs. No GPU needed.

flashladder sass 08                                tables for an H100
flashladder sass 08 --gpu a100 --config block_n=32
flashladder sass 08 --loop --listing               the main loop, instruction by instruction
flashladder sass 52 --mask "k <= q" --loop         with a mask by an expression
flashladder sass 07 08                             two rungs: sources, main loops side by side, opcode counts
flashladder sass --commits HEAD~3                      every rung as it was then and as it lies here, kernel by kernel
flashladder sass 37 43 --commits e18886d HEAD          two rungs, as they are at two commits

--commits compiles the rungs' default configurations, and those of the winners on GPUs of the same arch as --gpu, with
the kernels and headers of both sides; --features adds the default configuration with each feature that the rung has.
Rungs and configurations are those of the working tree. Two kernels are the same that have the same instructions but for
the numbers of registers; where an instruction reads another value, that is said too. The exit code is 1 where a kernel
differs. What was compiled is kept: with a base that stays, the next comparison compiles one side alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.compiler import BuildRequest, build_one
from flashladder.common.compiler.sass import Code, read
from flashladder.common.compiler.sass.commits import sides
from flashladder.common.compiler.sass.diff import RungPair
from flashladder.common.console import Parser, UsageError, aside, console, progress
from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import GpuDescription, KernelConfig, Value, gpu_names, listing, load_gpu
from flashladder.common.report import sass as show
from flashladder.common.report import sass_commits as show_commits
from flashladder.tools.commands import arguments as options

EXIT_DIFFERENT = 1  # of --commits


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument(
        "versions",
        nargs="*",
        metavar="version",
        help="a rung: 02, or swizzling; two are compared, in the second one's configuration; of --commits, several",
    )
    made.add_argument("--diff", nargs=2, metavar=("LOWER", "UPPER"), help="the same as two rungs without it")
    made.add_argument("--commits", nargs="+", metavar=("BASE", "HEAD"), help="compare the machine code of two commits")
    made.add_argument("--features", action="store_true", help="with --commits: windows, masks, packing and so on too")
    made.add_argument("--limit", type=int, metavar="N", help="with --commits: N kernels, spread over all of them")
    options.add_config(made)
    options.add_expressions(made, "compiled in")
    made.add_argument("--gpu", default="h100", metavar="NAME", help="compile for and reckon with it (default: h100)")
    made.add_argument("--loop", action="store_true", help="the main loop alone")
    made.add_argument("--listing", action="store_true", help="the instructions too; with --diff, of all the kernel")
    made.add_argument("--csv", type=Path, metavar="FILE", help="write the opcode counts to a file")
    return made


def main(arguments: argparse.Namespace) -> int:
    gpu = load_gpu(arguments.gpu)
    if arguments.commits:
        return _compare_commits(arguments, gpu)
    named = [*(arguments.diff or []), *arguments.versions]
    if not named:
        raise UsageError
    if len(named) > 2:
        raise ConfigError(f"sass shows one rung, or compares two, not {listing(named)}")
    codes = _compare(named[0], named[1], arguments, gpu) if len(named) == 2 else _inspect(named[0], arguments, gpu)
    if arguments.csv:
        import pandas as pd

        pd.DataFrame([row for code in codes for row in show.rows(code)]).to_csv(arguments.csv, index=False)
        aside(f"opcode counts written to {arguments.csv}")
    return 0


def _inspect(name: str, arguments: argparse.Namespace, gpu: GpuDescription) -> list[Code]:
    version = catalog.find(name)
    values = options.values_with_expressions(arguments)
    code = read(build_one(version, version.config(gpu, **values), gpu.arch))
    console.print(show.summary(version, code, gpu))
    console.print(options.which_configuration(version, code.artifact.config, gpu, values), soft_wrap=True)
    console.print(show.bounds(code, gpu))
    console.print(show.limit(code, gpu), end="\n\n")
    console.print(show.lines(code))
    console.print(show.opcodes(code, loop_only=arguments.loop))
    if arguments.listing:
        console.print(show.listing(code.loop if arguments.loop else code.instructions, code), soft_wrap=True, end="")
    return [code]


def _compare(left_name: str, right_name: str, arguments: argparse.Namespace, gpu: GpuDescription) -> list[Code]:
    lower, upper = catalog.find(left_name), catalog.find(right_name)
    pair = RungPair.of(lower, upper, gpu.arch, options.values_with_expressions(arguments))
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


def _compare_commits(arguments: argparse.Namespace, gpu: GpuDescription) -> int:
    if len(arguments.commits) > 2:
        raise ConfigError(f"--commits takes BASE, or BASE and HEAD, not {listing(arguments.commits)}")
    base, head = (*arguments.commits, None)[:2]
    requests = _spread(_kernels(arguments, gpu), arguments.limit)
    with sides(requests, base, head) as both, progress("compile") as update:
        console.print(
            f"{len(both.requests)} kernels at {base} and {f'at {head}' if head else 'in the working tree'}: "
            f"{both.to_compile} are to be compiled, about {both.seconds:.0f} s on an idle machine"
        )
        comparisons = list(both.compare(update))
    console.print(show_commits.compared(comparisons))
    console.print(show_commits.summary(comparisons))
    return 0 if all(each.is_same for each in comparisons) else EXIT_DIFFERENT


def _kernels(arguments: argparse.Namespace, gpu: GpuDescription) -> list[BuildRequest]:
    """The rungs' default configurations and their winners', each once."""
    names = arguments.versions or catalog.ladders()
    rungs = [rung for rung in catalog.select(names) if rung.runs_on(gpu.arch)]
    values = options.config_values(arguments.config)
    known = [] if values else winners.every()
    found: list[BuildRequest] = []
    for rung in rungs:
        configs = [rung.config(gpu, **values), *_standing(rung, gpu.arch, known)]
        configs += _features(rung, gpu, values) if arguments.features else []
        found += [BuildRequest(rung, config, gpu.arch) for config in dict.fromkeys(configs)]
    return found


def _standing(rung: catalog.Version, arch: str, known: Iterable[winners.Winner]) -> Iterator[KernelConfig]:
    """A rung's winners on the GPUs of an arch, as far as it still has them."""
    for winner in known:
        if winner.version == rung.name and winner.gpu in gpu_names() and load_gpu(winner.gpu).arch == arch:
            with suppress(ConfigError):
                yield winners.standing(winner)


def _features(rung: catalog.Version, gpu: GpuDescription, values: dict[str, Value]) -> Iterator[KernelConfig]:
    """The default configuration with each value of each field that the problem decides."""
    from flashladder.common.problem.problem import Problem

    for name in catalog.kind_of(Problem()).decided(Problem().head_dim).keys() & rung.choices.keys():
        for value in rung.choices[name].values:
            with suppress(ConfigError):  # not every value goes with the other defaults
                yield rung.config(gpu, **{**values, name: value})


def _spread(requests: list[BuildRequest], limit: int | None) -> list[BuildRequest]:
    """As many of them as asked for, evenly spread."""
    step = max(1.0, len(requests) / limit) if limit else 1.0
    return [requests[int(number * step)] for number in range(int(len(requests) / step))]
