"""What commands print, as pictures for README: real output, drawn by `flashladder picture terminal`."""

from __future__ import annotations

import io
import os
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from flashladder.common import catalog
from flashladder.common.console import console, errors
from flashladder.common.paths import ROOT
from flashladder.common.workshop import exercises

FOLDER = ROOT / "docs" / "pictures"
WIDTH = 100  # characters
INK, PAGE = (230, 233, 237), (22, 26, 32)
_COLOURS = [(60, 66, 76), (255, 138, 122), (61, 220, 151), (245, 176, 65), (94, 176, 255), (213, 154, 230)]
THEME = TerminalTheme(PAGE, INK, [*_COLOURS, (86, 220, 220), INK], [*_COLOURS, (86, 220, 220), INK])
_OTHERS = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)  # fonts of a server, which no picture may ask


def draw() -> Iterator[Path]:
    """Runs each command, and writes its picture."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        for name, words, prepare in COMMANDS:
            printed = _printed(words, prepare, results)
            path = FOLDER / f"{name}.svg"
            path.parent.mkdir(exist_ok=True)
            path.write_text(_picture(f"flashladder {' '.join(words)}", printed, name))
            yield path


def _picture(title: str, printed: Text, name: str) -> str:
    screen = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    screen.print(printed)
    drawn = screen.export_svg(title=title, theme=THEME, unique_id=name)
    return re.sub(r"[ \t]+$", "", _OTHERS.sub("", drawn), flags=re.MULTILINE) + "\n"


def _printed(words: list[str], prepare: Callable[[Path], None], results: Path) -> Text:
    """What a command prints, folded to the picture's width."""
    from flashladder.tools import commands

    before = Path.cwd()
    with _recorded(), _environment(FLASHLADDER_RESULTS=str(results), FLASHLADDER_VERSIONS=str(results / "mine")):
        os.chdir(results)
        try:
            prepare(results)
            commands.main(words)
        finally:
            os.chdir(before)
        said = console.export_text(styles=True) + errors.export_text(styles=True)
    lines = Text.from_ansi(said.replace(f"{results}{os.sep}", "")).split("\n")
    return Text("\n").join(_folded(line) for line in lines)


def _folded(line: Text) -> Text:
    """A long line in several, which begin further in."""
    if len(line) <= WIDTH:
        return line
    indent = " " * (len(line.plain) - len(line.plain.lstrip()) + 4)
    return Text(textwrap.fill(line.plain, WIDTH, subsequent_indent=indent, break_on_hyphens=False), line.style)


@contextmanager
def _recorded() -> Iterator[None]:
    console.export_text()  # forgets what was printed before
    width, file = console.width, console.file
    console.width, console.file, errors.record, errors.file = WIDTH, io.StringIO(), True, io.StringIO()
    try:
        yield
    finally:
        console.width, console.file, errors.record = width, file, False


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _no_rung(results: Path) -> None:
    (results / "mine").mkdir(exist_ok=True)


def _without_a_barrier(results: Path) -> None:
    """Rung 02 as a rung of one's own, one barrier of which is missing."""
    rung, made = catalog.find("02"), results / "mine" / "00_my_idea"
    made.mkdir(parents=True, exist_ok=True)
    for path in rung.directory.glob("*.cuh"):
        (made / path.name).write_text(path.read_text())
    (made / "version.yaml").write_text((rung.directory / "version.yaml").read_text())
    (made / "kernel.cu").write_text(rung.kernel.read_text().replace("__syncthreads();", "", 1))


def _half_an_idea(results: Path) -> None:
    """Exercise 02, with K and V swizzled and Q not."""
    folder = results / exercises.find("02").folder
    folder.mkdir(parents=True)
    kernel = catalog.find("01").kernel.read_text()
    (folder / "kernel.cu").write_text(kernel.replace("KVTile = RowMajor", "KVTile = Swizzled"))


COMMANDS: list[tuple[str, list[str], Callable[[Path], None]]] = [
    ("run", ["run", "02"], _no_rung),
    ("race", ["run", "mine/00"], _without_a_barrier),
    ("grade", ["exercise", "02", "--check"], _half_an_idea),
]
