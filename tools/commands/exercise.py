"""Exercises: a rung with its idea taken out, to be put in again. The emulator grades it, so no GPU is needed.

flashladder exercise                list the exercises
flashladder exercise 02             begin one: exercises/02 gets a kernel.cu and a TASK.md
flashladder exercise 02 --check     grade the kernel there: right, races, figures
flashladder exercise 02 --hint 1    the first hint
flashladder exercise mask           another kind: write a mask that costs fewer blocks of keys
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common.console import Parser, UsageError, aside, console
from flashladder.common.errors import ConfigError
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.report.answer import Findings
    from flashladder.common.workshop.exercises import Exercise

EXIT_UNSOLVED = 1


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("version", nargs="?", metavar="RUNG", help="02, or swizzling; without one: the list")
    made.add_argument("--check", action="store_true", help="grade the kernel; the exit code is 1 until it is solved")
    options.add_json(made)
    made.add_argument("--hint", type=int, metavar="N", help="show a hint: 1 is the vaguest, the last one the solution")
    made.add_argument("--folder", type=Path, metavar="FOLDER", help="where the kernel is (default: exercises/02)")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.workshop import exercises
    from flashladder.common.workshop.exercises import masks, page

    if arguments.json and not arguments.check:
        raise ConfigError("--json is for a grade: add --check")
    if arguments.version is None:
        if arguments.check or arguments.hint is not None:
            raise UsageError
        console.print(page.overview(exercises.exercises()))
        console.print(f"`flashladder exercise {masks.NAME}` is of no rung: write a mask that costs fewer blocks.")
        return 0
    if arguments.version == masks.NAME:
        return _of_masks(arguments)
    exercise = exercises.find(arguments.version)
    folder = arguments.folder or exercise.folder
    if arguments.hint is not None:
        return _hint(exercise, arguments.hint)
    return _check(exercise, folder, arguments.json) if arguments.check else _begin(exercise, folder)


def _of_masks(arguments: argparse.Namespace) -> int:
    from flashladder.common.report import masks as report
    from flashladder.common.workshop.exercises import masks

    if arguments.json:
        raise ConfigError(f"--json is for exercises of rungs: exercise {masks.NAME} has no kernel")
    if arguments.hint is not None:
        console.print(masks.hint(arguments.hint), highlight=False)
        return 0
    folder = arguments.folder or masks.FOLDER
    path = folder / masks.MASK
    if arguments.check and not path.is_file():
        raise ConfigError(f"there is no {path}: begin with `flashladder exercise {masks.NAME}`, or name its folder")
    with console.status("the mask is compiled, and its blocks are listed on the emulator"):
        found = masks.grade(path.read_text()) if arguments.check else masks.begin(folder)
    if not arguments.check:
        console.print((folder / masks.TASK).read_text(), soft_wrap=True)
    for part in report.terminal(found.own):
        console.print(part)
    if not arguments.check:
        console.print(f"Begin with {path}; the task is also in {folder / masks.TASK}.")
        return 0
    console.print(masks.verdict(found))
    return 0 if found.solved else EXIT_UNSOLVED


def _begin(exercise: Exercise, folder: Path) -> int:
    from flashladder.common.workshop.exercises import page

    with console.status("the start and the rung are compiled and run on the emulator"):
        start = page.begin(exercise, folder)
    console.print((folder / page.TASK).read_text(), soft_wrap=True)
    console.print(page.figures(start))
    console.print(f"Begin with {folder / page.KERNEL}; the task is also in {folder / page.TASK}.")
    return 0


def _check(exercise: Exercise, folder: Path, findings: Findings | None) -> int:
    from flashladder.common.workshop.exercises import grade, page

    kernel, address = folder / page.KERNEL, exercise.version.address
    if not kernel.is_file():
        raise ConfigError(
            f"there is no {kernel}: begin with `flashladder exercise {address}`, or name its folder by --folder"
        )
    with console.status("compiled and run on the emulator"):
        found = grade(exercise, kernel)
    if findings:
        findings.add([page.judged(found)], page.faults(found))
    console.print(page.verdict(found))
    console.print(page.figures(found))
    if not found.solved:
        console.print(f"A hint: `flashladder exercise {address} --hint 1`")
        return EXIT_UNSOLVED
    console.print(f"What it brings on a GPU: {exercise.version.directory / 'README.md'}")
    return 0


def _hint(exercise: Exercise, number: int) -> int:

    hints, address = exercise.hints, exercise.version.address
    if not 1 <= number <= len(hints):
        raise ConfigError(f"exercise {address} has the hints 1 to {len(hints)}, not {number}")
    console.print(hints[number - 1], highlight=False)
    if number < len(hints):
        aside(f"\nhint {number} of {len(hints)}; the next: `flashladder exercise {address} --hint {number + 1}`")
    return 0
