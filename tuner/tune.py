"""The tuner in one call: what is searched, what tells how fast a configuration is, and how far to go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashladder.common.console import warn
from flashladder.common.errors import DeviceError
from flashladder.common.measure.timing import Mode
from flashladder.common.problem.config import GpuDescription
from flashladder.common.runtime import gpu as device
from flashladder.tuner import AUTO, campaign, job
from flashladder.tuner.job import Job, SearchSettings
from flashladder.tuner.space import Space
from flashladder.tuner.worker import Worker


@dataclass(frozen=True)
class Runner:
    """What tells how fast a configuration is on a GPU: workers, which measure, or without them the cost model."""

    gpu: GpuDescription
    workers: Sequence[Worker] = ()

    @classmethod
    def of(cls, gpu: GpuDescription, workers: str, mode: Mode, patience: float) -> Runner:
        """As many workers as are asked for. Where that is AUTO and there is no GPU, the cost model."""
        if workers == AUTO:
            try:
                device.require_gpu()
            except DeviceError as error:
                warn(f"{error}: configurations are ranked by the cost model, and nothing is measured")
                return cls(gpu)
        return cls(gpu, job.workers(workers, gpu, mode, patience))


def tune(spaces: Sequence[Space], runner: Runner, options: SearchSettings, seconds: float = math.inf) -> int:
    """Finds the best configuration of each space, one after the other; the exit code.

    What workers measured goes to configs/tuned, what the cost model ranks to results. Seconds: for all spaces.
    """
    if runner.workers and not options.compiled:
        parts = sum(len(space.problems) for space in spaces)
        options = replace(options, compiled=campaign.affordable(seconds, parts))
    jobs = [Job(space, runner.gpu, _own(space, options, spaces)) for space in spaces]
    if runner.workers:
        return campaign.run(jobs, runner.workers, seconds)
    return campaign.rank(jobs, seconds, options.exhaustive)


def _own(space: Space, options: SearchSettings, spaces: Sequence[Space]) -> SearchSettings:
    """The options of one space: of several rungs or kinds of problems, each has a study of its own."""
    if not options.study:
        return options
    words = [options.study]
    if len({each.version for each in spaces}) > 1:
        words.append(space.version.file_name)
    if len({each.kind for each in spaces}) > 1:
        words.append(space.words)
    return replace(options, study="-".join(words))
