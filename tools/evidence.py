"""The evidence in the READMEs of the rungs: what each changes against the one below. No GPU needed.

python tools/evidence.py            brings every README up to date
python tools/evidence.py 08 09      those of two rungs
python tools/evidence.py --check    changes nothing, and fails where a README is out of date
"""

from __future__ import annotations

import argparse
import sys

try:
    from flashladder.common import catalog
    from flashladder.common.build import build
    from flashladder.common.catalog import Version
    from flashladder.common.console import Parser, console, exit_with, progress, warn
    from flashladder.common.report import evidence
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/python tools/evidence.py`")

EXIT_STALE = 1


def parser() -> Parser:
    summary, _, examples = (__doc__ or "").partition("\n\n")
    made = Parser(summary, epilog=examples)
    made.add_argument("versions", nargs="*", help="rungs, such as 08 or swizzling; default: all")
    made.add_argument("--check", action="store_true", help="say what is out of date, and change nothing")
    return made


def main(arguments: argparse.Namespace) -> int:
    versions = [catalog.find(name) for name in arguments.versions] or list(catalog.versions())
    with progress("kernels compiled") as update:
        build([request for version in versions for request in evidence.requests(version)], update)
    return _check(versions) if arguments.check else _write(versions)


def _write(versions: list[Version]) -> int:
    for version in versions:
        changed = evidence.write(version)
        console.print(f"{version.name}/README.md", "brought up to date" if changed else "[dim]is up to date")
    return 0


def _check(versions: list[Version]) -> int:
    states = {version.name: evidence.is_current(version) for version in versions}
    for name, is_current in states.items():
        if is_current is None:
            warn(f"{name}/README.md was made with another compiler than {evidence.compiler()}, so it was not checked")
        elif not is_current:
            console.print(f"{name}/README.md is out of date; `python tools/evidence.py {name[:2]}` mends it")
    stale = [name for name, is_current in states.items() if is_current is False]
    console.print(f"{len(stale)} of {len(states)} READMEs are out of date")
    return EXIT_STALE if stale else 0


if __name__ == "__main__":
    exit_with(main, parser())
