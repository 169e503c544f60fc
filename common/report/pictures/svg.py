"""Shapes and text as SVG, written so that the same picture is always the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

CELL = 22  # pixels of a square
INK, MUTED, PAPER, LINE = "#1c2024", "#60646c", "#ffffff", "#c8ccd4"
DARK = {INK: "#e8eaed", MUTED: "#9aa3ad", PAPER: "#161a20", LINE: "#2c323b"}  # what takes their place on a dark page
BAD, GOOD = "#c0392b", "#0b7a53"
# Eight that keep apart, for eight groups of banks, lanes or warps; light enough for dark text.
COLOURS = ("#8ecae6", "#ffd166", "#95d5b2", "#f4a3b5", "#cdb4db", "#ffb07c", "#bde0c8", "#c9d6df")
_STYLE = "font-family:ui-sans-serif,system-ui,'Segoe UI','DejaVu Sans',sans-serif"


class Svg:
    """A picture that grows as things are put into it. Coordinates are pixels from the top left.

    `dark` says which colours a dark page changes, and into what; without it the picture is light everywhere.
    """

    def __init__(self, title: str, dark: Mapping[str, str] | None = None) -> None:
        self._title = title
        self._dark = dark or {}
        self._parts: list[str] = []
        self._width = self._height = 0.0

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE, thickness: float = 1
    ) -> None:
        """A filled rectangle."""
        self._grow(x + width, y + height)
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{thickness:g}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: object,
        size: int = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text whose baseline begins, ends or is centred (start, end, middle) at a point."""
        words = str(words)
        self._grow(x + (len(words) * size * 0.56 if anchor == "start" else 0), y + size * 0.4)
        weight = ' font-weight="600"' if bold else ""
        attributes = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}'
        self._parts.append(f"<text {attributes}>{escape(words)}</text>")

    def bars(self, places: Sequence[tuple[float, float, float]], height: float, fill: str) -> None:
        """Many rectangles of one height and colour, each at a left, top and width."""
        for x, y, width in places:
            self._grow(x + width, y + height)
        path = "".join(f"M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z" for x, y, width in places)
        self._parts.append(f'<path d="{path}" fill="{fill}"/>')

    def cell(self, x: float, y: float, words: object, fill: str, stroke: str = LINE, thickness: float = 1) -> None:
        """A square with a word in its middle."""
        self.rect(x, y, CELL, CELL, fill, stroke, thickness)
        self.text(x + CELL / 2, y + CELL / 2 + 4, words, 11, anchor="middle")

    def heading(self, x: float, y: float, words: str) -> None:
        """What a part of the picture shows."""
        self.text(x, y, words, 14, bold=True)

    def legend(self, y: float, colours: Mapping[str, str], gap: int = 34) -> None:
        """What each colour means, in a line."""
        x = 16.0
        for words, colour in colours.items():
            self.rect(x, y, 11, 11, colour, "none")
            self.text(x + 16, y + 10, words, 11, MUTED)
            x += gap + 6.2 * len(words)

    def __str__(self) -> str:
        width, height = round(self._width + 16), round(self._height + 12)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'style="{_STYLE}" role="img">'
        )
        paper = f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>'
        return "\n".join(
            [head, f"<title>{escape(self._title)}</title>", *self._style(), paper, *self._parts, "</svg>", ""]
        )

    def _style(self) -> list[str]:
        """What a dark page changes, as CSS."""
        rules = "".join(
            f'[{name}="{light}"] {{ {name}: {dark} }} '
            for light, dark in self._dark.items()
            for name in ("fill", "stroke")
        )
        return [f"<style>@media (prefers-color-scheme: dark) {{ {rules}}}</style>"] if rules else []

    def _grow(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x), max(self._height, y)
