"""What is searched for one program: a job for each rung and kind of its problems, and what the cost model expects."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.target import Target
from flashladder.tuner import AUTO, campaign, job
from flashladder.tuner.adopt.demand import Alike, least_us, stand_in
from flashladder.tuner.adopt.gains import Choose
from flashladder.tuner.adopt.tables import Prediction
from flashladder.tuner.job import Job, SearchSettings
from flashladder.tuner.space import Space

TUNED_WITH = 2  # problems of a kind, the heaviest
PATIENCE = 60.0  # seconds, until a kernel counts as hung


def jobs(choose: Choose, alike: Sequence[Alike], place: Target, folder: Path, seconds: float) -> list[Job]:
    """A search for each rung and kind of problems, those first that should take most of the time."""
    kinds: dict[tuple[str, str], list[Problem]] = {}
    for each in alike:
        kinds.setdefault((choose(each.problem).name, each.kind), []).append(stand_in(each.problem))
    compiled = campaign.affordable(seconds, TUNED_WITH * len(kinds)) if place.on_gpu else None
    found = []
    for (name, kind), members in kinds.items():
        rung = catalog.find(name)
        problems = tuple(dict.fromkeys(members))[:TUNED_WITH]
        made = Job(Space.of(rung, problems, place.gpu), place.gpu, SearchSettings(compiled=compiled), folder)
        digest = hashlib.sha256(str(made.identity()).encode()).hexdigest()[:8]  # other sources are another study
        words = "-".join(part.partition("=")[2] for part in kind.split(","))
        study = f"adopt-{rung.file_name}-{place.gpu.name}-{words}-{digest}"
        found.append(replace(made, settings=replace(made.settings, study=study)))
    return found


def tune(searches: Sequence[Job], place: Target, seconds: float) -> int:
    """Searches on all GPUs of this machine; the exit code tells whether each found a winner."""
    return campaign.run(searches, job.workers(AUTO, place.gpu, "hot", PATIENCE), seconds)


def predictions(ranked: Sequence[Job], alike: Sequence[Alike]) -> list[Prediction]:
    """What the program would gain by the best of each ranking."""
    least = {each: each.weight * least_us(each.problem, ranked[0].gpu) for each in alike}
    made = []
    for search in ranked:
        found, kind = search.forecast(), winners.name_of(search.space.problems[0])
        if found.kernels and (default := found.prices.get(search.space.default)):
            share = sum(time for each, time in least.items() if each.kind == kind) / sum(least.values())
            best = found.kernels[0][0]
            made.append(Prediction(kind, share, default.predicted_us, best.predicted_us, found.extent))
    return made
