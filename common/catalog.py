"""Finds the rungs and the references in versions/ and knows what each takes, as its version.yaml declares it."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flashladder.common.config import (
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
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.paths import VERSIONS
from flashladder.common.rules import Rule

if TYPE_CHECKING:
    from flashladder.common.problem import Problem

INSTRUCTION_SETS = {"ampere": "sm_80 or later", "hopper": "sm_90a"}  # and the arch that each needs
DEVICES = ("cpu", "gpu")  # where a reference may run
PTXAS_LEVEL = "ptxas_level"  # a field that every rung takes where it is given: it is the compiler's, not the kernel's
_KEYS = {"title", "idea", "supports", "config"}  # of every version.yaml
_OPTIONAL_KEYS = {"kernel", "rules", "defaults", "small_sm"}


@dataclass(frozen=True)
class Supports:
    """The problems an implementation takes. seqlen_*: `any`, or the config field of which it must be a multiple."""

    dtype: tuple[str, ...]
    head_dim: tuple[int, ...]
    seqlen_q: str = "any"
    seqlen_k: str = "any"
    causal: bool = False
    gqa: bool = False
    lse: bool = True


@dataclass(frozen=True)
class Choice:
    """A configuration field of a rung: its default and the values it may take (`any`: what its type allows).

    Of a field that takes any value, the search space has the default alone.
    """

    default: Value
    values: tuple[Value, ...]
    any_value: bool = False


@dataclass(frozen=True)
class SmallSm:
    """The defaults for a GPU whose SMs have less than `below` bytes of shared memory: fields by head_dim."""

    below: int
    defaults: Mapping[int, Mapping[str, Value]]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """An attention kernel of versions/: what it is, what it takes, and how it can be configured."""

    name: str  # "02_swizzling", "py_fa1": its folder's
    title: str
    idea: str
    directory: Path
    kernel: Path
    supports: Supports
    choices: Mapping[str, Choice] = dataclasses.field(hash=False)  # in declared order; dtype and head_dim lead
    rules: tuple[Rule, ...] = ()  # its own, on top of config.RULES
    # of a head_dim, where they are not those of the choices
    defaults: Mapping[int, Mapping[str, Value]] = dataclasses.field(default_factory=dict, hash=False)
    small_sm: SmallSm | None = dataclasses.field(default=None, hash=False)

    def config(self, gpu: GpuDescription | None = None, /, **overrides: Value) -> KernelConfig:
        """The default configuration, that for `gpu` where there is one, with these fields changed.

        ConfigError names what is not allowed.
        """
        for name, value in overrides.items():
            self.check_value(name, value)
        head_dim: Any = overrides.get("head_dim", self.choices["head_dim"].default)
        values = {name: choice.default for name, choice in self.choices.items()}
        values.update(self.defaults.get(head_dim, {}))
        if self.small_sm and gpu and gpu.shared_per_sm < self.small_sm.below:
            values.update(self.small_sm.defaults.get(head_dim, {}))
        return self._checked({**values, **overrides})

    def check_value(self, name: str, value: Value) -> None:
        """Raises ConfigError unless there is such a field, and it may have this value."""
        if name not in self.choices:
            raise ConfigError(f"{self.name} has no field {name}; its fields are {listing(self.choices)}")
        field_named(name).check(value)
        if value not in self.choices[name].values and not self.choices[name].any_value:
            allowed = listing(self.choices[name].values)
            raise ConfigError(f"{name}={spell(value)} is not one of {allowed}, which {self.name} takes")

    def parse_config(self, text: str) -> KernelConfig:
        """The configuration that `field=value,...` names; fields it leaves out have their defaults."""
        return self.config(**parse_values(text))

    def config_for(self, problem: "Problem", gpu: GpuDescription | None = None, /, **overrides: Value) -> KernelConfig:
        """Like `config`, but the fields that a problem decides (dtype, head_dim, causal, ...) follow the problem.

        Raises UnsupportedProblemError where no configuration computes the problem.
        """
        if refusal := self._unsupported(problem):
            raise UnsupportedProblemError(f"{self.name} {refusal}; {self.alternative(problem)}")
        decided = {name: value for name, value in decided_by(problem).items() if name in self.choices}
        return self.config(gpu, **{**decided, **overrides})

    def space(self) -> Iterator[KernelConfig]:
        """Every valid configuration."""
        for values in itertools.product(*(choice.values for choice in self.choices.values())):
            named = dict(zip(self.choices, values, strict=True))
            if all(rule.holds(named) for rule in (*RULES, *self.rules)):
                yield KernelConfig.of(**named)

    def check(self, problem: "Problem", config: KernelConfig) -> None:
        """Raises UnsupportedProblemError unless this implementation, so configured, computes the problem."""
        if refusal := self._refusal(problem, config):
            if self.takes(problem):
                advice = f"configured as {self.config_for(problem)} it takes the problem"
            else:
                advice = self.alternative(problem)
            raise UnsupportedProblemError(f"{self.name} {refusal}; {advice}")

    def alternative(self, problem: "Problem") -> str:
        """What else takes the problem, in words."""
        able = [other.name for other in references(self.directory.parent) if other.takes(problem)]
        return f"of the references {listing(able)} take it" if able else "no reference takes the problem"

    def takes(self, problem: "Problem") -> bool:
        """Whether the default configuration computes the problem."""
        if self._unsupported(problem):
            return False
        try:
            return self._refusal(problem, self.config_for(problem)) is None
        except ConfigError:
            return False

    def _checked(self, values: dict[str, Value]) -> KernelConfig:
        try:
            check_rules(self.rules, values)
            return KernelConfig.of(**values)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None

    def _unsupported(self, problem: "Problem") -> str | None:
        """Why no configuration takes the problem, to be read after the name; None when one may."""
        supports = self.supports
        if problem.dtype not in supports.dtype:
            return f"takes dtype {listing(supports.dtype)}, not {problem.dtype}"
        if problem.head_dim not in supports.head_dim:
            return f"takes head_dim {listing(supports.head_dim)}, not {problem.head_dim}"
        if problem.causal and not supports.causal:
            return "has no causal mask"
        if problem.num_heads != problem.num_heads_k and not supports.gqa:
            return f"needs as many K/V heads as Q heads, not {problem.num_heads} and {problem.num_heads_k}"
        return None

    def _refusal(self, problem: "Problem", config: KernelConfig) -> str | None:
        """Why it does not take the problem so configured, to be read after its name; None when it does."""
        if unsupported := self._unsupported(problem):
            return unsupported
        if "row_stride" in config.fields and problem.layout != "bshd":
            return f"needs the layout bshd, whose rows are row_stride={config.row_stride} apart, not {problem.layout}"
        for name, value in decided_by(problem).items():
            if name in config.fields and getattr(config, name) != value:
                configured = f"{name}={spell(getattr(config, name))}"
                return f"is configured for {configured}, but the problem has {name}={spell(value)}"
        for name in ("seqlen_q", "seqlen_k"):
            tile, seqlen = getattr(self.supports, name), getattr(problem, name)
            if tile != "any" and seqlen % getattr(config, tile):
                return f"takes {name} in multiples of {tile}={getattr(config, tile)}, not {seqlen}"
        return None


@dataclass(frozen=True, kw_only=True)
class Version(Implementation):
    """A rung of the ladder: a CUDA kernel that common/build compiles."""

    number: str  # "02"
    instruction_set: str
    local_memory: bool = False  # whether its kernels may spill registers

    def check_value(self, name: str, value: Value) -> None:
        """As `Implementation.check_value`; PTXAS_LEVEL need not be declared, and is then the last field."""
        if name == PTXAS_LEVEL and name not in self.choices:
            self._checked({name: value})
        else:
            super().check_value(name, value)

    def check_arch(self, arch: str) -> None:
        """Raises ConfigError unless the rung's instructions exist in this arch (sm_80, sm_90a, ...)."""
        match = re.fullmatch(r"sm_(\d+)[af]?", arch)
        if match is None:
            raise ConfigError(f"{arch} is not an arch such as sm_80 or sm_90a")
        if int(match[1]) < 80 or (self.instruction_set == "hopper" and arch != "sm_90a"):
            needed = INSTRUCTION_SETS[self.instruction_set]
            raise ConfigError(f"{self.name} uses {self.instruction_set} instructions, which need {needed}, not {arch}")

    def alternative(self, problem: "Problem") -> str:
        if able := nearest(self, problem):
            return f"the nearest rung that takes the problem is {able.name}"
        return f"no rung takes the problem; {super().alternative(problem)}"


