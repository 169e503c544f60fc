"""What a person sees: tables, progress, and errors as one clear message. Every tool ends through `run`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from flashladder.common.errors import FlashLadderError, did_you_mean
from flashladder.common.packages import lack

PLAIN_WIDTH = 120  # of tables that go to a file or a pipe
BAR_WIDTH = 16  # so that count and time left stand in a line of 80 columns
LINE_SECONDS = 20.0  # from one line of progress to the next there


def _width(stream: TextIO) -> int | None:
    return None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH


console = Console(highlight=False, width=_width(sys.stdout), record=True)
errors = Console(highlight=False, width=_width(sys.stderr), stderr=True)

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


class UsageError(Exception):
    """The arguments ask for nothing that can be done: the help says what could be asked for."""


class Parser(argparse.ArgumentParser):
    """An argument parser with the options that every tool has; the tool's docstring gives its texts."""

    def __init__(self, doc: str | None) -> None:
        summary, _, rest = (doc or "").partition("\n\n")
        # an option is not guessed from its beginning: --seqlen is not --seqlens
        super().__init__(
            description=summary,
            epilog=rest,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--traceback", action="store_true", help="show where an error comes from")
        self.add_argument(
            "--versions",
            dest="own_ladders",
            action="append",
            default=[],
            metavar="DIR",
            help="a ladder of one's own to search too (also: FLASHLADDER_VERSIONS=DIR:DIR)",
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; of an unknown option it says which one is like it."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            meant = "".join(did_you_mean(option, self._option_string_actions) for option in options[:1])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        if parsed.own_ladders:
            from flashladder.common import own

            own.add(parsed.own_ladders)
        return parsed


def run(main: Callable[[argparse.Namespace], int], parser: Parser, argv: Sequence[str] | None = None) -> int:
    """Parse, run and return the exit code: 2 with one message on stderr for an error that the user can mend."""
    arguments = parser.parse_args(argv)
    try:
        return main(arguments)
    except UsageError:
        parser.print_help()
        return EXIT_ERROR
    except (FlashLadderError, OSError, ModuleNotFoundError) as error:  # OSError: a file is not there, for example
        if arguments.traceback:
            errors.print_exception()
        return fail(lack(error) if isinstance(error, ModuleNotFoundError) else str(error))
    except KeyboardInterrupt:
        if arguments.traceback:
            errors.print_exception()
        errors.print("\ninterrupted")
        return EXIT_INTERRUPTED


def fail(message: str) -> int:
    """Says on stderr what went wrong; the exit code of that."""
    errors.print("[bold red]error:[/]", end=" ")
    errors.print(message, markup=False, soft_wrap=True)
    return EXIT_ERROR


def table(title: str, *columns: str, right: Sequence[str] = (), wrap: Sequence[str] = ()) -> Table:
    """An empty table; the columns in `right` hold figures, those in `wrap` fold where there is no room."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="", box=box.SIMPLE_HEAD)
    for column in columns:
        folds = column in wrap
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    return made


def facts(title: str, values: Mapping[str, str | Text]) -> Table:
    """A table of names and values."""
    made = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=box.SIMPLE)
    made.add_column(style="cyan", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values.items():
        made.add_row(name, value)
    return made


def warn(message: str) -> None:
    """Something the user should know, on stderr."""
    errors.print("[yellow]note:[/]", end=" ")
    errors.print(message, markup=False, soft_wrap=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr that vanishes when done: call it with (done, total) or (done, total, detail).

    Where stderr is no terminal, a line now and then instead.
    """
    pace = _Pace()
    if not errors.is_terminal:
        yield _lines(what, pace)
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(BAR_WIDTH),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[detail]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    ]
    with Progress(*columns, console=errors, transient=True, expand=True) as bar:
        task = bar.add_task(what, total=None, left="", detail="")

        def update(done: int, total: int, detail: str = "") -> None:
            bar.update(task, completed=done, total=total, left=pace.left(done, total), detail=detail)

        yield update


def _lines(what: str, pace: _Pace) -> Callable[..., None]:
    said = time.monotonic()

    def update(done: int, total: int, detail: str = "") -> None:
        nonlocal said
        left = pace.left(done, total)
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            errors.print(" ".join(filter(None, (f"{what} {done} of {total}", left, detail))), soft_wrap=True)

    return update


class _Pace:
    """How long the rest takes, by what was done since the first look."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def left(self, done: int, total: int) -> str:
        """In words, "1:05 left"; empty where nothing is known."""
        now = time.monotonic()
        begin, already = self._first = self._first or (now, done)
        if not already < done < total:
            return ""
        minutes, seconds = divmod(round((now - begin) / (done - already) * (total - done)), 60)
        return f"{minutes}:{seconds:02} left"
