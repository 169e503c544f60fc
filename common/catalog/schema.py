"""What a version.yaml may say: its keys and their types, checked by pydantic, told in the words of whoever wrote it."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from flashladder.common import yaml_files
from flashladder.common.catalog.instruction_sets import INSTRUCTION_SETS
from flashladder.common.catalog.limiters import LIMITERS
from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import Value, listing
from flashladder.common.problem.head_dims import HEAD_DIM_STEP, padded_head_dim

FILE = "version.yaml"

StrictValue = StrictBool | StrictInt | StrictStr
Fields = dict[StrictStr, StrictValue]
ByHeadDim = dict[StrictInt, Fields]
Drawing = StrictStr | dict[StrictStr, StrictStr]  # of common/report/pictures: its name, or ways of roles by rungs
Mode = Literal["hot", "graph", "cold_graph", "cold", "sustained"]  # of timing: common/measure/timing.py


class Declared(BaseModel):
    """A mapping of a version.yaml: no unknown keys, no other types, nothing that changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Supports(Declared):
    """The problems an implementation takes. seqlen_*: `any`, or the config field of which it must be a multiple."""

    dtype: tuple[StrictStr, ...]
    head_dim: tuple[StrictInt, ...]
    apart: dict[StrictInt, StrictInt] = {}  # more of them, and the head_dim_v of their kernels, which is smaller
    narrower: StrictBool = False  # also what is padded to one of those: a head_dim, and a head_dim_v apart from it
    head_dim_v: tuple[StrictInt, ...] = ()  # of its kernels, beside that of head_dim; up to it if `narrower`
    seqlen_q: StrictStr = "any"
    seqlen_k: StrictStr = "any"
    causal: StrictBool = False
    gqa: StrictBool = False
    lse: StrictBool = True
    window: StrictBool = False
    softcap: StrictBool = False
    alibi: StrictBool = False
    sinks: StrictBool = False
    dropout: StrictBool = False
    mods: StrictBool = False  # a mask and a score that are expressions
    packed: StrictBool = False  # packed sequences, which are an operation beside `forward`
    rest: StrictBool = False  # of packed tensors it writes the rows behind the last sequence too
    # Of the operation, beside their defaults.
    options: dict[StrictStr, Literal["any"] | tuple[StrictValue | StrictFloat, ...]] = {}

    def columns(self, head_dim: int) -> int:
        """The head_dim of the kernel that takes a head_dim, if one does."""
        return padded_head_dim(head_dim) if self.narrower else head_dim

    def takes_head_dim(self, head_dim: int) -> bool:
        """Whether one of its kernels does."""
        return self.columns(head_dim) in (*self.head_dim, *self.apart)

    def head_dims(self) -> str:
        """Those it takes, in words."""
        narrower = f", or a multiple of {HEAD_DIM_STEP} that is padded to one of them" if self.narrower else ""
        apart = "".join(f"; {head_dim} with head_dim_v up to {of_v}" for head_dim, of_v in self.apart.items())
        return f"{listing(self.head_dim)}{narrower}{apart}"

    def columns_v(self, head_dim: int, head_dim_v: int) -> int:
        """The head_dim_v of the kernel that takes both: of several that are wide enough the narrowest."""
        columns = self.columns(head_dim)
        wide_enough = (each for each in self.head_dim_v if head_dim_v <= each <= columns)
        return min(wide_enough, default=self.apart.get(columns, columns))

    def refusal_of_v(self, head_dim: int, head_dim_v: int) -> str | None:
        """Why it does not take a head_dim_v with a head_dim that it takes, after the name; None where it does."""
        if self.narrower:
            columns = self.columns(head_dim)
            most = self.apart.get(columns, columns)
            takes = head_dim_v <= most and head_dim_v % HEAD_DIM_STEP == 0
            known = f"in multiples of {HEAD_DIM_STEP} up to {most} with head_dim={head_dim}"
        elif self.head_dim_v:
            takes, known = head_dim_v in self.head_dim_v, listing(self.head_dim_v)
        else:
            takes, known = head_dim_v == head_dim, f"{head_dim}, as head_dim"
        return None if takes else f"takes head_dim_v {known}, not {head_dim_v}"

    def refusal(self, option: str, value: Value, usual: Value | None) -> str | None:
        """Why it does not take an option's unusual value, to be read after the name; None where it does."""
        taken = self.options.get(option, ())
        if taken == "any" or value in taken:
            return None
        known = dict.fromkeys((*(() if usual is None else (usual,)), *taken))
        return f"takes {option} {listing(known)}, not {listing([value])}"


class DeclaredChoice(Declared):
    """A configuration field: its default, and the values it may take (`any`: what its type allows)."""

    default: StrictValue
    values: Literal["any"] | tuple[StrictValue, ...]