@dataclass(frozen=True, kw_only=True)
class Reference(Implementation):
    """An implementation beside the ladder: a Python module that common/references runs."""

    devices: tuple[str, ...]  # of DEVICES
    requires: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)  # module: line that installs it


def decided_by(problem: "Problem") -> dict[str, Value]:
    """The configuration fields that a problem decides, in a rung that has them."""
    row_stride = problem.num_heads * problem.head_dim
    return {"dtype": problem.dtype, "head_dim": problem.head_dim, "causal": problem.causal, "row_stride": row_stride}


def versions(root: Path = VERSIONS) -> list[Version]:
    """All rungs, from the lowest up."""
    return [_load(directory) for directory in _directories(root)]


def find(name: str, root: Path = VERSIONS) -> Version:
    """A rung by its number ("02" or "2"), its name ("02_swizzling") or the name's words ("swizzling")."""
    for directory in _directories(root):
        number, words = directory.name[:2], directory.name[3:]
        if name in (number, number.lstrip("0") or "0", directory.name, words):
            return _load(directory)
    known = [directory.name for directory in (*_directories(root), *_reference_directories(root))]
    raise ConfigError(f"no version {name}; there are {listing(known)}")


def references(root: Path = VERSIONS) -> list[Reference]:
    """The implementations beside the ladder, by name."""
    return [_load_reference(directory) for directory in _reference_directories(root)]


