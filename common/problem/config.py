"""What a kernel is compiled for: its configuration, and the GPUs it may run on."""

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import yaml

from flashladder.common import own, yaml_files
from flashladder.common.errors import ConfigError, instead, unknown
from flashladder.common.expression import Mods
from flashladder.common.paths import CONFIGS
from flashladder.common.problem.rules import Rule

Value = str | int | float | bool
MODS = "mods"  # the field whose value is text of expressions
_TYPES: dict[str, type[Value]] = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True)
class Field:
    """One compile-time parameter; it has this one spelling in Python, YAML, C++ and the short name."""

    name: str
    type: type[Value]
    meaning: str
    choices: tuple[Value, ...] | None = None
    minimum: int = 1

    def check(self, value: Value) -> None:
        """Raises ConfigError unless the value has the field's type and is one of its choices."""
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.name}={value} is not one of {listing(self.choices)}")
        if type(value) is not self.type or (type(value) is int and value < self.minimum):
            raise ConfigError(f"{self.name}={value!r} is not {self._expected()}")

    def parse(self, text: str) -> Value:
        """The value that `spell` wrote."""
        value: Value = text
        if self.type is bool:
            value = {"true": True, "false": False}.get(text, text)
        elif self.type is int and text.isascii() and text.isdigit():
            value = int(text)
        elif self.type is float:
            with suppress(ValueError):
                value = float(text)
        self.check(value)
        return value

    def _expected(self) -> str:
        whole = f"a whole number, {self.minimum} or more"
        return {bool: "true or false", int: whole, float: "a number", str: "a word"}[self.type]


FIELDS = {
    field.name: field
    for field in (
        Field("dtype", str, "element type of Q, K, V and O", choices=("bf16", "fp16")),
        Field("head_dim", int, "columns of Q and K, and of V and O"),
        Field("head_dim_v", int, "columns of V and O, where they have others than Q and K"),
        Field("block_m", int, "rows of Q that one CTA owns"),
        Field("block_n", int, "rows of K and V in one step of the main loop"),
        Field("num_warps", int, "warps in a CTA"),
        Field("q_in_registers", bool, "Q is held in registers, not read from shared memory by each product"),
        Field("num_stages", int, "K and V tiles in flight"),
        Field("q_stages", int, "places for Q: with 2 the next tile's comes while this one's is read"),
        Field("ones", bool, "V has a column of ones beside it, by which P is summed"),
        Field("ctas_per_sm", int, "CTAs that the registers of an SM must suffice for"),
        Field("q_fragments", int, "8-column fragments of Q loaded per mma step; 0: all, kept in registers", minimum=0),
        Field("k_fragments", int, "8-column fragments of K loaded per mma step; 0: all at once", minimum=0),
        Field("v_fragments", int, "8-row fragments of V loaded per mma step; 0: all at once", minimum=0),
        Field("double_buffer", bool, "load the fragments of the next mma step before this one computes"),
        Field("blocks_ahead", int, "16 x 16 blocks of K or V loaded ahead of their mmas"),
        Field("copy_pieces", int, "pieces in which a block of K and V is copied"),
        Field("edge_n", int, "keys of a part of a block that a mask or an end may cut"),
        Field("polynomial_tanh", bool, "scores far below the softcap take a polynomial, and no exponential for tanh"),
        Field("ptxas_level", int, "the -O of ptxas: at 1 it largely keeps the order of the source", choices=(1, 2, 3)),
        Field("skip_first_rescale", bool, "the first step of the main loop does not rescale O"),
        Field("row_stride", int, "elements from a row of Q, K, V or O to the next, known to the compiler"),
        Field("causal", bool, "a row of Q sees no later row of K"),
        Field("lse", bool, "the log-sum-exp of each row may be asked for"),
        Field("window", bool, "a row of Q sees no key that is too far away"),
        Field("softcap", bool, "scores are bounded by softcap * tanh(score / softcap)"),
        Field("alibi", bool, "a score loses a slope for each key between its own and that of its row"),
        Field("sinks", bool, "each head has one more logit in the sums of its rows"),
        Field("dropout", bool, "some weights of P are dropped, at random"),
        Field(MODS, str, "a mask and a score that are expressions, with the tensors that they read"),
        Field("packed", bool, "sequences of any lengths lie one behind the other"),
        Field("narrower", bool, "tensors have fewer columns than head_dim; zeros take the place of the others"),
        Field("accumulate", str, "type of every number in between", choices=("fp32", "fp64")),
    )
}

