"""What there is to run: rungs, references and official kernels, a line each, and one of them at length."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flashladder.common import catalog
from flashladder.common.catalog.instruction_sets import INSTRUCTION_SETS
from flashladder.common.problem.config import spell
from flashladder.common.report.tables import facts, folding, table


def ladder(name: str = catalog.FIRST) -> Table:
    """The rungs of a ladder, a line each."""
    rungs = catalog.versions(ladder=name)
    rows = [(rung.name, _idea(rung), INSTRUCTION_SETS[rung.instruction_set].arch) for rung in rungs]
    return _screen(f"The ladder {name}" if name else "The ladder", ["rung", "idea", "needs"], rows)


def references() -> Table:
    """The implementations beside the ladders, a line each."""
    rows = [(each.name, _idea(each), ", ".join(each.devices)) for each in catalog.references()]
    return _screen("References", ["name", "idea", "runs on"], rows)


def _screen(title: str, columns: Sequence[str], rows: Sequence[tuple[str, str, str]]) -> Table:
    """No row takes a second line: what there is no room for is cut."""
    first, middle, last = columns
    cut = ((one, Text(idea, no_wrap=True, overflow="ellipsis"), other) for one, idea, other in rows)
    return table(title, [first, *folding(middle), last], cut)


def _idea(of: catalog.Version | catalog.Reference) -> str:
    draft = f"a draft, from {of.parent}: " if isinstance(of, catalog.Version) and of.draft else ""
    return draft + of.idea


def _needs(version: catalog.Version) -> str:
    return INSTRUCTION_SETS[version.instruction_set].needs


def details(of: catalog.Version | catalog.Reference) -> Table:
    """One rung or reference: its idea, what it takes, and how it can be configured."""
    place: dict[str, str | Text]
    if isinstance(of, catalog.Version):
        place = {"needs": _needs(of), "page": str(of.directory / "README.md")}
    else:
        place = {"runs on": ", ".join(of.devices), "here": _lack_of(of), "page": str(of.directory / "README.md")}
    fields = [f"{name}: {_values(choice)}" for name, choice in of.choices.items()]
    said = {"idea": of.idea, "takes": _takes(of.supports), **place, "fields": "\n".join(fields)}
    return facts(f"{of.name}: {of.title}", said)


def _values(choice: catalog.Choice) -> str:
    if choice.any_value:
        return f"{spell(choice.default)}, or any"
    others = [spell(value) for value in choice.values if value != choice.default]
    return f"{spell(choice.default)}, or {', '.join(others)}" if others else spell(choice.default)


def _takes(supports: catalog.Supports) -> str:
    features = [name for name in ("causal", "gqa", "narrower") if getattr(supports, name)]
    lengths = "any length" if supports.seqlen_q == supports.seqlen_k == "any" else "whole tiles"
    wide = {"d": supports.head_dim, "d of V": supports.head_dim_v}
    widths = [f"{name} {', '.join(map(str, sorted(columns)))}" for name, columns in wide.items() if columns]
    widths += [f"d {head_dim} with d of V {of_v}" for head_dim, of_v in supports.apart.items()]
    return "; ".join([", ".join(supports.dtype), *widths, lengths, *features])


def _lack_of(reference: catalog.Reference) -> Text:
    from flashladder.common.measure.references import missing

    return _here(missing(reference), "yes")


def _here(missing: str | None, present: str) -> Text:
    return Text(missing, "yellow") if missing else Text(present)


def baselines() -> Table:
    """Every official kernel: its version here, or why it is missing and the line that installs it."""
    from flashladder.common.measure import baselines as official

    rows = (
        (each.name, each.title, each.operation, _here(each.missing(), each.version))
        for operation in official.measured()
        for each in official.of(operation).values()
    )
    return table("Official kernels", ["name", "kernel", "computes", *folding("here")], rows)
