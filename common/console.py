"""What a person sees: progress, and errors as one clear message. Every tool ends through `run`."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Column

from flashladder.common.errors import FlashLadderError, did_you_mean
from flashladder.common.escape import controls
from flashladder.common.packages import lack

PLAIN_WIDTH = 120  # of tables that go to a file or a pipe
BAR_WIDTH = 16  # so that count and time left stand in a line of 80 columns
MINUTE, HOUR, DAY = 60, 3600, 86400  # seconds
LINE_SECONDS = 20.0  # from one line of progress to the next there


def _is_terminal(stream: Any) -> bool:
    """False too of what programs put in the place of sys.stdout: None, a closed file, an object that can only write."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _width(stream: Any) -> int | None:
    return None if _is_terminal(stream) or "COLUMNS" in os.environ else PLAIN_WIDTH


class _Stderr(io.TextIOBase):
    """What sys.stderr is at the time. What it does not take is dropped: a note ends no computation."""

    def write(self, text: str) -> int:
        with suppress(AttributeError, OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(AttributeError, OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return _is_terminal(self._stream)

    @property
    def _stream(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # what a progress bar stands in for


class _Console(Console):
    """Shows control characters that a text holds, which to a terminal would be commands."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(controls(segment.text), segment.style)


# A name in brackets, as in flashladder[tuner], is no style: text is printed as it is, and styles are given apart.
console = _Console(highlight=False, markup=False, width=_width(sys.stdout), record=True)
errors = _Console(highlight=False, markup=False, width=_width(sys.stderr), file=cast(TextIO, _Stderr()))

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def duration(seconds: float) -> str:
    """About how long, in the unit that a person would use: 40 s, 12 min, 3 hours, 9 days."""
    for unit, length in (("days", DAY), ("hours", HOUR), ("min", MINUTE)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


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
            words = (re.sub("//.*", "//...", word) for word in unknown)  # of a URL, which may hold a password
            self.error(f"unrecognized arguments: {' '.join(words)}{meant}")
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
    errors.print("error:", style="bold red", end=" ")
    errors.print(message, soft_wrap=True)
    return EXIT_ERROR


def warn(message: str) -> None:
    """Something the user should know, on stderr."""
    errors.print("note:", style="yellow", end=" ")
    errors.print(message, soft_wrap=True)


def aside(message: str) -> None:
    """What matters less, such as where a file was written, on stdout."""
    console.print(message, style="dim", soft_wrap=True)


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
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn(
            "{task.fields[detail]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
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
        left = (now - begin) / (done - already) * (total - done)
        if left >= HOUR:
            return f"{duration(left)} left"
        minutes, seconds = divmod(round(left), 60)
        return f"{minutes}:{seconds:02} left"
