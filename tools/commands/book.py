"""The book: all pages of this checkout as a site that needs no network. It takes about a minute.

flashladder book                    makes build/book; open build/book/index.html in a browser
flashladder book --folder DIR       makes it elsewhere
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flashladder.common.console import Parser, aside, console, progress, warn
from flashladder.common.paths import ROOT

EXIT_WARNED = 1


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("--folder", type=Path, metavar="DIR", help="default: build/book")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.book import build

    with progress("pages") as update:
        built = build.build(arguments.folder or ROOT / "build" / "book", len(os.sched_getaffinity(0)), update)
    for warning in built.warnings:
        warn(warning)
    console.print(f"{built.pages} pages; open the first one in a browser:")
    aside(str(built.first))
    return EXIT_WARNED if built.warnings else 0
