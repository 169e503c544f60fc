"""The configurations of a rung that take the problems it is tuned for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashladder.common import catalog
from flashladder.common.catalog import PTXAS_LEVEL, Version, winners
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.config import GpuDescription, KernelConfig, Value, field_named, spell
from flashladder.common.problem.kind import FEATURES, SHORT
from flashladder.common.problem.problem import Problem

PTXAS_LEVELS = (1, 3)  # of a rung that declares none: 2 gives the machine code of 3
USUAL_PTXAS_LEVEL = 3  # where nothing is said


@dataclass(frozen=True)
class Space:
    """What is searched: a configuration here has the fields that the problems leave open."""

    version: Version
    problems: tuple[Problem, ...]
    configs: tuple[KernelConfig, ...]  # every valid one, in declared order
    default: KernelConfig
    fields: Mapping[str, tuple[Value, ...]] = field(hash=False)  # that are searched, with the values they take
    only: Mapping[str, tuple[Value, ...]] = field(hash=False)  # what it was narrowed to

    @classmethod
    def of(
        cls,
        version: Version,
        problems: Sequence[Problem],
        gpu: GpuDescription | None = None,
        only: Mapping[str, tuple[Value, ...]] | None = None,
    ) -> Space:
        """Enumerates it; the default is the rung's for `gpu`. PTXAS_LEVEL is among the fields whether or not the rung
        declares it. `only` narrows fields to some of their values.

        Raises UnsupportedProblemError where the rung's default does not take a problem, ConfigError where no
        configuration takes all of them, and where the rung has no such field or value.
        """
        for problem in problems:
            version.check(problem, version.config_for(problem, gpu))
        only = dict(only or {})
        decided = {name for problem in problems for name in catalog.kind_of(problem).decided(problem.head_dim)}
        decided.add(catalog.ROW_STRIDE)
        for name, values in only.items():
            if name in decided:
                raise ConfigError(f"{name} follows from the problem, so nothing is left to search")
            for value in values:
                version.check_value(name, value)
        declared = {name: choice.values for name, choice in version.choices.items() if name not in decided}
        fields = {**declared, PTXAS_LEVEL: declared.get(PTXAS_LEVEL, PTXAS_LEVELS), **only}
        valid, refusals = [], Counter[str]()
        for values in itertools.product(*fields.values()):
            named = dict(zip(fields, values, strict=True))
            if refusal := _refusal(version, problems, named):
                refusals[refusal] += 1
            else:
                valid.append(KernelConfig.of(**named))
        if not valid:
            raise ConfigError(
                f"{version.name} has no configuration for these problems: {refusals.most_common(1)[0][0]}"
            )
        usual = {PTXAS_LEVEL: USUAL_PTXAS_LEVEL, **version.config_for(problems[0], gpu).as_dict()}
        default = KernelConfig.of(**{name: usual[name] for name in fields})
        fields = {name: tuple(dict.fromkeys([*values, usual[name]])) for name, values in fields.items()}
        return cls(version, tuple(problems), tuple(valid), default, fields, only)

    @property
    def kind(self) -> str:
        """The kind of its problems, as winners are named."""
        return winners.name_of(self.problems[0])

    @property
    def words(self) -> str:
        """The kind of its problems, as studies are named by it: 'bf16-d128-full', '-short' where keys are few."""
        kind = catalog.kind_of(self.problems[0])
        columns = f"d{kind.head_dim}" + ("" if kind.is_even else f"v{kind.head_dim_v}")
        features = {name: True for name in FEATURES if getattr(kind, name)}
        rest = {**features, **kind.set_options, **dict(kind.classes), SHORT: kind.length == SHORT}
        words = (_word(name, value) for name, value in rest.items())
        return "-".join([kind.dtype, columns, "causal" if kind.causal else "full", *filter(None, words)])

    def full(self, config: KernelConfig, problem: Problem) -> KernelConfig:
        """The configuration with the fields that the problem decides: what is compiled for it."""
        return self.version.config_for(problem, **config.as_dict())

    def seeds(self, gpu: str) -> list[KernelConfig]:
        """What to try first: the default, and what won before: this rung's on the GPU, other rungs', other GPUs'."""
        near = sorted(winners.every(), key=lambda w: (w.gpu != gpu, w.version != self.version.name, w.gpu, w.version))
        members = set(self.configs)
        known = [self._of_values(winner.values) for winner in near]
        return list(dict.fromkeys([self.default, *(config for config in known if config in members)]))

    def near(self, seeds: Sequence[KernelConfig], limit: int) -> list[KernelConfig]:
        """As many configurations as `limit`, in declared order: those that differ from a seed in the fewest fields.

        Ptxas's levels do not count as different, so that all of a configuration's are there.
        """

        def differences(config: KernelConfig) -> tuple[int, int]:
            each = [_differences(config, seed) for seed in seeds]
            return min(each), sum(each)

        nearest = set(sorted(self.configs, key=differences)[:limit])
        return [config for config in self.configs if config in nearest]

    def declared(self, config: KernelConfig) -> dict[str, Value]:
        """The configuration's values as the rung would spell them: without what goes without saying."""
        values = config.as_dict()
        if PTXAS_LEVEL not in self.version.choices and values[PTXAS_LEVEL] == USUAL_PTXAS_LEVEL:
            del values[PTXAS_LEVEL]
        return values

    def _of_values(self, values: dict[str, Value]) -> KernelConfig | None:
        """A configuration with these values, and the defaults of fields that are not among them; None for a bad one."""
        try:
            return KernelConfig.of(**{name: values.get(name, value) for name, value in self.default.items})
        except ConfigError:
            return None


