"""Time rungs of the ladder against official kernels, side by side, over shapes.

python tools/bench.py 07 16
python tools/bench.py 16 16@block_m=128,num_warps=8 --baselines fa2,cudnn --seqlens 512..16384 --causal both
python tools/bench.py 16 --seqlens 4096 --rounds 8 --brief      a quick look
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from flashladder.common import arguments as options
    from flashladder.common import catalog, display
    from flashladder.common.catalog import Version
    from flashladder.common.config import Value, parse_values
    from flashladder.common.console import EXIT_ERROR, Parser, console, exit_with, progress, warn
    from flashladder.common.errors import BuildError, ConfigError, UnsupportedProblemError
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/python tools/bench.py`")

if TYPE_CHECKING:
    from flashladder.common.artifact import Artifact
    from flashladder.common.contest import Contest
    from flashladder.common.problem import Problem
    from flashladder.common.target import Target


def parser() -> Parser:
    """The options."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    made = Parser(summary, epilog=examples)
    made.add_argument("kernels", nargs="*", metavar="KERNEL", help="a rung, with a configuration after @ if wanted")
    made.add_argument("--baselines", default="fa2", help="first the one that ratios refer to (default: fa2)")
    made.add_argument("--list-baselines", action="store_true", help="show the official kernels, and how to get them")
    made.add_argument("--seqlens", default="512..16384", help="512..4096 doubles; or a list, 512,4096")
    made.add_argument("--causal", choices=("no", "yes", "both"), default="no")
    made.add_argument("--tokens", type=int, default=16384, help="batch x seqlen (default: 16384)")
    made.add_argument("--heads", type=int, default=16)
    made.add_argument("--heads-k", type=int, help="heads of K and V (default: as Q)")
    made.add_argument("--head-dim", type=int, default=128)
    made.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    made.add_argument("--seed", type=int, default=0)
    options.add_config(made)
    options.add_timing(made)
    made.add_argument("--brief", action="store_true", help="only the last table, one line a kernel")
    made.add_argument("--out", type=Path, metavar="FILE", help="write what is printed to a file too")
    made.add_argument("--no-log", action="store_true", help="write nothing to results/")
    return made


@dataclass(frozen=True)
class Kernel:
    """A rung as it was asked for: '16' or '16@block_m=128'."""

    label: str
    version: Version
    values: dict[str, Value]


def main(arguments: argparse.Namespace) -> int:
    if arguments.list_baselines:
        console.print(display.baselines())
        return 0
    if not arguments.kernels:
        parser().print_help()
        return EXIT_ERROR
    kernels = [_kernel(text, options.config_values(arguments.config)) for text in arguments.kernels]

    from flashladder.common import baselines, contest, records, target
    from flashladder.common.measure import Settings

    references = [baselines.find(name) for name in arguments.baselines.split(",") if name]
    place = target.resolve("gpu", None)
    settings = Settings(arguments.mode, arguments.rounds, arguments.seed)
    run = f"{records.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    contests: list[Contest] = []
    field, left_out = _field(kernels, list(_problems(arguments)), place)
    for reason in dict.fromkeys(left_out):
        warn(reason)
    for problem, artifacts in field.items():
        result = contest.hold(problem, artifacts, references, settings)
        contests.append(result)
        _report(result, brief=arguments.brief)
        if not arguments.no_log:
            _log(run, result, artifacts)
    for absent in dict.fromkeys(f"{name}: {reason}" for c in contests for name, reason in c.absent.items()):
        warn(f"no baseline {absent}")
    for table in display.overview(contests):
        console.print(table)
    if not arguments.no_log:
        console.print(f"[dim]logged to {records.bench().path}, samples to {records.samples(run).path}")
    if arguments.out:
        arguments.out.write_text(console.export_text())
    return EXIT_ERROR if any(not check.passed for result in contests for check in result.checks.values()) else 0


def _kernel(text: str, values: dict[str, Value]) -> Kernel:
    name, _, own = text.partition("@")
    version = catalog.find(name)
    return Kernel(version.number + (f"@{own}" if own else ""), version, values | parse_values(own))


def _problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    from flashladder.common.problem import Problem

    for causal in {"no": (False,), "yes": (True,), "both": (False, True)}[arguments.causal]:
        for seqlen in _seqlens(arguments.seqlens):
            yield Problem(
                batch=max(1, arguments.tokens // seqlen),
                num_heads=arguments.heads,
                num_heads_k=arguments.heads_k,
                seqlen_q=seqlen,
                head_dim=arguments.head_dim,
                dtype=arguments.dtype,
                causal=causal,
                seed=arguments.seed,
            )


def _seqlens(text: str) -> list[int]:
    """'512..4096' is 512, 1024, 2048, 4096; otherwise numbers between commas."""
    first, doubling, last = text.partition("..")
    try:
        if not doubling:
            return [int(number) for number in text.split(",")]
        begin, end = int(first), int(last)
    except ValueError:
        raise ConfigError(
            f"--seqlens {text} is neither a range such as 512..4096 nor a list such as 512,4096"
        ) from None
    return [begin << power for power in range(64) if begin << power <= end]


def _field(
    kernels: Sequence[Kernel], problems: Sequence[Problem], place: Target
) -> tuple[dict[Problem, dict[str, Artifact]], list[str]]:
    """For each problem the kernels that take it, all compiled at once; and why others take no part."""
    from flashladder.common.build import BuildRequest, build

    requests: dict[tuple[Problem, str], BuildRequest] = {}
    left_out = []
    for problem in problems:
        for kernel in kernels:
            try:
                config = kernel.version.config_for(problem, **kernel.values)
                kernel.version.check(problem, config)
                requests[problem, kernel.label] = BuildRequest(kernel.version, config, place.arch)
            except UnsupportedProblemError as error:
                left_out.append(f"left out: {error}")
    distinct = list(dict.fromkeys(requests.values()))
    with progress("compiled") as update:
        built = dict(zip(distinct, build(distinct, update, on_error="return"), strict=True))
    field: dict[Problem, dict[str, Artifact]] = {}
    for (problem, label), request in requests.items():
        artifact = built[request]
        if isinstance(artifact, BuildError):
            left_out.append(f"left out: {artifact}")
        else:
            place.check(artifact)
            field.setdefault(problem, {})[label] = artifact
    return field, left_out


def _report(result: Contest, brief: bool) -> None:
    for name, check in result.checks.items():
        for fault in check.faults:
            warn(f"{name} is wrong, and not timed, at {result.problem.name}: {fault}")
    if result.measurement:
        for note in result.measurement.notes():
            warn(f"{result.problem.name}: {note}")
        if not brief:
            console.print(f"\n{result.problem.name}", style="bold")
            console.print(display.times(result.measurement, result.problem))


def _log(run: str, result: Contest, artifacts: dict[str, Artifact]) -> None:
    from flashladder.common import baselines, records

    place = {"run": run} | records.of_place(on_gpu=True) | records.of_problem(result.problem)
    rows = []
    for name, check in {**(result.measurement.checks if result.measurement else {}), **result.checks}.items():
        kernel = records.of_artifact(artifacts[name]) if name in artifacts else {"version": name}
        figures: records.Row = {}
        if result.measurement and name in result.measurement.checks:
            reference = baselines.BASELINES.get(result.measurement.baseline)
            figures = records.of_measurement(
                result.measurement, name, result.problem, reference.version if reference else ""
            )
        rows.append(place | kernel | records.of_check(check) | figures)
    records.bench().append(rows)
    if result.measurement:
        records.samples(run).append(records.of_samples(result.measurement, run, result.problem))


if __name__ == "__main__":
    exit_with(main, parser())