class SmallSm(Declared):
    """The defaults for a GPU whose SMs have less than `below` bytes of shared memory: fields by head_dim."""

    below: StrictInt
    defaults: ByHeadDim


class DeclaredRule(Declared):
    """A rule of its own, as common/problem/rules.py has it."""

    require: StrictStr
    why: StrictStr


class Declaration(Declared):
    """What rungs and references declare alike."""

    title: StrictStr
    idea: StrictStr
    supports: Supports
    config: dict[StrictStr, DeclaredChoice]
    operation: StrictStr | None = None  # its name, where it is not the ladder's
    kernel: StrictStr | None = None  # the file, where it is not the usual one
    rules: tuple[DeclaredRule, ...] = ()  # on top of config.RULES
    defaults: ByHeadDim = {}  # where they are not those of `config`
    defaults_apart: ByHeadDim = {}  # nor those, where V has fewer columns
    defaults_with: dict[StrictStr, ByHeadDim] = {}  # nor those, where a field is true
    defaults_narrower: ByHeadDim = {}  # nor these, where tensors have fewer columns
    small_sm: SmallSm | None = None


def one_of(*known: str) -> AfterValidator:
    """Of a closed vocabulary."""

    def check(value: str) -> str:
        if value not in known:
            raise PydanticCustomError("one_of", "is not one of {known}", {"known": listing(known)})
        return value

    return AfterValidator(check)


class Step(Declared):
    """A step from the rung below that is larger than steps are: how many lines it may have, and why."""

    lines: StrictInt
    why: StrictStr


class RungDeclaration(Declaration):
    """The version.yaml of a rung."""

    instruction_set: Annotated[StrictStr, one_of(*INSTRUCTION_SETS)]
    local_memory: StrictBool = False
    addresses: tuple[Annotated[StrictStr, one_of(*LIMITERS)], ...] = ()  # what its idea removes or makes less of
    parent: StrictStr | None = None  # what it is compared with, where that is not the rung below
    draft: StrictBool = False  # its page is not written yet
    step: Step | None = None
    no_exercise: StrictStr = ""  # why its idea makes none
    milestone: StrictStr = ""  # of a rung that the README's table has: what is new since the one before it there
    pictures: dict[StrictStr, Drawing] = {}  # NAME.svg of its page, and what it shows


class ReferenceDeclaration(Declaration):
    """The version.yaml of a reference."""

    operation: StrictStr
    devices: tuple[Annotated[StrictStr, one_of("cpu", "gpu")], ...]
    requires: dict[StrictStr, StrictStr] = {}


Kind = TypeVar("Kind", bound=Declared)


def read(path: Path, kind: type[Kind]) -> Kind:
    """What a YAML file declares; ConfigError says what is wrong with it, all at once."""
    try:
        return kind.model_validate(yaml_files.parsed(path.read_bytes()))
    except yaml.YAMLError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as invalid:
        raise ConfigError("; ".join(_in_words(error, kind) for error in invalid.errors())) from None


def _in_words(error: ErrorDetails, kind: type[Declared]) -> str:
    """One of pydantic's errors, as it is said here: where, what was given, and what would work."""
    *outer, last = error["loc"] or ("",)
    given: Any = error["input"]
    match error["type"]:
        case "missing":
            return _at(outer, f"the key {last} is missing")
        case "extra_forbidden":
            return _at(outer, f"unknown key {last}; the keys here are {listing(_keys(kind, outer))}")
        case "model_type":
            return _at(error["loc"], f"{given!r} is not a mapping with the keys {listing(_keys(kind, error['loc']))}")
        case "one_of":
            name = next(step for step in reversed(error["loc"]) if isinstance(step, str))
            return f"{name}={given} {error['msg']}"
        case _:
            return _at(error["loc"], f"{given!r}: {error['msg'][0].lower()}{error['msg'][1:]}")


def _at(place: "list[int | str] | tuple[int | str, ...]", text: str) -> str:
    return f"{'.'.join(map(str, place))}: {text}" if place else text


def _keys(kind: type[Declared], place: "list[int | str] | tuple[int | str, ...]") -> list[str]:
    """The keys of the mapping at a place."""
    for step in place:
        if field := kind.model_fields.get(str(step)):
            kind = _inner(field.annotation) or kind
    return sorted(kind.model_fields)


def _inner(annotation: Any) -> type[Declared] | None:
    """The mapping that a type speaks of: X of `tuple[X, ...]`, `dict[str, X]` and `X | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Declared):
        return annotation
    return next(filter(None, map(_inner, getattr(annotation, "__args__", ()))), None)