def by_kind(problems: Iterable[Problem]) -> list[tuple[Problem, ...]]:
    """The problems, those of one kind together: each kind has a winner of its own."""
    found: dict[str, list[Problem]] = {}
    for problem in problems:
        found.setdefault(winners.name_of(problem), []).append(problem)
    return list(map(tuple, found.values()))


def narrowed(texts: Iterable[str]) -> dict[str, tuple[Value, ...]]:
    """The fields and the values of "block_n=64,128" and its like. Raises ConfigError."""
    found = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: not a field and its values, such as block_n=64,128")
        found[name] = tuple(dict.fromkeys(field_named(name).parse(value) for value in values.split(",")))
    return found


def suiting(
    version: Version, problems: Sequence[Problem], gpu: GpuDescription, only: Mapping[str, tuple[Value, ...]]
) -> Space:
    """The space of a rung that can run on the GPU. Raises as `Space.of` does, and ConfigError where it cannot."""
    version.check_arch(gpu.arch)
    return Space.of(version, problems, gpu, only)


def all_suiting(
    versions: Iterable[Version],
    problems: Sequence[Problem],
    gpu: GpuDescription,
    only: Mapping[str, tuple[Value, ...]],
) -> tuple[list[Space], dict[str, list[str]]]:
    """The spaces of the rungs that suit; and those that do not, by what is against them."""
    spaces: list[Space] = []
    left_out: dict[str, list[str]] = {}
    for version in versions:
        try:
            spaces.append(suiting(version, problems, gpu, only))
        except (ConfigError, UnsupportedProblemError) as refusal:
            reason = str(refusal).removeprefix(f"{version.name} ").partition("; ")[0]
            left_out.setdefault(reason, []).append(version.address)
    return spaces, left_out


def _differences(config: KernelConfig, other: KernelConfig) -> int:
    """The fields in which two configurations of one space differ, ptxas's level aside."""
    pairs = zip(config.items, other.items, strict=True)
    return sum(mine != theirs for mine, theirs in pairs if mine[0] != PTXAS_LEVEL)


def _word(name: str, value: Value) -> str:
    """What tells one value of an option or a class from others; nothing for false."""
    return "" if value is False else name if value is True else f"{name}={spell(value)}"


def _refusal(version: Version, problems: Iterable[Problem], values: dict[str, Value]) -> str | None:
    """Why these values do not make a kernel for the problems; None where they do."""
    try:
        for problem in problems:
            version.check(problem, version.config_for(problem, **values))
    except (ConfigError, UnsupportedProblemError) as error:
        return str(error)
    return None
