"""Options that an operation has of its own, such as page_size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flashladder.common.errors import ConfigError, UnsupportedProblemError, instead
from flashladder.common.problem.config import Field, Value


@dataclass(frozen=True)
class Option(Field):
    """A size or a switch that an operation knows beside those of `Problem`, and its value where none is given."""

    default: Value = 1


class WithOptions:
    """What has a name, and options."""

    name: ClassVar[str]
    options: ClassVar[tuple[Option, ...]] = ()

    def option(self, name: str) -> Option:
        """One of its own; UnsupportedProblemError lists those there are."""
        found = {option.name: option for option in self.options}
        if name not in found:
            raise UnsupportedProblemError(f"the operation {self.name} has no option {name}{instead(name, found)}")
        return found[name]

    def parse(self, text: str) -> dict[str, Value]:
        """Typed options of `name=value,name=value`, as a log or a command line gives them."""
        pairs = [pair.partition("=") for pair in filter(None, text.split(","))]
        try:
            return {name.strip(): self.option(name.strip()).parse(value.strip()) for name, _, value in pairs}
        except ConfigError as error:
            raise UnsupportedProblemError(str(error)) from None

    def complete(self, given: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
        """All its options, in declared order, with defaults for what is not given."""
        try:
            for name, value in given.items():
                self.option(name).check(value)
        except ConfigError as error:
            raise UnsupportedProblemError(str(error)) from None
        return tuple((option.name, given.get(option.name, option.default)) for option in self.options)
