"""Kernels that were compiled when the package was: for machines that have no compiler. See common/runtime/ahead.py.

Each is a folder of PREBUILT, named after all that decides its machine code but the compiler: the sources, the
configuration, the arch and the flags. So a kernel of other sources is not found. It has no PTX: the emulator needs a
compiler.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from flashladder.common import trust
from flashladder.common.catalog import Version
from flashladder.common.compiler import artifact as artifacts
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.compile import BuildRequest, build, folder_name
from flashladder.common.compiler.sources import Sources
from flashladder.common.console import warn
from flashladder.common.paths import PREBUILT, adopted_dir
from flashladder.common.problem.config import KernelConfig

KERNELS = "kernels"  # of a folder that a program adopted


def find(version: Version, config: KernelConfig, arch: str) -> Artifact | None:
    """The kernel that a program adopted, or that the package has; None without.

    One that is damaged, or is not what its folder says, is named and not used. ConfigError where others can write what
    was adopted.
    """
    request = BuildRequest(version, config, arch, lines=False)
    name = folder_name(request, Sources())
    homes = [adopted / KERNELS, PREBUILT] if (adopted := adopted_dir()) else [PREBUILT]
    place = next((home / name for home in homes if (home / name).exists()), None)
    if place is None:
        return None
    if adopted and place.parent != PREBUILT:  # whoever can write that can write this package too
        trust.check(place, adopted)
    found = artifacts.load(place, cached=True, files=[artifacts.CUBIN])
    if found is None:
        warn(f"{place} is damaged, and is not used: install flashladder again, or adopt again")
        return None
    if (found.version, found.config, found.arch, found.operation) != (version.name, config, arch, version.operation):
        warn(f"{place} is {found.version} with {found.config} for {found.arch}, not {request}, and is not used")
        return None
    return found


def missing(folder: Path, requests: Iterable[BuildRequest]) -> list[BuildRequest]:
    """The kernels that a folder does not have, or has damaged."""
    sources = Sources()
    return [
        request
        for request in requests
        if artifacts.load(folder / folder_name(request, sources), cached=True, files=[artifacts.CUBIN]) is None
    ]


def compile_into(folder: Path, requests: Iterable[BuildRequest]) -> list[Path]:
    """Compiles kernels into a folder that is to become PREBUILT; BuildError where one does not build."""
    wanted, sources = list(requests), Sources()
    places = [folder / folder_name(request, sources) for request in wanted]
    for place, made in zip(places, build(wanted), strict=True):
        shutil.rmtree(place, ignore_errors=True)
        artifacts.copy_machine_code(made, place)
    return places