_STREAMED = "fragments are loaded in pairs, a power of two at a time, and never more than the tile has"

# They hold in every rung that has the fields.
RULES = (
    Rule("head_dim % 16 == 0", "an mma step takes 16 columns"),
    Rule("block_n % 16 == 0", "an mma step takes 16 rows of K or V"),
    Rule("block_m % (16 * num_warps) == 0", "each warp owns whole 16-row mma tiles"),
    Rule("row_stride % 8 == 0", "rows start at multiples of 16 bytes"),
    Rule("num_warps <= 32", "a CTA has at most 1024 threads"),
    *(
        Rule(f"{field} != 1 and {field} & ({field} - 1) == 0 and {field} <= {limit} // 8", _STREAMED)
        for field, limit in (("q_fragments", "head_dim"), ("k_fragments", "head_dim"), ("v_fragments", "block_n"))
    ),
)

CPP_TYPES = {"bf16": ("__nv_bfloat16", "cuda_bf16.h"), "fp16": ("__half", "cuda_fp16.h")}


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time parameters of a kernel, each one an attribute: `config.block_m`. Immutable and hashable.

    The constructor refuses unknown fields, wrong types and combinations that break one of RULES (ConfigError).
    A rung's own limits are checked by `Version.config`, which makes most configurations.
    """

    items: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        for name, value in self.items:
            field_named(name).check(value)
        check_rules(RULES, self.as_dict())

    @classmethod
    def of(cls, **values: Value) -> "KernelConfig":
        """A configuration of these fields, in this order."""
        return cls(tuple(values.items()))

    @classmethod
    def parse(cls, text: str) -> "KernelConfig":
        """The inverse of `name`."""
        return cls.of(**parse_values(text))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for field, value in self.items:
                if field == name:
                    return value
        raise AttributeError(f"the configuration has no field {name}")

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields' names, in declared order."""
        return tuple(name for name, _ in self.items)

    @property
    def name(self) -> str:
        """The short name: `dtype=bf16,head_dim=128,block_m=64,double_buffer=true`."""
        return spelled(dict(self.items))

    def __str__(self) -> str:
        return self.name

    def as_dict(self) -> dict[str, Value]:
        return dict(self.items)

    def header(self) -> str:
        """The C++ header config.cuh: every field a constant in namespace config, dtype a type."""
        includes, lines = [], []
        for name, value in self.items:
            if name == MODS:
                includes += ['#include "launch.cuh"', '#include "softmax/expression.cuh"']
                lines += Mods.parse(str(value)).header()
            elif name == "dtype":
                cpp_type, include = CPP_TYPES[str(value)]
                includes.append(f"#include <{include}>")
                lines.append(f"using dtype = {cpp_type};")
            else:
                lines.append(f"constexpr {field_named(name).type.__name__} {name} = {spell(value)};")
        if "head_dim" in self.fields and "head_dim_v" not in self.fields:
            lines.append("constexpr int head_dim_v = head_dim;")
        return "\n".join(["#pragma once", *includes, "", "namespace config {", *lines, "}", ""])


def spell(value: Value) -> str:
    """A value as the short name, YAML and C++ write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def spelled(values: Mapping[str, Any]) -> str:
    """Values by name: `dtype=bf16,head_dim=128`."""
    return ",".join(f"{name}={spell(value)}" for name, value in values.items())


def listing(values: Iterable[object]) -> str:
    """Values for an error message, numbers in their order: `16, 32, 64`."""
    values = list(values)
    numbers = [value for value in values if type(value) is int]
    if len(numbers) == len(values):
        values = sorted(numbers)
    return ", ".join(spell(value) if isinstance(value, bool) else str(value) for value in values)


def field_named(name: str) -> Field:
    """The field's declaration; ConfigError when there is none."""
    if found := FIELDS.get(name) or _of_ladders(name):
        return found
    raise ConfigError(f"unknown field {name}{instead(name, FIELDS, 'the fields are')}")


