"""Find the configuration with which a rung of the ladder is fastest on a GPU.

flashladder search 16 --gpu h100                  one rung
flashladder search --gpu h100                     every rung that the GPU can run, those first that calls launch
flashladder search --gpu h100 --budget-seconds 360      the same, all in six minutes
flashladder search 24 --gpu h100 --seqlens 1024..8192 --causal both --trials 100
flashladder search decode/07 --gpu h100 --batch 1,8 --seqlens 1024,8192 --set paged=true
flashladder search 16 --gpu h100 --only block_m=128 ptxas_level=1,3      a part of the space
flashladder search 16 --gpu a100                  where no GPU is: ranked by the cost model, nothing measured

Every configuration is compiled first, on all cores; those with the same machine code are one kernel. Kernels are
checked, and timed beside an official one, in processes that are replaced when a kernel faults, hangs or is
wrong. Where there are few, all are measured; of many, those that TPE and the cost model ask for. The best are
measured again, together, and the winner goes to configs/tuned/GPU.yaml, where `flashladder run` finds it.

Without sizes, problems are those that the rungs' ladder is tuned for (`search` in its ladder.yaml), timed as it says:
decode and MLA in CUDA graphs, with a cold L2. Each kind of problems has a winner of its own: each mask, class of
lengths, and whatever else the ladder tells apart. A rung is tuned for the kinds for which calls launch it.

Kernels are timed on normal inputs and on scores of 3 nats, as trained models have them; --family names others.

Where there is no GPU, configurations are compiled, and ranked by the cost model: for 60 seconds a rung, unless
--budget-seconds or --exhaustive says otherwise. A ranking of a part of a space is marked as partial.

A search or a ranking that was killed goes on where it was when it is started again. Several machines share a study
through a database: --storage postgresql://user:password@host/database. To watch: flashladder studies.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.console import Parser, warn
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.config import GpuDescription, gpu_names, load_gpu
from flashladder.tools.commands import arguments as options
from flashladder.tuner import AUTO

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem
    from flashladder.tuner.job import SearchSettings
    from flashladder.tuner.space import Space

FAMILIES = ("normal", "normal_3")  # of inputs: what is fastest on one may not be on the other


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("rungs", nargs="*", metavar="RUNG", help="default: all that the GPU can run")
    described = ", ".join(gpu_names())
    made.add_argument(
        "--gpu", required=True, metavar="NAME", help=f"what to tune for: {described}, or here: the GPU of this machine"
    )
    made.add_argument("--offline", action="store_true", help="rank by the cost model, as where there is no GPU")
    options.add_shapes(made, seqlens=None, families=FAMILIES)
    options.add_timing(made, default=None)
    made.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE[,VALUE]",
        help="search a part of the space: these values alone, or ptxas_level, which any rung takes",
    )
    budget = made.add_argument_group("budget of each rung")
    budget.add_argument(
        "--trials", type=options.count, metavar="N", help="kernels to measure, earlier searches' among them"
    )
    budget.add_argument("--minutes", type=options.above_zero, default=math.inf, metavar="M", help="of measuring")
    budget.add_argument(
        "--budget-seconds",
        type=options.above_zero,
        default=math.inf,
        metavar="S",
        help="for all rungs, in equal shares; one configuration each at least (default: none; offline, 60 each)",
    )
    budget.add_argument(
        "--compile",
        type=options.count,
        metavar="N",
        help="configurations, those first that are near to earlier winners (default: all, or what the budget allows)",
    )
    budget.add_argument("--exhaustive", action="store_true", help="measure every kernel; without a GPU, rank all")
    options.add_strategy(budget)
    budget.add_argument("--spills", type=int, metavar="BYTES", help="that a thread may spill (default: 256)")
    study = made.add_argument_group("study")
    study.add_argument("--study", metavar="NAME", help="default: named after rung, GPU and problems")
    study.add_argument("--storage", metavar="URL", help="any of Optuna's (default: SQLite, results/tuning/studies.db)")
    study.add_argument("--workers", default=AUTO, metavar="N", help="that measure, one a GPU (default: all GPUs)")
    study.add_argument(
        "--patience", type=options.above_zero, default=60, metavar="S", help="until a kernel counts as hung"
    )
    options.add_json(made)
    return made


def main(arguments: argparse.Namespace) -> int:
    gpu = _gpu(arguments.gpu)
    versions = catalog.select(arguments.rungs)

    from flashladder.tuner import campaign

    operation = catalog.one_operation(version.operation for version in versions)
    spaces = _spaces(versions, options.shapes(arguments, operation), gpu, arguments)
    settings = _settings(arguments, operation)
    measuring = (arguments.workers, gpu, settings.mode, arguments.patience)
    workers = [] if arguments.offline else campaign.find_workers(*measuring)
    return campaign.tune(spaces, gpu, workers, settings, arguments.budget_seconds, arguments.json)


def _gpu(name: str) -> GpuDescription:
    """The GPU of that name, or that of this machine, which need not be described."""
    if name != "here":
        return load_gpu(name)

    from flashladder.common.runtime import target

    return target.resolve("gpu", None).gpu


def _spaces(
    versions: Sequence[catalog.Version], problems: Sequence[Problem], gpu: GpuDescription, arguments: argparse.Namespace
) -> list[Space]:
    """What is searched. A rung that was asked for by name must suit; of all, those that do not are left out."""
    from flashladder.tuner import space

    only, kinds = space.narrowed(arguments.only), space.by_kind(problems)
    if arguments.rungs:
        return [space.suiting(rung, each, gpu, only) for rung in versions for each in _launched(rung, kinds)]
    found = [space.all_suiting(versions, each, gpu, only) for each in kinds]
    for reason, rungs in {reason: rungs for _, left_out in found for reason, rungs in left_out.items()}.items():
        warn(f"left out, {', '.join(rungs)}: {reason}")
    if not (spaces := [each for spaces, _ in found for each in spaces]):
        raise ConfigError("no rung is left to search; `flashladder search 16` says what else 16 would need")
    return sorted(spaces, key=lambda each: not _is_launched(each, gpu))  # else in their order


def _is_launched(space: Space, gpu: GpuDescription) -> bool:
    """Whether calls launch its rung for its problems on the GPU."""
    with suppress(UnsupportedProblemError):
        return catalog.choice(space.problems[0], catalog.Card(gpu.arch, gpu))[0] == space.version
    return False


def _launched(rung: catalog.Version, kinds: Sequence[tuple[Problem, ...]]) -> Sequence[tuple[Problem, ...]]:
    """The kinds of problems for which calls may launch the rung; all of them, where they launch it for none."""
    of_rung = [each for each in catalog.ladder_of(rung.operation).launches if catalog.find(each.rung) == rung]
    chosen = [each for each in kinds if any(launch.holds(catalog.kind_of(each[0])) for launch in of_rung)] or kinds
    for problems in kinds:
        if problems not in chosen:
            warn(f"left out, {rung.address}: calls launch other rungs for {winners.name_of(problems[0])}")
    return chosen


def _settings(arguments: argparse.Namespace, operation: str) -> SearchSettings:
    from flashladder.tuner import candidates
    from flashladder.tuner.job import SearchSettings
    from flashladder.tuner.study_runner import ROUNDS

    return SearchSettings(
        trials=arguments.trials,
        seconds=60 * arguments.minutes,
        exhaustive=arguments.exhaustive,
        compiled=arguments.compile,
        spills=candidates.SPILLS if arguments.spills is None else arguments.spills,
        mode=arguments.mode or catalog.ladder_of(operation).search.mode,
        rounds=arguments.rounds or ROUNDS,
        seed=arguments.seed,
        strategy=arguments.strategy,
        study=arguments.study,
        storage=arguments.storage,
    )
