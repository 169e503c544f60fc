"""Find the configuration with which a rung of the ladder is fastest on a GPU.

flashladder search 16 --gpu h100                  one rung
flashladder search --gpu h100                     every rung that the GPU can run
flashladder search --gpu h100 --budget-seconds 360      the same, all in six minutes
flashladder search 16 --gpu h100 --seqlens 1024..8192 --causal both --trials 100
flashladder search 16 --gpu h100 --only block_m=128 ptxas_level=1,3      a part of the space
flashladder search 16 --gpu a100                  where no GPU is: ranked by the cost model, nothing measured

Every configuration is compiled first, on all cores; those with the same machine code are one kernel. Kernels are
checked, and timed beside official FlashAttention-2, in processes that are replaced when a kernel faults, hangs or is
wrong. Where there are few, all are measured; of many, those that TPE and the cost model ask for. The best are
measured again, together, and the winner goes to configs/tuned/GPU.yaml, where `flashladder run` finds it.

A winner is for short keys, fewer than 2,048, or for long ones, as the problems are; or for any length, where they are
of both. What runs takes the winner for its own length; without one that for any length, and then that for the other.

Where there is no GPU, configurations are compiled, and ranked by the cost model: for 60 seconds a rung, unless
--budget-seconds or --exhaustive says otherwise. A ranking of a part of a space is marked as partial.

A search or a ranking that was killed goes on where it was when it is started again. Several machines share a study
through a database: --storage postgresql://user:password@host/database. To watch: optuna-dashboard STORAGE.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import EXIT_ERROR, Parser, console, progress, warn
from flashladder.common.errors import ConfigError, DeviceError, UnsupportedProblemError
from flashladder.common.problem.config import GpuDescription, Value, field_named, gpu_names, load_gpu
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem
    from flashladder.tuner.job import Job, Ranking
    from flashladder.tuner.worker import Worker

AUTO = "auto"  # workers
POLL_SECONDS = 0.2
COMPILE_SECONDS = 3.0  # of one core, to compile a configuration and to rank it
NICE = 10  # of compiling, so that it takes no core from what is being measured


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("rungs", nargs="*", metavar="RUNG", help="default: all that the GPU can run")
    described = ", ".join(gpu_names())
    made.add_argument(
        "--gpu", required=True, metavar="NAME", help=f"what to tune for: {described}, or here: the GPU of this machine"
    )
    made.add_argument("--offline", action="store_true", help="rank by the cost model, as where there is no GPU")
    options.add_shapes(made, seqlens="4096")
    options.add_timing(made)
    made.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE[,VALUE]",
        help="search a part of the space: these values alone, or ptxas_level, which any rung takes",
    )
    budget = made.add_argument_group("budget of each rung")
    budget.add_argument("--trials", type=_count, metavar="N", help="kernels to measure, earlier searches' among them")
    budget.add_argument("--minutes", type=options.above_zero, default=math.inf, metavar="M", help="of measuring")
    budget.add_argument(
        "--budget-seconds",
        type=options.above_zero,
        default=math.inf,
        metavar="S",
        help="for all rungs together, in equal shares (default: no limit; without a GPU, 60 a rung)",
    )
    budget.add_argument(
        "--compile",
        type=_count,
        metavar="N",
        help="configurations, those first that are near to earlier winners (default: all, or what the budget allows)",
    )
    budget.add_argument("--exhaustive", action="store_true", help="measure every kernel; without a GPU, rank all")
    budget.add_argument("--spills", type=int, metavar="BYTES", help="that a thread may spill (default: 256)")
    study = made.add_argument_group("study")
    study.add_argument("--study", metavar="NAME", help="default: named after rung, GPU and problems")
    study.add_argument("--storage", metavar="URL", help="any of Optuna's (default: SQLite, results/tuning/studies.db)")
    study.add_argument("--workers", default=AUTO, metavar="N", help="that measure, one a GPU (default: all GPUs)")
    study.add_argument(
        "--patience", type=options.above_zero, default=60, metavar="S", help="until a kernel counts as hung"
    )
    return made


def main(arguments: argparse.Namespace) -> int:
    gpu = _gpu(arguments.gpu)
    versions = catalog.select(arguments.rungs)

    from flashladder.tuner import job

    operation = catalog.one_operation(version.operation for version in versions)
    offline = _is_offline(arguments)
    jobs = _jobs(versions, operation, gpu, arguments, offline)
    if offline:
        return rank(jobs, arguments.budget_seconds, arguments.exhaustive)
    workers = job.workers(arguments.workers, gpu, arguments.mode, arguments.patience, operation)
    return run(jobs, workers, arguments.budget_seconds)


def rank(jobs: Sequence[Job], seconds: float = math.inf, exhaustive: bool = False) -> int:
    """Rank the rungs by the cost model, one after the other, and go on where an earlier ranking ended.

    Seconds: for all of them, dealt out evenly; what one leaves is the others'. Without any, forecast.SECONDS a rung,
    and when it is exhaustive, as long as it takes.
    """
    from flashladder.tuner import forecast, show

    if math.isinf(seconds) and not exhaustive:
        seconds = forecast.SECONDS * len(jobs)
    ends = time.monotonic() + seconds
    for number, each in enumerate(jobs):
        found = each.forecast()
        share = (ends - time.monotonic()) / (len(jobs) - number)
        try:
            with progress(f"{each.space.version.name}: priced") as update:
                found.extend(share, each.settings.compiled, update)
        except KeyboardInterrupt:
            show.forecast(each, found)
            raise
        show.forecast(each, found)
    return 0


def run(jobs: Sequence[Job], workers: Sequence[Worker], seconds: float = math.inf) -> int:
    """Prepare and tune the rungs one after the other; the next ones are compiled while one is measured.

    Seconds: for all of them, dealt out evenly once the first is ranked; what one leaves is the others'.
    """
    from flashladder.tuner import show

    ends = time.monotonic() + seconds
    ledgers = [each.ledger() for each in jobs]
    ahead = _Ahead(jobs)
    failed = False
    try:
        if workers and jobs:
            _warm_up(workers, jobs[0].space.problems)
            ahead.wait_for(jobs[0])
        for number, (each, ledger) in enumerate(zip(jobs, ledgers, strict=True)):
            begin = time.monotonic()
            share = (ends - begin) / (len(jobs) - number)
            ranking = ahead.wait_for(each)
            console.print(show.stock(ranking.stock), markup=False, soft_wrap=True)
            try:
                final, effort = each.tune(ranking, workers, ledger, begin + share - time.monotonic())
            except KeyboardInterrupt:
                show.interrupted(each, ledger)
                raise
            failed |= final is None
            show.final(each, ledger, final, effort)
    finally:
        ahead.stop()
        for worker in workers:
            worker.stop()
        for ledger in ledgers:
            ledger.close()
    return EXIT_ERROR if failed else 0


def _is_offline(arguments: argparse.Namespace) -> bool:
    """Whether nothing will be measured: it was asked for, or there is no GPU, and workers were not asked for."""
    from flashladder.common.runtime.gpu import require_gpu

    if arguments.offline or arguments.workers != AUTO:
        return bool(arguments.offline)
    try:
        require_gpu()
    except DeviceError as error:
        warn(f"{error}: configurations are ranked by the cost model, and nothing is measured")
        return True
    return False


def _gpu(name: str) -> GpuDescription:
    """The GPU of that name, or that of this machine, which need not be described."""
    if name != "here":
        return load_gpu(name)

    from flashladder.common.runtime import target

    return target.resolve("gpu", None).gpu


def _warm_up(workers: Sequence[Worker], problems: Sequence[Problem]) -> None:
    """Have all processes that measure ready; meanwhile the first rung is compiled."""
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: worker.warm_up(problems), workers))


class _Ahead:
    """Prepares jobs in the background, one after the other."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._pool = ThreadPoolExecutor(1, initializer=os.nice, initargs=(NICE,))
        self._latest: tuple[int, int, str] = (0, 1, "")
        self._stopped = False
        self._futures: dict[str, Future[Ranking]] = {
            job.study: self._pool.submit(job.rank, self._relay) for job in jobs
        }

    def wait_for(self, job: Job) -> Ranking:
        """The job's ranking; a progress bar shows what there is to wait for."""
        future = self._futures[job.study]
        with progress(f"{job.space.version.name}: compiled and ranked") as update:
            while not future.done():
                update(*self._latest)
                time.sleep(POLL_SECONDS)
        return future.result()

    def stop(self) -> None:
        """Lets what is under way end, and begins nothing more."""
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)

    def _relay(self, done: int, total: int, detail: str) -> None:
        if self._stopped:
            raise KeyboardInterrupt
        self._latest = done, total, detail


