"""Measure the whole ladder on this machine's GPU, beside official FlashAttention-2, for the README and the dashboard.

python tools/ladder.py                              every rung, six sequence lengths, bf16 and fp16: about 6 minutes
python tools/ladder.py --budget 120 --dtypes bf16   a coarser look
python tools/ladder.py 08 16 --again                two rungs once more

Every rung is timed twice: in its own configuration (own), which is what was tuned for this GPU or else the rung's
default, and in one that all the rungs take (fixed), so that the technique shows apart from the tuning. All of them
run in the same rounds, on the same tensors. The rows go to results/ladder_GPU.csv as soon as a shape is done, and what
is there already, of the same machine code, is not measured again: a run that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

try:
    from flashladder.common import arguments as options
    from flashladder.common import catalog
    from flashladder.common.catalog import Version
    from flashladder.common.config import Value, listing, parse_values
    from flashladder.common.console import EXIT_ERROR, Parser, console, exit_with, warn
    from flashladder.common.errors import ConfigError, DeviceError
    from flashladder.common.measure.entrants import Entrant, Lineup, assemble
    from flashladder.common.report import display
    from flashladder.common.run import tuned
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/python tools/ladder.py`")

if TYPE_CHECKING:
    from flashladder.common.build.artifact import Artifact
    from flashladder.common.measure.baselines import Baseline
    from flashladder.common.measure.contest import Contest
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.problem import Problem
    from flashladder.common.results.log import Log

OWN, FIXED = "own", "fixed"
# 01 to 16 all take it. Fragments and their double buffer are the techniques of 04 and 05; the tile stays.
FIXED_CONFIG = "block_m=64,block_n=64,num_warps=4,q_fragments=2,k_fragments=2,v_fragments=2,double_buffer=true"
TILE = {"block_m", "block_n", "num_warps"}  # a rung without these fields has no fixed configuration
NUM_HEADS, HEAD_DIM = 16, 128

Done = set[tuple[object, ...]]


def parser() -> Parser:
    """The options."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    made = Parser(summary, epilog=rest)
    made.add_argument("rungs", nargs="*", metavar="RUNG", help="or a ladder: backward; default: all of the first")
    made.add_argument("--seqlens", default="512..16384", help="512..4096 doubles; or a list, 512,4096")
    made.add_argument("--tokens", type=int, default=16384, help="batch x seqlen (default: 16384)")
    made.add_argument("--dtypes", default="bf16,fp16", help="default: bf16,fp16")
    made.add_argument("--fixed", default=FIXED_CONFIG, metavar="CONFIG", help=f"default: {FIXED_CONFIG}")
    made.add_argument("--untuned", action="store_true", help="own: the rung's default, not what was tuned for the GPU")
    made.add_argument("--budget", type=float, default=300, metavar="SECONDS", help="for all timing (default: 300)")
    options.add_rounds(made, "rounds of each shape, instead of a budget")
    made.add_argument("--again", action="store_true", help="measure what is there already, too")
    return made


def main(arguments: argparse.Namespace) -> int:
    versions = catalog.select(arguments.rungs)
    fixed, lengths = parse_values(arguments.fixed), options.lengths(arguments.seqlens)

    from flashladder.common.measure import baselines
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.results import records
    from flashladder.common.run import target

    ladder, operation = _the_ladder(versions), catalog.one_operation(version.operation for version in versions)
    place = target.resolve("gpu", None)
    official = baselines.official(operation)
    log, run = records.ladder(place.gpu.name, ladder), records.new_run()
    problems = list(_problems(arguments.dtypes.split(","), lengths, arguments.tokens, operation))
    gpu = None if arguments.untuned else place.gpu.name  # whose winners are wanted
    lineup, left_out = assemble(list(_entrants(versions, fixed, place.arch, gpu)), problems, place)
    for reason in dict.fromkeys(left_out):
        warn(reason)
    missing = lineup if arguments.again else _missing(lineup, _done(log), official.version)
    _say_what_is_done(lineup, missing)
    settings = TimingSettings(rounds=arguments.rounds, budget_s=arguments.budget / max(1, len(missing)))
    contests = []
    for number, (problem, artifacts) in enumerate(missing.items(), start=1):
        console.print(f"{number} of {len(missing)}: {problem.name}, {len(artifacts)} kernels", soft_wrap=True)
        contests.append(_measure(problem, artifacts, official, settings, log, run, gpu))
    for table in display.overview(contests):
        console.print(table)
    console.print(f"[dim]logged to {log.path}; `python tools/dashboard.py` makes tables and pictures of it")
    return EXIT_ERROR if any(not check.passed for result in contests for check in result.checks.values()) else 0


