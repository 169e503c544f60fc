"""The stamped PTX of a rung as an artifact of its own, made by the same ptxas with the same options."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler import artifact as artifacts
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.compile import ptxas_command, without_flaws
from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.errors import BuildError
from flashladder.common.paths import AS_NAMES
from flashladder.common.studies.timeline.stamps import Site, stamp


@dataclass(frozen=True)
class StampedKernel:
    """A rung as it is, and the same with time stamps."""

    plain: Artifact
    artifact: Artifact
    sites: tuple[Site, ...]
    flaw: str = ""  # what ptxas made worse because of the stamps: spills, products that wait for each other


@contextmanager
def stamped(request: BuildRequest) -> Iterator[StampedKernel]:
    """Both builds; that with stamps is gone when the context ends. BuildError where one cannot be built."""
    (plain,) = build([request])
    made = stamp(plain)
    with tempfile.TemporaryDirectory(prefix="flashladder-timeline-") as folder:
        place = Path(folder) / plain.directory.name
        place.mkdir()
        (place / artifacts.PTX).write_text(made.ptx, errors=AS_NAMES)
        command = ptxas_command(request, toolchain())
        ptxas = subprocess.run(command, cwd=place, capture_output=True, errors=AS_NAMES)
        (place / artifacts.LOG).write_text(ptxas.stdout + ptxas.stderr, errors=AS_NAMES)
        if ptxas.returncode:
            raise BuildError(f"{request} cannot be built with time stamps:\n{ptxas.stderr.strip()}")
        artifacts.seal(artifacts.module(place, request.version, request.config, request.arch), 0.0)
        artifact = artifacts.load(place, cached=False)
        assert artifact is not None
        judged = without_flaws(request, artifact)
        yield StampedKernel(plain, artifact, made.sites, str(judged) if isinstance(judged, BuildError) else "")
