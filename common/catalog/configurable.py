"""How an implementation can be configured: its fields, their defaults, and which values go together."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashladder.common.catalog.schema import Declaration, SmallSm
from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import (
    RULES,
    GpuDescription,
    KernelConfig,
    Value,
    check_rules,
    field_named,
    listing,
    parse_values,
    spell,
)
from flashladder.common.problem.rules import Rule

HEAD_DIM_V = "head_dim_v"


@dataclass(frozen=True)
class Choice:
    """A configuration field of a rung: its default and the values it may take (`any`: what its type allows).

    Of a field that takes any value, the search space has the default alone.
    """

    default: Value
    values: tuple[Value, ...]
    any_value: bool = False


@dataclass(frozen=True, kw_only=True)
class Configurable:
    """What has a name and fields, and becomes a KernelConfig."""

    name: str
    choices: Mapping[str, Choice] = dataclasses.field(hash=False)  # in declared order
    rules: tuple[Rule, ...] = ()  # its own, on top of config.RULES
    # of a head_dim, where they are not those of the choices
    defaults: Mapping[int, Mapping[str, Value]] = dataclasses.field(default_factory=dict, hash=False)
    # the same where V has fewer columns
    defaults_apart: Mapping[int, Mapping[str, Value]] = dataclasses.field(default_factory=dict, hash=False)
    # the same of a field that is true; they go before those
    defaults_with: Mapping[str, Mapping[int, Mapping[str, Value]]] = dataclasses.field(default_factory=dict, hash=False)
    # the same of tensors with fewer columns than head_dim, without such a field
    defaults_narrower: Mapping[int, Mapping[str, Value]] = dataclasses.field(default_factory=dict, hash=False)
    small_sm: SmallSm | None = dataclasses.field(default=None, hash=False)
    # head_dim_v by head_dim, where kernels have another; only their configurations have the field
    apart: Mapping[int, int] = dataclasses.field(default_factory=dict, hash=False)

    def config(self, gpu: GpuDescription | None = None, /, **overrides: Value) -> KernelConfig:
        """The default configuration, that for `gpu` where there is one, with these fields changed.

        ConfigError names what is not allowed.
        """
        for name, value in overrides.items():
            self.check_value(name, value)
        head_dim: Any = overrides.get("head_dim", self.choices["head_dim"].default)
        values = self._usual(head_dim, overrides)
        if self.small_sm and gpu and gpu.shared_per_sm < self.small_sm.below:
            values.update(self.small_sm.defaults.get(head_dim, {}))
        if self.apart and overrides.get(HEAD_DIM_V) not in (None, of_v := values.get(HEAD_DIM_V)):
            raise ConfigError(
                f"{self.name} has no kernel for head_dim={head_dim} with head_dim_v={overrides[HEAD_DIM_V]}: "
                f"that has {of_v or head_dim}"
            )
        return self._checked({**values, **overrides})

    def changes(self, config: KernelConfig) -> str:
        """The fields in which a configuration differs from the default one, as --config takes them."""
        usual = self._usual(config.as_dict().get("head_dim"), config.as_dict())
        return " ".join(f"{name}={spell(value)}" for name, value in config.items if usual.get(name) != value)

    def _usual(self, head_dim: Any, given: Mapping[str, Value]) -> dict[str, Value]:
        """The default values for a head_dim, beside fields that are given."""
        values = {name: choice.default for name, choice in self.choices.items()}
        values.update({"head_dim": head_dim, **self.defaults.get(head_dim, {})})
        if given.get(HEAD_DIM_V, head_dim) != head_dim:
            values.update(self.defaults_apart.get(head_dim, {}))
        for name, by_head_dim in self.defaults_with.items():
            if given.get(name):
                values.update(by_head_dim.get(head_dim, {}))
        return self._with_head_dim_v(values)

    def _with_head_dim_v(self, values: dict[str, Value]) -> dict[str, Value]:
        """The values, and the head_dim_v that goes with them."""
        head_dim = values["head_dim"]
        of_v = self.apart.get(head_dim) if isinstance(head_dim, int) else None
        leading = {name: values.pop(name) for name in ("dtype", "head_dim")}
        return {**leading, **({HEAD_DIM_V: of_v} if of_v else {}), **values}

    def check_value(self, name: str, value: Value) -> None:
        """Raises ConfigError unless there is such a field, and it may have this value."""
        if name == HEAD_DIM_V and self.apart:
            return  # follows from head_dim
        if name not in self.choices:
            raise ConfigError(f"{self.name} has no field {name}; its fields are {listing(self.choices)}")
        field_named(name).check(value)
        if value not in self.choices[name].values and not self.choices[name].any_value:
            allowed = listing(self.choices[name].values)
            raise ConfigError(f"{name}={spell(value)} is not one of {allowed}, which {self.name} takes")

    def parse_config(self, text: str) -> KernelConfig:
        """The configuration that `field=value,...` names; fields it leaves out have their defaults."""
        return self.config(**parse_values(text))

    def space(self) -> Iterator[KernelConfig]:
        """Every valid configuration."""
        for values in itertools.product(*(choice.values for choice in self.choices.values())):
            named = self._with_head_dim_v(dict(zip(self.choices, values, strict=True)))
            if all(rule.holds(named) for rule in (*RULES, *self.rules)):
                yield KernelConfig.of(**named)

    def check_choices(self) -> None:
        """Raises ConfigError unless every default, and every value that may be chosen, is allowed."""
        for name, choice in self.choices.items():
            for value in choice.values:
                field_named(name).check(value)
            if choice.default not in choice.values:
                raise ConfigError(f"the default {name}={spell(choice.default)} is not among its values")
        for rule in self.rules:
            if unknown := rule.names - {*self.choices, *([HEAD_DIM_V] if self.apart else [])}:
                raise ConfigError(f"the rule {rule.require!r} reads {listing(sorted(unknown))}, which the rung lacks")
        self.config()
        small = self.small_sm.defaults if self.small_sm else {}
        for head_dim, values in (*self.defaults.items(), *self.defaults_narrower.items(), *small.items()):
            self.config(**{"head_dim": head_dim, **values})
        for head_dim in self.defaults_apart:
            for head_dim_v in self.choices[HEAD_DIM_V].values:
                if isinstance(head_dim_v, int) and head_dim_v < head_dim:
                    self.config(head_dim=head_dim, head_dim_v=head_dim_v)
        for name, by_head_dim in self.defaults_with.items():
            for head_dim, values in by_head_dim.items():
                given = {} if self.choices[name].any_value else {name: True}
                self.config(**{"head_dim": head_dim, **given, **values})

    def _checked(self, values: dict[str, Value]) -> KernelConfig:
        try:
            check_rules(self.rules, values)
            return KernelConfig.of(**values)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None


def choices_of(declared: Declaration) -> dict[str, Choice]:
    """The fields that a version.yaml declares; those that `supports` speaks of lead."""
    supports = declared.supports
    leading: dict[str, tuple[Value, ...]] = {
        "dtype": supports.dtype,
        "head_dim": (*supports.head_dim, *supports.apart),
        HEAD_DIM_V: supports.head_dim_v,
    }
    choices = {name: Choice(values[0], values) for name, values in leading.items() if values}
    for name, field in declared.config.items():
        any_value = field.values == "any"
        choices[name] = Choice(field.default, (field.default,) if any_value else tuple(field.values), any_value)
    return choices