def _jobs(
    versions: Sequence[catalog.Version],
    operation: str,
    gpu: GpuDescription,
    arguments: argparse.Namespace,
    offline: bool = False,
) -> list[Job]:
    """A job for each rung. One that was asked for by name must suit; of all, those that do not are left out."""
    from flashladder.tuner import candidates, job
    from flashladder.tuner.space import Space
    from flashladder.tuner.study_runner import ROUNDS

    problems = options.shapes(arguments, operation)
    only = dict(_values(text) for text in arguments.only)
    compiled = None if offline else affordable(arguments.budget_seconds, len(versions) * len(problems))
    jobs = []
    for version in versions:
        prefix = arguments.study
        settings = job.SearchSettings(
            trials=arguments.trials,
            seconds=60 * arguments.minutes,
            exhaustive=arguments.exhaustive,
            compiled=arguments.compile or compiled,
            spills=candidates.SPILLS if arguments.spills is None else arguments.spills,
            mode=arguments.mode,
            rounds=arguments.rounds or ROUNDS,
            seed=arguments.seed,
            study=f"{prefix}-{version.file_name}" if prefix and len(versions) > 1 else prefix,
            storage=arguments.storage,
        )
        try:
            version.check_arch(gpu.arch)
            jobs.append(job.Job(Space.of(version, problems, gpu, only), gpu, settings))
        except (ConfigError, UnsupportedProblemError) as refusal:
            if arguments.rungs:
                raise
            warn(f"left out: {refusal}")
    return jobs


def affordable(seconds: float, parts: int) -> int | None:
    """The configurations of one rung and problem that can be compiled and ranked in its part of the time."""
    cores = len(os.sched_getaffinity(0))
    return None if math.isinf(seconds) else max(1, int(seconds * cores / COMPILE_SECONDS / parts))


def _values(text: str) -> tuple[str, tuple[Value, ...]]:
    """A field and the values that 'block_n=64,128' gives it. Raises ConfigError."""
    name, equals, values = text.partition("=")
    if not equals:
        raise ConfigError(f"--only {text}: not a field and its values, such as block_n=64,128")
    return name, tuple(dict.fromkeys(field_named(name).parse(value) for value in values.split(",")))


def _count(text: str) -> int:
    if not text.isdigit() or text == "0":
        raise argparse.ArgumentTypeError(f"{text} is not a number of kernels, 1 or more")
    return int(text)
