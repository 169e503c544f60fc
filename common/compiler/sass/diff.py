"""Two kernels side by side: sources, opcode counts, instructions without the names of their registers."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from flashladder.common.catalog import PTXAS_LEVEL, Version
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.sass.code import Code, read
from flashladder.common.compiler.sass.instruction import SassInstruction
from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import KernelConfig, Value

_REGISTER = re.compile(r"\b(UR|R|UP|P|SB|B)\d+\b")
_LABEL = re.compile(r"`\([^)]*\)")


@dataclass(frozen=True)
class InstructionPair:
    """Two instructions side by side in a listing; None where one side has nothing left to put beside the other."""

    left: SassInstruction | None
    right: SassInstruction | None
    is_same: bool  # they differ at most in their registers


@dataclass(frozen=True)
class RungPair:
    """Two rungs compiled so that they show their difference and nothing else."""

    lower: Version
    upper: Version
    left: Code
    right: Code

    @classmethod
    def of(cls, lower: Version, upper: Version, arch: str, overrides: Mapping[str, Value] | None = None) -> RungPair:
        """Builds and disassembles both (comparable_configs)."""
        configs = comparable_configs(lower, upper, overrides)
        requests = [BuildRequest(*pair, arch) for pair in zip((lower, upper), configs, strict=True)]
        return cls(lower, upper, *map(read, build(requests)))


def comparable_configs(
    lower: Version, upper: Version, overrides: Mapping[str, Value] | None = None
) -> tuple[KernelConfig, KernelConfig]:
    """The configurations in which two rungs are compared.

    Both are configured as the upper one is by default, as far as the lower has the fields and takes the values. Where
    they are one kernel, the configuration is the difference, and each has its own default. `overrides` hold for both.
    """
    given = dict(overrides or {})
    if lower.kernel == upper.kernel:
        return lower.config(**given), upper.config(**given)
    config = upper.config(**given)
    known = {*lower.choices, *({PTXAS_LEVEL} & given.keys())}
    shared = {name: value for name, value in config.items if name in known}
    try:
        return lower.config(**shared), config
    except ConfigError:
        return lower.config(**{name: value for name, value in given.items() if name in known}), config


def normalised(instruction: SassInstruction) -> str:
    """The text of an instruction without the numbers of its registers and the names of its labels."""
    return _LABEL.sub("label", _REGISTER.sub(r"\1", instruction.text.replace(".reuse", "")))


def align(left: Sequence[SassInstruction], right: Sequence[SassInstruction]) -> Iterator[InstructionPair]:
    """Both listings from top to bottom, what is the same on one line, and what came instead beside what it replaced."""
    matcher = difflib.SequenceMatcher(None, [*map(normalised, left)], [*map(normalised, right)], autojunk=False)
    for tag, left_start, left_end, right_start, right_end in matcher.get_opcodes():
        both = zip_longest(left[left_start:left_end], right[right_start:right_end])
        yield from (InstructionPair(*sides, is_same=tag == "equal") for sides in both)


def changed(before: Counter[str], after: Counter[str]) -> list[tuple[str, int, int]]:
    """The kinds whose counts differ, with both counts, the greatest change first."""
    kinds = sorted(before.keys() | after.keys(), key=lambda kind: (-abs(after[kind] - before[kind]), kind))
    return [(kind, before[kind], after[kind]) for kind in kinds if before[kind] != after[kind]]


def source_diff(lower: Version, upper: Version, context: int = 2) -> str:
    """A unified diff of the two kernel.cu; empty where the rungs share one."""
    if lower.kernel == upper.kernel:
        return ""
    return text_diff(lower.kernel.read_text(), upper, f"{lower.kernel.parent.name}/{lower.kernel.name}", context)


def text_diff(before: str, upper: Version, name: str, context: int = 2) -> str:
    """A unified diff of a text of this name and a rung's kernel.cu."""
    after, right = upper.kernel.read_text().splitlines(), f"{upper.kernel.parent.name}/{upper.kernel.name}"
    return "\n".join(difflib.unified_diff(before.splitlines(), after, name, right, n=context, lineterm=""))
