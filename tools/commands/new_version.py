"""Make a new rung from another: kernel.cu, version.yaml and README.md. All tools take it up by themselves.

flashladder new my_idea --from 24              the next rung of the ladder of rung 24
flashladder new my_idea --from 24 --private    in a ladder of one's own, which git does not track
flashladder new again --from 37 --private --patch FILE    what was tried on rung 37, from its tried/

Then edit its kernel.cu beside `flashladder run my_idea --watch`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashladder.common.console import Parser, console
from flashladder.common.report.tables import facts


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("name", help="in lower case: my_idea")
    made.add_argument("--from", dest="parent", required=True, metavar="RUNG", help="what it begins as, such as 24")
    made.add_argument(
        "--private", action="store_true", help="in the first ladder of --versions, or else in versions/private"
    )
    made.add_argument("--patch", type=Path, metavar="FILE", help="of a rung's tried/: what was tried, again")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.workshop import scaffold

    version = scaffold.make(arguments.name, arguments.parent, arguments.private, arguments.patch)
    name, parent = version.directory.name[3:], version.below()
    assert parent is not None
    files = {
        "kernel.cu": f"the kernel of {version.parent}: change it",
        "version.yaml": f"what it is: fill in `title`, `idea`, `addresses`; at last delete `{scaffold.DRAFT}`",
        "README.md": f'its page: replace what begins with "{scaffold.OPEN}"',
    }
    console.print(facts(f"{version.name} in {version.directory}", files))
    where = "".join(f" --versions {folder}" for folder in arguments.own_ladders)
    for trial in (f"--watch{where}      a trial at every save", f"--against {parent.address}{where}      the verdict"):
        console.print(f"flashladder run {name} {trial}", soft_wrap=True)
    return 0
