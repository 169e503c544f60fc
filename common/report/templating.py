"""Fills in templates/: the text of pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

import jinja2

from flashladder.common import escape
from flashladder.common.escape import Markdown
from flashladder.common.problem.config import listing
from flashladder.common.report import formats
from flashladder.common.report.tables import markdown

WIDTH = 120  # of lines in Markdown


def fill(text: str) -> str:
    """A paragraph in lines of Markdown; links and names are not cut."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def joined(values: Iterable[object]) -> Markdown:
    """A list in Markdown, of what may be Markdown already."""
    return Markdown(", ".join(map(escape.markdown, values)))


@jinja2.pass_eval_context
def _finalized(context: jinja2.nodes.EvalContext, value: object) -> object:
    """What a template shows of a value: jinja2 escapes it for HTML, and this for Markdown."""
    if hasattr(value, "__html__"):
        return value
    if context.autoescape:
        return escape.controls(value) if isinstance(value, str) else value
    return escape.markdown(value)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    finalize=_finalized,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"fill": fill, "joined": joined, "listing": listing, "ratio": formats.ratio}
_ENVIRONMENT.globals |= {"markdown": markdown, "mean_rate": formats.mean_rate}


def render(name: str, **values: object) -> Markdown:
    """A template with these values, escaped for Markdown or HTML, without a line break at the end."""
    return Markdown(_ENVIRONMENT.get_template(name).render(**values).rstrip("\n"))
