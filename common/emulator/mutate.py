"""Proof that the race detector sees what it should: take one synchronisation out of a kernel's PTX and run it again."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .parse import parse
from .ptx import SourceChain, format_chain

SYNCHRONISES = re.compile(r"(bar|barrier)\.|cp\.async\.(commit_group|wait_group|wait_all)$|fence|membar")


@dataclass(frozen=True)
class Mutation:
    """One instruction that orders memory accesses, and the module without it.

    Attributes:
        instruction: its text.
        occurrence: how many equal instructions of the same source position come before it in the PTX.
        source: where it comes from, innermost first.
        ptx: the module without it.
    """

    instruction: str
    occurrence: int
    source: SourceChain
    ptx: str

    @property
    def where(self) -> str:
        return format_chain(self.source)

    def __str__(self) -> str:
        return f"`{self.instruction}` at {self.where}"


def mutations(ptx: str, entry: str | None = None) -> Iterator[Mutation]:
    """Every module that lacks one of the instructions which order memory accesses, in program order."""
    lines = ptx.split("\n")
    seen: dict[tuple[str, SourceChain], int] = {}
    for instruction in parse(ptx, entry).instructions:
        if not SYNCHRONISES.match(instruction.opcode):
            continue
        key = (instruction.text, instruction.source)
        seen[key] = seen.get(key, -1) + 1
        statement = r"\s*".join(re.escape(word) for word in instruction.text.split()) + r"\s*;"
        changed = re.sub(statement, "", lines[instruction.line - 1], count=1)
        assert changed != lines[instruction.line - 1], instruction.text
        mutated = [*lines[: instruction.line - 1], changed, *lines[instruction.line :]]
        yield Mutation(instruction.text, seen[key], instruction.source, "\n".join(mutated))
