"""Tables from columns and rows: for the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from flashladder.common import escape
from flashladder.common.escape import Markdown

Rows = Iterable[Sequence[object]]


class Number(str):
    """The head of a column of figures, which stand at the right."""


class Folding(str):
    """The head of a column of words, which take more lines where there is no room."""


def numbers(*names: object) -> list[str]:
    """Columns of figures."""
    return [Number(name) for name in names]


def folding(*names: str) -> list[str]:
    """Columns of words that fold."""
    return [Folding(name) for name in names]


def table(title: str, columns: Sequence[str], rows: Rows = (), caption: str | None = None) -> Table:
    """A table for the terminal. A cell is None for nothing, a Text, or what spells itself."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="", box=box.SIMPLE_HEAD)
    made.caption, made.caption_justify = caption, "left"
    for head in columns:
        folds = isinstance(head, Folding)
        side: JustifyMethod = "right" if isinstance(head, Number) else "left"
        made.add_column(head, justify=side, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    for cells in rows:
        made.add_row(*(cell if isinstance(cell, Text) else _spelled(cell) for cell in cells))
    return made


def styled(style: str, cells: Iterable[object]) -> list[Text]:
    """The cells of a row in a style."""
    return [Text(_spelled(cell), style) for cell in cells]


def facts(title: str, values: Mapping[str, str | Text]) -> Table:
    """Names and values, for the terminal. A value is a Text or plain: its brackets are no markup."""
    made = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=box.SIMPLE)
    made.add_column(style="cyan", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values.items():
        made.add_row(name, value if isinstance(value, Text) else Text(value))
    return made


def markdown(columns: Sequence[str], rows: Rows) -> Markdown:
    """A table in Markdown; short rows end with empty cells. Cells and heads are text, unless they are Markdown."""
    lines: list[Sequence[object]] = [columns, ["---:" if isinstance(head, Number) else "---" for head in columns]]
    lines += [[*cells, *[""] * (len(columns) - len(cells))] for cells in rows]
    return Markdown("\n".join(f"| {' | '.join(map(escape.markdown, cells))} |" for cells in lines))


def _spelled(cell: object) -> str:
    return "" if cell is None else str(cell)
