"""The instructions in the main loop of every ladder's rungs, counted into results/sass_GPU.csv.gz: for the dashboard's
instruction mix, and for the book."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sass import read
from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import load_gpu
from flashladder.common.records import ladders, run_files
from flashladder.common.report import sass as show


def count(gpu: str, folder: Path, progress: Callable[[int, int, str], None] | None = None) -> Path:
    """Compiles and disassembles the rungs, each in its default configuration, for a GPU; gives the file.

    Kinds that the loop does not have are left out, and so are rungs that the GPU cannot run, or whose kernel does not
    build. ConfigError for an unknown GPU, ToolchainError without a compiler or a disassembler.
    """
    arch = load_gpu(gpu).arch
    rungs = [version for version in map(catalog.find, ladders.titles()) if _runs(version, arch)]
    requests = [BuildRequest(version, version.config(), arch) for version in rungs]
    built = build(requests, progress, on_error="return")
    every = (row for artifact in built if isinstance(artifact, Artifact) for row in show.rows(read(artifact)))
    rows = [row for row in every if row["loop"]]
    path = folder / f"sass_{gpu}.csv.gz"
    folder.mkdir(parents=True, exist_ok=True)
    run_files.write(path, pd.DataFrame(rows).to_csv(index=False).encode())
    return path


def _runs(version: Version, arch: str) -> bool:
    try:
        version.check_arch(arch)
    except ConfigError:
        return False
    return True