def is_field(name: str) -> bool:
    """Whether there is such a field."""
    return name in FIELDS or _of_ladders(name) is not None


def _of_ladders(name: str) -> Field | None:
    """A field that a ladder declares for its rungs, {page_size: {type: int, meaning: rows of a page}} in fields.yaml.

    ConfigError for what is none.
    """
    for path in own.declared("fields.yaml").values():
        try:
            if declared := _parsed(path.read_bytes()).get(name):
                return Field(name, _TYPES[declared["type"]], str(declared["meaning"]))
        except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: {name}: not a type ({', '.join(_TYPES)}) and a meaning: {error!r}") from None
    return None


_parsed = lru_cache(maxsize=64)(yaml_files.parsed)  # every value of every configuration asks; every choice, for GPUs


def parse_values(text: str) -> dict[str, Value]:
    """Typed values of `field=value,field=value`, as a short name or a command line gives them."""
    values: dict[str, Value] = {}
    for part in filter(None, (part.strip() for part in _split(text))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"{part!r} is not field=value, such as block_m=64")
        if name in values:
            raise ConfigError(f"{name} is given twice in {text!r}")
        values[name] = field_named(name).parse(value)
    return values


def _split(text: str) -> list[str]:
    """At the commas that stand within no brackets, as those of functions do."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def check_rules(rules: Iterable[Rule], values: Mapping[str, Value]) -> None:
    """Raises ConfigError for the first rule that the values break, naming the values that it is about."""
    for rule in rules:
        if not rule.holds(values):
            given = ", ".join(f"{name}={spell(value)}" for name, value in values.items() if name in rule.names)
            raise ConfigError(f"{given} breaks the rule {rule.require}: {rule.why}")


@dataclass(frozen=True)
class GpuDescription:
    """A GPU as its maker describes it (configs/gpus/<name>.yaml)."""

    name: str
    title: str
    names: tuple[str, ...]  # as its driver calls it
    memory_gb: int  # as its label says
    arch: str  # what to compile for: sm_80, sm_90a, ...
    num_sms: int
    shared_per_block: int  # bytes that one CTA may use
    shared_per_sm: int  # bytes
    registers_per_sm: int  # 32-bit registers
    max_threads_per_sm: int
    max_ctas_per_sm: int
    l2_bytes: int
    bandwidth_gb_s: float
    dense_bf16_tflops: float  # tensor cores, fp32 accumulation, without sparsity
    base_mhz: int | None  # None where the maker publishes none
    boost_mhz: int  # the highest SM clock
    sources: tuple[str, ...]
    unconfirmed: tuple[str, ...] = ()  # figures whose source is of another card; the device itself knows better


def gpu_names() -> list[str]:
    """The GPUs that configs/gpus describes."""
    return sorted(path.stem for path in (CONFIGS / "gpus").glob("*.yaml"))


def load_gpu(name: str) -> GpuDescription:
    """The description of a GPU by its short name, such as `h100`; ConfigError when there is none."""
    path = CONFIGS / "gpus" / f"{name.lower()}.yaml"
    if name.lower() not in gpu_names():
        raise unknown("description of the GPU", name, gpu_names())
    values = _parsed(path.read_bytes())
    expected = {field.name for field in dataclasses.fields(GpuDescription)} - {"name"}
    wrong = {*(expected - {"unconfirmed"} - values.keys()), *(values.keys() - expected)}
    if wrong:
        raise ConfigError(f"{path}: these keys are missing or unknown: {listing(sorted(wrong))}")
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return GpuDescription(name=name.lower(), **{**values, **lists})
