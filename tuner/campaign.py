"""Spaces searched or ranked one after the other, in the time that there is for all."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from flashladder.common.console import EXIT_ERROR, console, progress, warn
from flashladder.common.errors import DeviceError
from flashladder.common.measure.timing import Mode
from flashladder.common.problem.config import GpuDescription
from flashladder.common.problem.problem import Problem
from flashladder.common.report.answer import Findings
from flashladder.common.runtime import gpu as device
from flashladder.tuner import AUTO, forecast, job, show
from flashladder.tuner.job import Job, Ranking, SearchSettings
from flashladder.tuner.space import Space
from flashladder.tuner.worker import Worker

POLL_SECONDS = 0.2
COMPILE_SECONDS = 3.0  # of one core, to compile a configuration and to rank it
NICE = 10  # of compiling, so that it takes no core from what is being measured


def find_workers(number: str, gpu: GpuDescription, mode: Mode, patience: float) -> list[Worker]:
    """As many workers as are asked for; where that is AUTO and there is no GPU none, which is told."""
    if number == AUTO:
        try:
            device.require_gpu()
        except DeviceError as error:
            warn(f"{error}: configurations are ranked by the cost model, and nothing is measured")
            return []
    return job.workers(number, gpu, mode, patience)


def tune(
    spaces: Sequence[Space],
    gpu: GpuDescription,
    workers: Sequence[Worker],
    options: SearchSettings,
    seconds: float = math.inf,
    findings: Findings | None = None,
) -> int:
    """Finds the best configuration of each space, one after the other; the exit code.

    What workers measured goes to configs/tuned. Without workers the cost model ranks, and its ranking goes to results.
    Seconds: for all spaces. Findings: what programs are told is added to them.
    """
    if workers and not options.compiled:
        parts = sum(len(space.problems) for space in spaces)
        options = replace(options, compiled=affordable(seconds, parts))
    jobs = [Job(space, gpu, own_study(space, options, spaces)) for space in spaces]
    if workers:
        return run(jobs, workers, seconds, findings)
    return rank(jobs, seconds, options.exhaustive, findings)


def own_study(space: Space, options: SearchSettings, spaces: Sequence[Space]) -> SearchSettings:
    """The options of one space: of several rungs or kinds of problems, each has a study of its own."""
    if not options.study:
        return options
    words = [options.study]
    if len({each.version for each in spaces}) > 1:
        words.append(space.version.file_name)
    if len({each.kind for each in spaces}) > 1:
        words.append(space.words)
    return replace(options, study="-".join(words))


def rank(
    jobs: Sequence[Job], seconds: float = math.inf, exhaustive: bool = False, findings: Findings | None = None
) -> int:
    """Rank the rungs by the cost model, one after the other, and go on where an earlier ranking ended.

    Seconds: for all of them, dealt out evenly; what one leaves is the others'. Without any, forecast.SECONDS a rung,
    and when it is exhaustive, as long as it takes.
    """
    if math.isinf(seconds) and not exhaustive:
        seconds = forecast.SECONDS * len(jobs)
    ends = time.monotonic() + seconds
    for number, each in enumerate(jobs):
        show.begins(jobs, number, ends - time.monotonic())
        found = each.forecast()
        share = (ends - time.monotonic()) / (len(jobs) - number)
        try:
            with progress(f"{each.space.version.name}: priced") as update:
                found.extend(share, each.settings.compiled, update)
        except KeyboardInterrupt:
            show.forecast(each, found)
            raise
        show.forecast(each, found)
        if findings:
            findings.add(show.forecast_answer(each, found))
    return 0


def run(
    jobs: Sequence[Job], workers: Sequence[Worker], seconds: float = math.inf, findings: Findings | None = None
) -> int:
    """Prepare and tune the rungs one after the other; the next ones are compiled while one is measured.

    Seconds: for all of them, dealt out evenly once the first is ranked; what one leaves is the others'.
    """
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
            show.begins(jobs, number, ends - begin)
            ranking = ahead.wait_for(each)
            console.print(show.stock(ranking.stock), soft_wrap=True)
            try:
                final, effort = each.tune(ranking, workers, ledger, begin + share - time.monotonic())
            except KeyboardInterrupt:
                show.interrupted(each, ledger)
                raise
            failed |= final is None
            show.final(each, ledger, final, effort)
            if findings:
                findings.add(*show.final_answer(each, final))
    finally:
        ahead.stop()
        for worker in workers:
            worker.stop()
        for ledger in ledgers:
            ledger.close()
    return EXIT_ERROR if failed else 0


def affordable(seconds: float, parts: int) -> int | None:
    """The configurations of one rung and problem that can be compiled and ranked in its part of the time."""
    cores = len(os.sched_getaffinity(0))
    return None if math.isinf(seconds) else max(1, int(seconds * cores / COMPILE_SECONDS / parts))


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
