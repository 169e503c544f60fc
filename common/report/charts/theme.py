"""One look for every picture: colours by role, light and dark, and matplotlib figures as small SVG in either."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from flashladder.common.escape import controls
from flashladder.common.report.templating import render

# What a colour is for, with its light and its dark value. The categories keep apart for colour-blind eyes (Okabe, Ito).
PALETTE = {
    "ink": ("#1c2024", "#e8eaed"),
    "muted": ("#60646c", "#9aa3ad"),
    "grid": ("#e3e5ea", "#2c323b"),
    "surface": ("#ffffff", "#161a20"),
    "page": ("#f6f7f9", "#0d1117"),
    "own": ("#0066c2", "#5eb0ff"),
    "fixed": ("#d97a00", "#f5b041"),
    "official": ("#7a2e8e", "#d59ae6"),
    "cudnn": ("#00866b", "#2bc79a"),
    "fa3": ("#c2185b", "#ff7aa8"),
    "triton": ("#8a6d00", "#e0c341"),
    "cute": ("#5f6b7a", "#a9b4c0"),
    "good": ("#0b7a53", "#3ddc97"),
    "bad": ("#c0392b", "#ff8a7a"),
    "tensor": ("#0072b2", "#56b4e9"),
    "fma": ("#009e73", "#2bc79a"),
    "alu": ("#d55e00", "#ff9a5c"),
    "mufu": ("#b3578f", "#e29ac4"),
    "lsu": ("#c99700", "#f0d04a"),
    "other": ("#9aa0a8", "#6b7480"),
}
SCHEMES = ("light", "dark")
CODE = Path(__file__)  # decides how charts look

_FONTS = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_TIP = "tip:"
_BREAK = "&#10;"  # a line break, which an attribute would lose
_P = ParamSpec("_P")


def colour(role: str) -> str:
    """What stands for a role's colour in matplotlib, until the picture is written."""
    return f"#fe{list(PALETTE).index(role):02x}ed"


def custom_properties(scheme: str) -> str:
    """The colours of a scheme as CSS custom properties."""
    return " ".join(f"--{role}: {values[SCHEMES.index(scheme)]};" for role, values in PALETTE.items())


def tip(artist: Artist, text: str) -> None:
    """What the page shows when a reader points at the artist."""
    artist.set_gid(_TIP + text.replace("\n", _BREAK))


def figure(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Makes a function that draws a matplotlib figure draw it in this look. One unit is one CSS pixel."""

    @wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with mpl.rc_context(_style()):
            return draw(*args, **kwargs)

    return styled


def pixels(width: float, height: float) -> Figure:
    """An empty figure of this size."""
    return Figure(figsize=(width / 72, height / 72))


def inline_svg(drawn: Figure, name: str, title: str) -> str:
    """The figure for a page that defines the custom properties: it follows the page's scheme."""
    return _svg(drawn, name, title, lambda role: f"var(--{role})")


@dataclass(frozen=True)
class Chart:
    """A figure as files that stand alone, one a scheme: NAME.svg and NAME_dark.svg."""

    path: Path  # the light one
    title: str
    draw: Callable[[], Figure]
    made_from: str = ""  # tells of what it was drawn; the file keeps that

    @property
    def files(self) -> dict[str, Path]:
        """By scheme."""
        return {"light": self.path, "dark": self.path.with_stem(f"{self.path.stem}_dark")}

    def is_current(self) -> bool:
        """Whether both files were made from the same."""
        note = f"<!-- {self.made_from} -->"
        return all(file.exists() and file.read_text().startswith(note) for file in self.files.values())

    def write(self) -> bool:
        """Draws it, if it is not current; whether it was drawn."""
        if self.made_from and self.is_current():
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drawn, note = self.draw(), f"<!-- {self.made_from} -->\n" if self.made_from else ""
        for scheme, file in self.files.items():
            colours = {role: values[SCHEMES.index(scheme)] for role, values in PALETTE.items()}
            file.write_text(f"{note}{_svg(drawn, self.path.stem, self.title, colours.__getitem__)}\n")
        return True

    def markup(self, page: Path) -> str:
        """What shows it on a Markdown page."""
        places = {scheme: Path(os.path.relpath(file, page.parent)).as_posix() for scheme, file in self.files.items()}
        return render("picture.md.j2", title=self.title, **places)


def made_from(what: str, *files: Path) -> str:
    """A digest of what decides a chart, and of the code that draws it."""
    digest = hashlib.sha256(what.encode())
    for file in files:
        digest.update(file.read_bytes())
    return f"made from {digest.hexdigest()[:16]}"


def _style() -> dict[Any, Any]:
    return {
        "font.family": "DejaVu Sans",  # for measuring: it is wider than the fonts that readers have
        "font.size": 12,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 1,
        "lines.linewidth": 1.8,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "text.parse_math": False,  # a $ of a log is a $
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "ytick.labelcolor"), colour("ink")),
        "xtick.labelcolor": colour("muted"),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), colour("grid")),
    }


def _svg(drawn: Figure, name: str, title: str, paint: Callable[[str], str]) -> str:
    """The figure's SVG with the colours painted, without what matplotlib adds for others."""
    text = io.StringIO()
    with mpl.rc_context({**_style(), "svg.hashsalt": name}):
        drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(controls(text.getvalue()))
    _tidy(root, title)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    svg = ElementTree.tostring(root, encoding="unicode")
    for role in PALETTE:
        svg = svg.replace(colour(role), paint(role))
    return svg


def _tidy(root: ElementTree.Element, title: str) -> None:
    _, _, width, height = root.attrib["viewBox"].split()
    root.attrib |= {"width": width, "height": height, "role": "img", "aria-label": title, "font-family": _FONTS}
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    markup = ElementTree.tostring(root, encoding="unicode")
    for element in root.iter():
        for name in ("d", "x", "y", "transform"):
            if place := element.get(name):
                element.set(name, re.sub(r"(\.\d\d)\d+", r"\1", place))  # a hundredth of a pixel will do
        if style := element.get("style"):
            element.set("style", re.sub(r"\s*font-family:[^;]*;?", "", style))
        identity = element.get("id", "")
        if identity.startswith(_TIP):
            element.set("data-tip", identity.removeprefix(_TIP).replace(_BREAK, "\n"))
        if identity and f"#{identity}" not in markup:
            del element.attrib["id"]
