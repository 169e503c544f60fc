"""Who takes part in a comparison: rungs with their configurations, compiled for every problem that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from flashladder.common import catalog
from flashladder.common.artifact import Artifact
from flashladder.common.build import BuildRequest, build
from flashladder.common.catalog import Version
from flashladder.common.config import Value, parse_values
from flashladder.common.console import progress
from flashladder.common.errors import BuildError, UnsupportedProblemError

if TYPE_CHECKING:
    from flashladder.common.problem import Problem
    from flashladder.common.target import Target

Field: TypeAlias = "dict[Problem, dict[str, Artifact]]"  # the kernels of each problem, by the entries' labels


@dataclass(frozen=True)
class Entry:
    """A rung in a configuration; fields that are not among the values follow the problem, or the rung's defaults."""

    label: str
    version: Version
    values: dict[str, Value]

    @classmethod
    def parse(cls, text: str, values: dict[str, Value]) -> Entry:
        """'16' or '16@block_m=128'; what stands after the @ goes before `values`."""
        name, _, own = text.partition("@")
        version = catalog.find(name)
        return cls(version.number + (f"@{own}" if own else ""), version, values | parse_values(own))


def assemble(entries: Sequence[Entry], problems: Sequence[Problem], place: Target) -> tuple[Field, list[str]]:
    """For each problem the entries that take it, all compiled at once; and why others take no part."""
    requests: dict[tuple[Problem, str], BuildRequest] = {}
    left_out = []
    for problem in problems:
        for entry in entries:
            try:
                config = entry.version.config_for(problem, **entry.values)
                entry.version.check(problem, config)
                requests[problem, entry.label] = BuildRequest(entry.version, config, place.arch)
            except UnsupportedProblemError as error:
                left_out.append(f"left out: {error}")
    distinct = list(dict.fromkeys(requests.values()))
    with progress("compiled") as update:
        built = dict(zip(distinct, build(distinct, update, on_error="return"), strict=True))
    field: Field = {}
    for (problem, label), request in requests.items():
        artifact = built[request]
        if isinstance(artifact, BuildError):
            left_out.append(f"left out: {artifact}")
        else:
            place.check(artifact)
            field.setdefault(problem, {})[label] = artifact
    return field, left_out
