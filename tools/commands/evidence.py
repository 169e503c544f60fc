"""The evidence in the READMEs of the rungs: what each changes against the one below, and what was tried. No GPU needed.

flashladder evidence            brings every README up to date, and versions/SPILLS.md
flashladder evidence 08 09      those of two rungs
flashladder evidence --check    changes nothing, and fails where a README is out of date
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.compiler import build
from flashladder.common.console import Parser, console, progress, warn

EXIT_STALE = 1


@dataclass(frozen=True)
class Page:
    """A document with a part that this tool writes."""

    name: str
    argument: str  # of this tool, for this page alone
    write: Callable[[], bool]
    is_current: Callable[[], bool | None]


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("versions", nargs="*", help="rungs, such as 08 or swizzling; default: all")
    made.add_argument("--check", action="store_true", help="say what is out of date, and change nothing")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.report import evidence, spills

    versions = catalog.select(arguments.versions)
    pages = [_page(version) for version in versions]
    requests = [request for version in versions for request in evidence.requests(version)]
    if not arguments.versions:
        pages.append(Page(spills.PAGE.name, "", spills.write, spills.is_current))
        requests += spills.requests()
    with progress("kernels compiled") as update:
        build(requests, update)
    return _check(pages) if arguments.check else _write(pages)


def _page(version: Version) -> Page:
    return Page(f"{version.name}/README.md", version.address, partial(_write_page, version), partial(_judge, version))


def _write_page(version: Version) -> bool:
    from flashladder.common.report import evidence
    from flashladder.common.workshop import tried

    return evidence.write(version) | tried.write(version)


def _judge(version: Version) -> bool | None:
    from flashladder.common.report import evidence
    from flashladder.common.workshop import tried

    return tried.is_current(version) and evidence.is_current(version)


def _write(pages: list[Page]) -> int:
    for page in pages:
        console.print(page.name, "brought up to date" if page.write() else "[dim]is up to date")
    return 0


def _check(pages: list[Page]) -> int:
    from flashladder.common.report import evidence

    states = {page: page.is_current() for page in pages}
    for page, is_current in states.items():
        if is_current is None:
            warn(f"{page.name} was made with another compiler than {evidence.compiler()}, so it was not checked")
        elif not is_current:
            mends = f"flashladder evidence {page.argument}".strip()
            console.print(f"{page.name} is out of date; `{mends}` mends it")
    stale = [page for page, is_current in states.items() if is_current is False]
    console.print(f"{len(stale)} of {len(states)} READMEs are out of date")
    return EXIT_STALE if stale else 0