def find_implementation(name: str, root: Path = VERSIONS) -> Version | Reference:
    """A rung by any of its names, or a reference by its own."""
    for directory in _reference_directories(root):
        if name == directory.name:
            return _load_reference(directory)
    return find(name, root)


def nearest(version: Version, problem: "Problem") -> Version | None:
    """The rung closest to `version` (the higher one of two) that takes the problem."""
    able = [other for other in versions(version.directory.parent) if other != version and other.takes(problem)]
    here = int(version.number)
    return min(able, key=lambda other: (abs(int(other.number) - here), -int(other.number)), default=None)


def _directories(root: Path) -> list[Path]:
    return [path.parent for path in sorted(root.glob("[0-9][0-9]_*/version.yaml"))]


def _reference_directories(root: Path) -> list[Path]:
    return [path.parent for path in sorted(root.glob("[!0-9]*/version.yaml"))]


@cache
def _load(directory: Path) -> Version:
    """Reads a rung's version.yaml; ConfigError names the file and what is wrong with it."""
    with _named(directory) as text:
        _check_keys(text, {*_KEYS, "instruction_set"}, {*_OPTIONAL_KEYS, "local_memory"})
        version = Version(
            **_shared(directory, text, "kernel.cu"),
            number=directory.name[:2],
            instruction_set=text["instruction_set"],
            local_memory=text.get("local_memory", False),
        )
        if version.instruction_set not in INSTRUCTION_SETS:
            known = listing(INSTRUCTION_SETS)
            raise ConfigError(f"instruction_set={version.instruction_set} is not one of {known}")
        _check_declaration(version)
    return version