def _problems(dtypes: Iterable[str], lengths: Iterable[int], tokens: int, operation: str) -> Iterator[Problem]:
    from flashladder.common.problem import Problem

    for dtype in dtypes:
        for seqlen in lengths:
            batch = max(1, tokens // seqlen)
            yield Problem(
                batch=batch,
                num_heads=NUM_HEADS,
                seqlen_q=seqlen,
                head_dim=HEAD_DIM,
                dtype=dtype,
                operation=operation,
            )


def _entrants(
    versions: Iterable[Version], fixed: Mapping[str, Value], arch: str, gpu: str | None = None
) -> Iterator[Entrant]:
    """Each rung that the GPU can run, in its own configuration and, where it takes it, in the fixed one."""
    for version in versions:
        try:
            version.check_arch(arch)
        except ConfigError as error:
            warn(f"left out: {error}")
            continue
        yield Entrant(f"{version.address} {OWN}", version, {}, tuned_for=gpu)
        values = {name: value for name, value in fixed.items() if name in version.choices}
        if values.keys() >= TILE and _takes(version, values):
            yield Entrant(f"{version.address} {FIXED}", version, values)


def _takes(version: Version, values: dict[str, Value]) -> bool:
    try:
        version.config(**values)
    except ConfigError:
        return False
    return True


def _the_ladder(versions: Iterable[Version]) -> str:
    """The ladder of all the rungs; ConfigError where they are of several, whose figures have nothing in common."""
    names = sorted({version.ladder for version in versions})
    if len(names) > 1:
        raise ConfigError(
            f"the rungs are of several ladders ({listing(name or 'the first' for name in names)}): name one"
        )
    return names[0]


def _row_key(label: str, problem: Problem, artifact: Artifact, official: str) -> tuple[object, ...]:
    """What makes two rows the same measurement: another one would bring nothing new."""
    number, kind = label.split()
    return number, kind, artifact.code, problem.dtype, problem.batch, problem.seqlen_q, official


def _done(log: Log) -> set[tuple[object, ...]]:
    """The keys of the rows that are in the log, with figures."""
    frame, damaged = log.read()
    for damage in damaged:
        warn(f"{damage}; the line is left where it is, and its figures are measured again")
    timed = frame[frame["time_us"].notna()]
    columns = ("kind", "code", "dtype", "batch", "seqlen_q", "baseline_version")
    return {(catalog.address_of(row.version), *(getattr(row, name) for name in columns)) for row in timed.itertuples()}


def _missing(lineup: Lineup, done: set[tuple[object, ...]], official: str) -> Lineup:
    """What of the line-up is not done."""
    left = {
        problem: {
            label: artifact
            for label, artifact in artifacts.items()
            if _row_key(label, problem, artifact, official) not in done
        }
        for problem, artifacts in lineup.items()
    }
    return {problem: artifacts for problem, artifacts in left.items() if artifacts}


def _say_what_is_done(lineup: Lineup, missing: Lineup) -> None:
    total, left = (sum(map(len, which.values())) for which in (lineup, missing))
    if left < total:
        console.print(f"{total - left} of {total} rows are there already; --again measures them once more")


def _measure(
    problem: Problem,
    artifacts: Mapping[str, Artifact],
    official: Baseline,
    settings: TimingSettings,
    log: Log,
    run: str,
    gpu: str | None,
) -> Contest:
    """Time one shape and log it. Entries that are the same machine code are timed once, and have a row each."""
    from flashladder.common.measure import contest
    from flashladder.common.results import records

    first: dict[str, str] = {}
    for label, artifact in artifacts.items():
        first.setdefault(artifact.code, label)
    result = contest.hold(problem, {label: artifacts[label] for label in first.values()}, [official], settings)
    if result.absent:
        raise DeviceError(f"there is nothing to compare with: {result.absent[official.name]}")
    rows = records.of_contest(result, run, artifacts)
    log.append(
        [
            {**rows[first[artifact.code]], **records.of_artifact(artifact), **_kind(label, artifact, problem, gpu)}
            for label, artifact in artifacts.items()
        ]
    )
    if result.measurement:
        records.samples(run).append(records.of_samples(result.measurement, run, problem))
    for remark in result.remarks:
        warn(remark)
    return result


def _kind(label: str, artifact: Artifact, problem: Problem, gpu: str | None) -> dict[str, str]:
    """The kind of a row's configuration and, of an own one, where it is from."""
    number, kind = label.split()
    if kind == FIXED:
        return {"kind": kind}
    winner = tuned.config(catalog.find(number), gpu, problem) if gpu else None
    return {"kind": kind, "chosen_by": "tuner" if winner == artifact.config else "default"}


if __name__ == "__main__":
    exit_with(main, parser())
