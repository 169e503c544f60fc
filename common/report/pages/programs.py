"""docs/programs.md: the fields of an answer, as the schema declares them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from flashladder.common.escape import Markdown
from flashladder.common.paths import ROOT
from flashladder.common.report import answer
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import markdown

PAGE, MARKER = ROOT / "docs" / "programs.md", "fields"
PARTS = (answer.Answer, answer.Kernel, answer.Fault, answer.Place, answer.Time, answer.Ratio)
OF_COMMANDS = (answer.Limit, answer.Errors, answer.Goal)  # of explain, accuracy, exercise


def section() -> Section:
    return Section(PAGE, MARKER, lambda: "\n\n".join(_tables()))


def _tables() -> Iterator[str]:
    for part in (*PARTS, *OF_COMMANDS):
        title = f"**{part.__name__}**: {(part.__doc__ or '').strip()}"
        yield f"{title}\n\n{markdown(['field', 'type', 'what it is'], _rows(part))}"


def _rows(part: type[BaseModel]) -> Iterator[list[object]]:
    for name, field in part.model_fields.items():
        kind = part.__annotations__[name].replace("tuple[", "list[").replace(", ...]", "]").replace("None", "null")
        if "Literal[" in kind or kind == "FaultKind":
            kind = "one of these" if kind == "FaultKind" else kind.removeprefix("Literal[").removesuffix("]")
        yield [Markdown(f"`{name}`"), kind, field.description]