@cache
def _load_reference(directory: Path) -> Reference:
    """Reads a reference's version.yaml; ConfigError names the file and what is wrong with it."""
    with _named(directory) as text:
        _check_keys(text, {*_KEYS, "devices"}, {*_OPTIONAL_KEYS, "requires"})
        reference = Reference(
            **_shared(directory, text, "kernel.py"),
            devices=tuple(text["devices"]),
            requires=text.get("requires", {}),
        )
        for device in reference.devices:
            if device not in DEVICES:
                raise ConfigError(f"devices: {device} is not one of {listing(DEVICES)}")
        _check_declaration(reference)
    return reference


@contextmanager
def _named(directory: Path) -> Iterator[Any]:
    """The contents of a version.yaml; a ConfigError that they cause says so."""
    path = directory / "version.yaml"
    try:
        yield yaml.safe_load(path.read_text())
    except (ConfigError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _shared(directory: Path, text: Any, kernel: str) -> dict[str, Any]:
    """What every implementation declares."""
    _check_keys(text["supports"], {"dtype", "head_dim"}, {"seqlen_q", "seqlen_k", "causal", "gqa", "lse"})
    for declared in text["config"].values():
        _check_keys(declared, {"default", "values"})
    for rule in text.get("rules", ()):
        _check_keys(rule, {"require", "why"})
    if "small_sm" in text:
        _check_keys(text["small_sm"], {"below", "defaults"})
    supported: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in text["supports"].items()}
    supports = Supports(**supported)
    choices = {
        "dtype": Choice(supports.dtype[0], supports.dtype),
        "head_dim": Choice(supports.head_dim[0], supports.head_dim),
        **{name: _choice(**entry) for name, entry in text["config"].items()},
    }
    return {
        "name": directory.name,
        "title": text["title"],
        "idea": text["idea"],
        "directory": directory,
        "kernel": (directory / text.get("kernel", kernel)).resolve(),
        "supports": supports,
        "choices": choices,
        "rules": tuple(Rule(**rule) for rule in text.get("rules", ())),
        "defaults": text.get("defaults", {}),
        "small_sm": SmallSm(**text["small_sm"]) if "small_sm" in text else None,
    }


def _choice(default: Value, values: Any) -> Choice:
    return Choice(default, (default,), any_value=True) if values == "any" else Choice(default, tuple(values))


def _check_keys(given: Any, required: set[str], optional: frozenset[str] | set[str] = frozenset()) -> None:
    """Raises ConfigError unless `given` is a mapping with all the required keys and no unknown ones."""
    if not isinstance(given, dict):
        raise ConfigError(f"{given!r} is not a mapping with the keys {listing(sorted(required))}")
    if missing := required - given.keys():
        raise ConfigError(f"the key {listing(sorted(missing))} is missing")
    if unknown := given.keys() - required - optional:
        known = listing(sorted(required | optional))
        raise ConfigError(f"unknown key {listing(sorted(unknown))}; the keys here are {known}")


def _check_declaration(version: Implementation) -> None:
    if not version.kernel.is_file():
        raise ConfigError(f"there is no kernel {version.kernel}")
    for name, choice in version.choices.items():
        for value in choice.values:
            field_named(name).check(value)
        if choice.default not in choice.values:
            raise ConfigError(f"the default {name}={spell(choice.default)} is not among its values")
    for tile in (version.supports.seqlen_q, version.supports.seqlen_k):
        if tile != "any" and tile not in version.choices:
            raise ConfigError(f"seqlen_q and seqlen_k are `any` or a field of the rung, not {tile}")
    for rule in version.rules:
        if unknown := rule.names - version.choices.keys():
            raise ConfigError(f"the rule {rule.require!r} reads {listing(sorted(unknown))}, which the rung lacks")
    version.config()
    for head_dim, values in (
        *version.defaults.items(),
        *(version.small_sm.defaults.items() if version.small_sm else ()),
    ):
        version.config(**{"head_dim": head_dim, **values})
