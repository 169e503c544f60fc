"""The machine code of two commits as a table for the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flashladder.common.compiler import BuildRequest
from flashladder.common.compiler.sass.commits import Comparison, Verdict
from flashladder.common.problem.config import spell
from flashladder.common.report.tables import folding, numbers, table

_STYLES = {Verdict.CHANGED: "red", Verdict.FAILED: "red", Verdict.NEW: "yellow", Verdict.MOVED: "yellow"}
_MOST_KINDS = 6  # of instructions, in a row


def compared(comparisons: Sequence[Comparison]) -> Table:
    """A row for each kernel, with what differs."""
    figures = numbers("instructions", "registers", "spills")
    columns = ["rung", *folding("configuration"), "machine code", *figures, *folding("what differs")]
    return table("Kernels", columns, map(_row, comparisons))


def summary(comparisons: Sequence[Comparison]) -> str:
    """'119 kernels: 117 identical, 2 differ'."""
    found = Counter(each.verdict for each in comparisons)
    parts = [f"{found[verdict]} {verdict.value}" for verdict in Verdict if found[verdict]]
    return f"{len(comparisons)} kernels: {', '.join(parts) or 'none'}"


def _row(each: Comparison) -> Sequence[object]:
    figures = (_change(each, name) for name in ("instructions", "registers", "spill_bytes"))
    verdict = Text(each.verdict.value, _STYLES.get(each.verdict, ""))
    return each.request.version.name, _short(each.request), verdict, *figures, Text(_what(each))


def _short(request: BuildRequest) -> str:
    """Where a configuration differs from its rung's default."""
    default = dict(request.version.config().items)
    changed = [f"{name}={spell(value)}" for name, value in request.config.items if default.get(name) != value]
    return ", ".join(changed) or "default"


def _change(comparison: Comparison, name: str) -> str:
    if comparison.before is None or comparison.after is None:
        return ""
    before, after = (getattr(figures, name) for figures in (comparison.before, comparison.after))
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


def _what(comparison: Comparison) -> str:
    kinds = [f"{kind} {more:+}" for kind, more in comparison.counts[:_MOST_KINDS]]
    others = ["..."] if len(comparison.counts) > _MOST_KINDS else []
    return "\n".join(filter(None, [comparison.detail, " ".join([*kinds, *others])]))
