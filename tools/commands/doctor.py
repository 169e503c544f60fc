"""Says what this machine has and lacks, each lack with the command that mends it.

flashladder doctor

Exits with 0 when kernels can be compiled and run on the emulator, with 1 when something needed for that lacks.
"""

import argparse

from rich.text import Text

from flashladder.common.console import Parser, console
from flashladder.common.report.tables import folding, table
from flashladder.common.workshop.machine import FOR_A_GPU, NEEDED, OPTIONAL, examine


def parser() -> Parser:
    return Parser(__doc__)


def main(_: argparse.Namespace | None = None) -> int:
    report = table("FlashLadder on this machine", ["", "what", *folding("found")])
    healthy = True
    for title, probes in (("Needed", NEEDED), ("For a GPU", FOR_A_GPU), ("Optional", OPTIONAL)):
        report.add_section()
        report.add_row("", Text(title, "bold"))
        for finding in examine(probes):
            lack = Text("lacks", "red" if title == "Needed" else "yellow")
            found = Text(finding.found, overflow="fold")
            report.add_row(Text("has", "green") if finding.good else lack, finding.what, found)
            healthy &= finding.good or title != "Needed"
    console.print(report)
    return 0 if healthy else 1
