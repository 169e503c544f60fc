"""Profiles a rung: what the GPU counts in one launch, beside what the emulator counts and the machine code predicts."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sass.code import Code, read
from flashladder.common.compiler.sass.opcodes import kinds
from flashladder.common.errors import DeviceError
from flashladder.common.predict.agreement import Agreement, compare
from flashladder.common.predict.ncu import Profile, load, profile
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.records.log import Log, Schema
from flashladder.common.runtime.execute import on_emulator, on_gpu
from flashladder.common.runtime.gpu import require_gpu
from flashladder.common.runtime.target import Target

JOB = "job.json"  # beside ncu's pages: what was launched
_LAUNCHER = "import sys; from flashladder.common.predict.profiling import launch; launch(sys.argv[1])"
_WORDS = ("time", "commit", "device", "version", "config", "arch", "problem", "quantity", "opcode", "by")
_SCHEMA = Schema({**dict.fromkeys(_WORDS, str), **dict.fromkeys(("measured", "predicted", "deviation"), float)})


@dataclass(frozen=True)
class ProfiledRung:
    """One profiled rung."""

    code: Code
    problem: Problem
    profile: Profile
    agreements: list[Agreement]

    @property
    def time_us(self) -> float:
        """Time of the launch while it was profiled: caches are empty before it."""
        return self.metric("gpu__time_duration.sum") / 1000  # from nanoseconds

    @property
    def dram_bytes(self) -> float:
        return self.metric("dram__bytes_read.sum") + self.metric("dram__bytes_write.sum")

    @property
    def least_dram_bytes(self) -> float:
        """Each tensor once."""
        return self.problem.asked.bytes_moved(self.problem)

    def metric(self, name: str) -> float:
        """A metric of the whole kernel; NaN where ncu did not give it."""
        return self.profile.metrics.get(name, math.nan)

    def agreement(self, quantity: str, opcode: str) -> Agreement | None:
        """A figure and its prediction; None where there is none."""
        return next((a for a in self.agreements if (a.quantity, a.opcode) == (quantity, opcode)), None)

    def worst(self, quantity: str) -> float:
        """The greatest deviation of a quantity's predictions."""
        return max((a.deviation for a in self.agreements if a.quantity == quantity), key=abs, default=0.0)


def run(artifact: Artifact, problem: Problem, place: Target, pages: Path | None) -> ProfiledRung:
    """Profiles a kernel, or takes ncu's pages of it from a folder, and meanwhile emulates it on the same problem.

    The emulated grid is the GPU's.

    Raises DeviceError where there is neither a GPU nor pages, and ToolchainError without ncu.
    """
    code = read(artifact)
    with ExitStack() as stack:
        folder = pages / artifact.version if pages else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        counted = _kept(code, problem, folder)
        if counted is None and not place.on_gpu:
            raise DeviceError(_refusal(folder))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        report = pool.submit(
            on_emulator, artifact, problem, make_inputs(problem), race=False, num_sms=place.gpu.num_sms
        )
        counted = counted or _count(artifact, problem, folder)
        return ProfiledRung(code, problem, counted, compare(counted, report.result(), place.gpu))


def launch(job: str) -> None:
    """What ncu watches: one launch of the kernel and problem that a job names."""
    import torch

    named = json.loads(job)
    version = catalog.find(named["version"])
    artifact = build_one(version, version.parse_config(named["config"]), named["arch"])
    problem = Problem(**named["problem"])
    on_gpu(artifact, problem, make_inputs(problem, "cuda"))()
    torch.cuda.synchronize()


def log(rung: ProfiledRung) -> Path:
    """Adds a row for each figure to results/profile.csv, whose path it gives."""
    artifact = rung.code.artifact
    file = Log(catalog.results_of([catalog.find(artifact.version)]) / "profile.csv", _SCHEMA)
    what = {
        "time": records.now().isoformat(timespec="seconds"),
        "commit": records.commit(),
        "device": rung.profile.device,
        **_kernel(artifact),
        "problem": rung.problem.name,
    }
    file.append([{**what, **asdict(figure), "deviation": figure.deviation} for figure in rung.agreements])
    return file.path


def _kept(code: Code, problem: Problem, folder: Path) -> Profile | None:
    """The profile whose pages are in the folder; None where there is none, or one of another kernel or problem."""
    kept = folder / JOB
    if not kept.exists() or kept.read_text() != _job(code.artifact, problem):
        return None
    found = load(folder)
    is_same = [i.kind for i in found.instructions[: len(code.instructions)]] == kinds(code.instructions)
    return found if is_same else None


def _count(artifact: Artifact, problem: Problem, folder: Path) -> Profile:
    """A new profile, whose pages are left in the folder."""
    job = _job(artifact, problem)
    counted = profile([sys.executable, "-c", _LAUNCHER, job], folder, artifact.entry)
    (folder / JOB).write_text(job)
    return counted


def _job(artifact: Artifact, problem: Problem) -> str:
    return json.dumps({**_kernel(artifact), "problem": asdict(problem)})


def _kernel(artifact: Artifact) -> dict[str, str | None]:
    return {"version": artifact.version, "config": artifact.config.name, "arch": artifact.arch}


def _refusal(folder: Path) -> str:
    """Why there is nothing to profile on, and what would work."""
    has_others = (folder / JOB).exists()
    pages = f"{folder} holds pages of another kernel or problem" if has_others else "no pages are kept"
    try:
        require_gpu()
        reason = "the target is the emulator"
    except DeviceError as error:
        reason = str(error)
    return (
        f"ncu counts on a GPU, but {reason}, and {pages}. Profile where there is a GPU, with --pages FOLDER, and bring "
        "the folder here; what is predicted needs none: `flashladder sass`, and `flashladder run --device emulator`"
    )
