"""The configurations of a rung that take the problems it is tuned for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flashladder.common import catalog, tuned
from flashladder.common.catalog import Version
from flashladder.common.config import GpuDescription, KernelConfig, Value
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem import Problem


@dataclass(frozen=True)
class Space:
    """What is searched: a configuration here has the fields that the problems leave open."""

    version: Version
    problems: tuple[Problem, ...]
    configs: tuple[KernelConfig, ...]  # every valid one, in declared order
    default: KernelConfig

    @classmethod
    def of(cls, version: Version, problems: Sequence[Problem], gpu: GpuDescription | None = None) -> Space:
        """Enumerates it; the default is the rung's for `gpu`.

        Raises UnsupportedProblemError where the rung's default does not take a problem, ConfigError where no
        configuration takes all of them.
        """
        for problem in problems:
            version.check(problem, version.config_for(problem, gpu))
        decided = {name for problem in problems for name in catalog.decided_by(problem)}
        fields = {name: choice for name, choice in version.choices.items() if name not in decided}
        valid, refusals = [], Counter[str]()
        for values in itertools.product(*(choice.values for choice in fields.values())):
            named = dict(zip(fields, values, strict=True))
            if refusal := _refusal(version, problems, named):
                refusals[refusal] += 1
            else:
                valid.append(KernelConfig.of(**named))
        if not valid:
            raise ConfigError(
                f"{version.name} has no configuration for these problems: {refusals.most_common(1)[0][0]}"
            )
        default = version.config_for(problems[0], gpu)
        default = KernelConfig.of(**{name: getattr(default, name) for name in fields})
        return cls(version, tuple(problems), tuple(valid), default)

    @cached_property
    def fields(self) -> dict[str, tuple[Value, ...]]:
        """The fields that are searched, with the values they take."""
        return {name: self.version.choices[name].values for name in self.default.fields}

    def full(self, config: KernelConfig, problem: Problem) -> KernelConfig:
        """The configuration with the fields that the problem decides: what is compiled for it."""
        return self.version.config_for(problem, **config.as_dict())

    def seeds(self, gpu: str) -> list[KernelConfig]:
        """What to try first: the default, and what won before: this rung's on the GPU, other rungs', other GPUs'."""
        winners = tuned.every()
        near = sorted(winners, key=lambda w: (w.gpu != gpu, w.version != self.version.name, w.gpu, w.version))
        members = set(self.configs)
        known = [self._of_values(winner.values) for winner in near]
        return list(dict.fromkeys(config for config in [self.default, *known] if config in members))

    def _of_values(self, values: dict[str, Value]) -> KernelConfig | None:
        """A configuration with these values, and the defaults of fields that are not among them; None for a bad one."""
        try:
            return KernelConfig.of(**{name: values.get(name, value) for name, value in self.default.items})
        except ConfigError:
            return None


def _refusal(version: Version, problems: Iterable[Problem], values: dict[str, Value]) -> str | None:
    """Why these values do not make a kernel for the problems; None where they do."""
    try:
        for problem in problems:
            version.check(problem, version.config_for(problem, **values))
    except (ConfigError, UnsupportedProblemError) as error:
        return str(error)
    return None
