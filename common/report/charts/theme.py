"""One look for every picture: colours by role, light and dark, and matplotlib figures as small SVG that has both."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec
from urllib.parse import quote
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.colors
from markupsafe import escape
from matplotlib.artist import Artist
from matplotlib.container import Container
from matplotlib.figure import Figure

from flashladder.common.escape import Markdown, controls, markdown

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
    "fa4": ("#d1491b", "#ff9068"),
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


def custom_properties(scheme: str, roles: Iterable[str] = PALETTE) -> str:
    """The colours of a scheme as CSS custom properties."""
    return " ".join(f"--{role}: {PALETTE[role][SCHEMES.index(scheme)]};" for role in roles)


def _style_sheet(drawn: str) -> str:
    """What defines the colours that a picture has."""
    roles = [role for role in PALETTE if f"var(--{role})" in drawn]
    light, dark = (f":root {{ {custom_properties(scheme, roles)} }}" for scheme in SCHEMES)
    return f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"


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


@dataclass(frozen=True)
class Chart:
    """A figure as a file that stands alone, and follows the scheme of whoever looks at it."""

    path: Path
    title: str
    draw: Callable[[], Figure]
    made_from: str = ""  # tells of what it was drawn; the file keeps that

    def is_current(self) -> bool:
        """Whether the file was made from the same."""
        return self.path.exists() and self.path.read_text().startswith(f"<!-- {self.made_from} -->")

    def write(self) -> bool:
        """Draws it, if it is not current; whether it was drawn."""
        if self.made_from and self.is_current():
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        note = f"<!-- {self.made_from} -->\n" if self.made_from else ""
        drawn = inline_svg(self.draw(), self.path.stem, self.title)
        head, end, body = drawn.partition(">")
        self.path.write_text(f"{note}{head}{end}{_style_sheet(drawn)}{body}\n")
        return True

    def markup(self, page: Path) -> Markdown:
        """What shows it on a Markdown page."""
        place = Path(os.path.relpath(self.path, page.parent)).as_posix()
        return Markdown(f"![{markdown(self.title)}]({quote(place)})")


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


def with_key(drawn: Figure, name: str, title: str) -> str:
    """The figure's SVG, and behind it its legend as a list, for windows in which the picture is cut."""
    entries = [pair for legend in drawn.legends for pair in zip(legend.legend_handles, legend.get_texts(), strict=True)]
    named = {text.get_text(): handle for handle, text in entries}
    for axes in drawn.axes:
        named |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    lines = (f'<li style="color: {_paint(handle)}">{escape(text)}</li>' for text, handle in named.items())
    return inline_svg(drawn, name, title) + _with_properties(f'<ul class="key">{"".join(lines)}</ul>' if named else "")


def _paint(handle: Any) -> str:
    handle = handle[0] if isinstance(handle, Container) else handle  # of bars
    return mpl.colors.to_hex(handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor())


def _with_properties(text: str) -> str:
    for role in PALETTE:
        text = text.replace(colour(role), f"var(--{role})")
    return text


def inline_svg(drawn: Figure, name: str, title: str) -> str:
    """The figure's SVG, without what matplotlib adds for others; its colours are the page's custom properties."""
    saved = io.StringIO()
    with mpl.rc_context({**_style(), "svg.hashsalt": name}):
        drawn.savefig(saved, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(controls(saved.getvalue()))
    _tidy(root, title)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return _with_properties(ElementTree.tostring(root, encoding="unicode"))


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
