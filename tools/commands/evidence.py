"""The evidence of the rungs: what each changes against the one below, and what was tried. No GPU needed.

flashladder evidence            brings every evidence.md and page up to date, and versions/SPILLS.md
flashladder evidence 08 09      those of two rungs
flashladder evidence --check    changes nothing, and fails where a file is out of date
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.compiler import build
from flashladder.common.console import Parser, console, progress, warn

if TYPE_CHECKING:
    from flashladder.common.catalog import Version
    from flashladder.common.report.sections import Section

    Pages = dict[str, list[Section]]  # by what names the rung to this tool; empty for the page of several

EXIT_STALE = 1


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("versions", nargs="*", help="rungs, such as 08 or swizzling; default: all")
    made.add_argument("--check", action="store_true", help="say what is out of date, and change nothing")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.report.pages import evidence, spills

    versions = catalog.select(arguments.versions)
    pages = {version.address: _sections(version) for version in versions}
    requests = [request for version in versions for request in evidence.requests(version)]
    if not arguments.versions:
        pages[""] = [spills.section()]
        requests += spills.requests()
    with progress("kernels compiled") as update:
        build(requests, update)
    return _check(pages) if arguments.check else _write(pages)


def _sections(version: Version) -> list[Section]:
    """What tools write of a rung; nothing on a page that is not there yet."""
    from flashladder.common.report.pages import evidence, steps
    from flashladder.common.workshop import tried

    of_page = [section for section in (steps.section(version),) if section.has_place]
    return [evidence.section(version), *tried.sections_of(version), *of_page]


def _write(pages: Pages) -> int:
    for sections in pages.values():
        is_changed = sum(section.write() for section in sections) > 0
        console.print(_name(sections), "brought up to date" if is_changed else "is up to date")
    return 0


def _check(pages: Pages) -> int:
    from flashladder.common.report.sections import compiler

    stale = 0
    for argument, sections in pages.items():
        states = [section.is_current() for section in sections]
        if False in states:
            stale += 1
            mends = f"flashladder evidence {argument}".strip()
            console.print(f"{_name(sections)} is out of date; `{mends}` mends it")
        elif None in states:
            warn(f"{_name(sections)} was made with another compiler than {compiler()}, so it was not checked")
    console.print(f"{stale} of {len(pages)} rungs and pages are out of date")
    return EXIT_STALE if stale else 0


def _name(sections: Sequence[Section]) -> str:
    path = sections[0].path
    return f"{path.parent.name}/{path.name}"
