"""What a cell of a log may hold. A file may come from a stranger, and its cells go to pages, pictures and terminals.

So a number is one that can have been measured. A text has the characters that its column needs: none of them makes
HTML, a link, a formula or a terminal's command. An expression in a configuration compares with < and >, so it is only
taken if it parses; pages and pictures escape what they show.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from flashladder.common.catalog.schema import one_of as one_of
from flashladder.common.errors import ConfigError, ExpressionError, UnsupportedProblemError
from flashladder.common.expression import Mods
from flashladder.common.problem.config import MODS, parse_values
from flashladder.common.problem.problem import operation_named

Count = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # 1e36, of the largest numbers of bf16
PositiveFloat = Annotated[float, Field(ge=1e-12, le=1e12)]  # a time, rate or ratio
Share = Annotated[float, Field(ge=0, le=1)]
Flag = Annotated[Literal["true", "false"], AfterValidator("true".__eq__)]


def refusal(words: str) -> PydanticCustomError:
    """The error for a cell that is not as it should be."""
    return PydanticCustomError("cell", "{words}", {"words": words})


def _error(value: float) -> float:
    if value < 0:
        raise refusal("should not be negative")
    return value


Error = Annotated[float, AfterValidator(_error)]  # of a wrong output it may be infinite, or no number
Signed = Annotated[float, Field()]  # the same, where it has a direction


def text(pattern: str, words: str) -> AfterValidator:
    """Takes the texts of a pattern, which the words describe."""
    expression = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if not expression.fullmatch(value):
            raise refusal(f"should be {words}")
        return value

    return AfterValidator(check)


Name = Annotated[
    str,
    text(
        r"(?!www\.)\w[\w.+-]{0,99}(/\w[\w.+-]{0,99})?", "a name of letters, digits and _ . + -, such as 02 or swizzling"
    ),
]
Arch = Annotated[str, text(r"sm_\d{2,3}[a-z]?", "an architecture, such as sm_90a")]
Release = Annotated[str, text(r"\d[\w.+-]{0,99}", "a release, such as 2.11.0+cu130")]
Time = Annotated[
    str, text(r"\d{4}-\d\d-\d\d([T ][\d:.]{1,20}([+-]\d\d:\d\d|Z)?)?", "a time, such as 2026-01-02T03:04:05+00:00")
]
Pairs = Annotated[str, text(r"(?!www\.)\w[\w.+/=,-]{0,999}", "fields with values, such as block_m=64,num_warps=4")]
Words = Annotated[
    str,
    text(  # with // or www. a word would become a link
        r"(?!.*(//|www\.))\w[\w .,;:%()/+@'#=-]{0,499}",
        "words of letters and digits, with . , ; : % ( ) / + - between, and no address",
    ),
]
Free = Annotated[str, text(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*", "a line without control characters")]
_PLAIN: TypeAdapter[str] = TypeAdapter(Pairs)


def _config(value: str) -> str:
    """With other characters in its expressions alone, which are spelled as their trees are."""
    plain = value
    try:
        if mods := str(parse_values(value).get(MODS, "")):
            plain = value.replace(f"{MODS}={Mods.parse(mods).spelled}", MODS)
    except (ConfigError, ExpressionError) as error:
        _PLAIN.validate_python(value)
        raise refusal(f"cannot be read: {error}") from None
    _PLAIN.validate_python(plain)
    return value


ConfigText = Annotated[str, AfterValidator(_config)]  # a configuration's name


def _operation(value: str) -> str:
    try:
        operation_named(value)
    except UnsupportedProblemError as error:
        raise refusal(str(error).partition(": ")[2]) from None
    return value


Operation = Annotated[Name, AfterValidator(_operation)]

_TIMES = TypeAdapter(list[PositiveFloat])


def _round_times(value: str) -> str:
    _TIMES.validate_python(value.split())
    return value


RoundTimes = Annotated[str, text(r"[\d.e+ -]*", "times with spaces between"), AfterValidator(_round_times)]

_KINDS = {str: Free, int: Count, float: Finite, bool: Flag}  # what a plain type stands for


def kind(column: Any) -> Any:
    """What the cells of a column may hold; a plain type will do."""
    return _KINDS.get(column, column)


def base(column: Any) -> Any:
    """The type of a column's cells, in Python."""
    return column.__origin__ if get_origin(column) is Annotated else column
