"""The pictures in versions/ and docs/, drawn from what the code does: layouts, lanes, loops, masks. No GPU needed.

flashladder picture             brings every picture up to date
flashladder picture layouts     those of layouts and loop orders; `loops`: those of machine code;
                                    `masks`: the map of docs/masks.md; `timelines`: those of results/timelines
flashladder picture terminal    README's pictures of what commands print, by running these; none of the others
flashladder picture --check     changes nothing, and fails where a picture is out of date
"""

from __future__ import annotations

import argparse
import os

from flashladder.common.console import Parser, console, progress, warn
from flashladder.common.errors import unknown
from flashladder.common.paths import ROOT

EXIT_STALE = 1


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument(
        "kinds", nargs="*", metavar="KIND", help="layouts, loops, masks, timelines (default: these), or terminal"
    )
    made.add_argument("--check", action="store_true", help="say what is out of date, and change nothing")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.report.pictures import gallery
    from flashladder.tools import terminal

    if arguments.kinds == ["terminal"]:
        for path in terminal.draw():
            console.print(os.path.relpath(path, ROOT))
        return 0
    kinds = {
        "layouts": gallery.drawn_layouts,
        "loops": gallery.machine_loops,
        "masks": gallery.mask_maps,
        "timelines": gallery.recorded_timelines,
    }
    for kind in arguments.kinds:
        if kind not in kinds:
            raise unknown("pictures", kind, kinds)
    pictures = [picture for kind in arguments.kinds or kinds for picture in kinds[kind]()]
    with progress("pictures") as update:
        states = {}
        for number, picture in enumerate(pictures, start=1):
            states[picture] = picture.is_current() if arguments.check else not picture.write()
            update(number, len(pictures))
    for picture, is_current in states.items():
        name = os.path.relpath(picture.path, ROOT)
        if is_current is None:
            warn(f"{name} shows what another compiler made, so it was not checked")
        elif not is_current:
            console.print(name, "is out of date" if arguments.check else "brought up to date")
    stale = sum(is_current is False for is_current in states.values())
    console.print(f"{stale} of {len(states)} pictures {'are' if arguments.check else 'were'} out of date")
    return EXIT_STALE if stale and arguments.check else 0
