"""Fills in templates/: the text of pages."""

from __future__ import annotations

import textwrap
from pathlib import Path

import jinja2

from flashladder.common.problem.config import listing
from flashladder.common.report import formats
from flashladder.common.report.tables import markdown

WIDTH = 120  # of lines in Markdown


def fill(text: str) -> str:
    """A paragraph in lines of Markdown; links and names are not cut."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"fill": fill, "listing": listing, "ratio": formats.ratio}
_ENVIRONMENT.globals |= {"markdown": markdown, "mean_rate": formats.mean_rate}


def render(name: str, **values: object) -> str:
    """A template with these values, without a line break at the end."""
    return _ENVIRONMENT.get_template(name).render(**values).rstrip("\n")
