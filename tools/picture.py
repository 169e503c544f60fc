"""The pictures in versions/, drawn from what the code does: layouts, lanes, loop orders, machine code. No GPU needed.

python tools/picture.py             brings every picture up to date
python tools/picture.py layouts     those of layouts and loop orders; `loops`: those of machine code
python tools/picture.py --check     changes nothing, and fails where a picture is out of date
"""

from __future__ import annotations

import argparse
import sys

try:
    from flashladder.common.console import Parser, console, exit_with, progress, warn
    from flashladder.common.errors import ConfigError
    from flashladder.common.paths import ROOT
    from flashladder.common.pictures import gallery
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/python tools/picture.py`")

EXIT_STALE = 1
KINDS = {"layouts": gallery.drawn_layouts, "loops": gallery.machine_loops}


def parser() -> Parser:
    """The options."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    made = Parser(summary, epilog=examples)
    made.add_argument("kinds", nargs="*", metavar="KIND", help="layouts or loops; default: both")
    made.add_argument("--check", action="store_true", help="say what is out of date, and change nothing")
    return made


def main(arguments: argparse.Namespace) -> int:
    for kind in arguments.kinds:
        if kind not in KINDS:
            raise ConfigError(f"no pictures {kind}; there are {', '.join(KINDS)}")
    pictures = [picture for kind in arguments.kinds or KINDS for picture in KINDS[kind]()]
    with progress("pictures") as update:
        states = {}
        for number, picture in enumerate(pictures, start=1):
            states[picture] = picture.is_current() if arguments.check else not picture.write()
            update(number, len(pictures))
    for picture, is_current in states.items():
        name = picture.path.relative_to(ROOT)
        if is_current is None:
            warn(f"{name} shows what another compiler made, so it was not checked")
        elif not is_current:
            console.print(name, "is out of date" if arguments.check else "brought up to date")
    stale = sum(is_current is False for is_current in states.values())
    console.print(f"{stale} of {len(states)} pictures {'are' if arguments.check else 'were'} out of date")
    return EXIT_STALE if stale and arguments.check else 0


if __name__ == "__main__":
    exit_with(main, parser())
