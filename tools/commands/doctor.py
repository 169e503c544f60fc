"""Says what this machine has and lacks, each lack with the command that mends it.

flashladder doctor

Exits with 0 when kernels can be compiled and run on the emulator, with 1 when something needed for that lacks.
"""

import argparse

from rich.text import Text

from flashladder.common.console import Parser, console, table
from flashladder.common.workshop.machine import FOR_A_GPU, NEEDED, OPTIONAL, examine


def parser() -> Parser:
    return Parser(__doc__)


def main(_: argparse.Namespace | None = None) -> int:
    report = table("FlashLadder on this machine", "", "what", "found", wrap=["found"])
    healthy = True
    for title, probes in (("Needed", NEEDED), ("For a GPU", FOR_A_GPU), ("Optional", OPTIONAL)):
        report.add_section()
        report.add_row("", f"[bold]{title}")
        for finding in examine(probes):
            lack = "[red]lacks" if title == "Needed" else "[yellow]lacks"
            report.add_row("[green]has" if finding.good else lack, finding.what, Text(finding.found, overflow="fold"))
            healthy &= finding.good or title != "Needed"
    console.print(report)
    return 0 if healthy else 1
