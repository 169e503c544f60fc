"""What a program asks of attention: which problems, how often; and which of them are alike."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashladder.common.catalog import Card, Version, choice, winners
from flashladder.common.errors import ConfigError, ResultsError, UnsupportedProblemError
from flashladder.common.problem.config import GpuDescription
from flashladder.common.problem.problem import Problem

FORMAT = 1
_DERIVED = ("batch", "seqlen_q", "seqlen_k", "total_q", "total_k")  # of packed sequences: their lengths say these
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Alike:
    """Problems of one kind, and of one number of heads and length up to a factor of two; `problem` is the heaviest."""

    problem: Problem
    calls: int
    different: int  # problems
    weight: float  # of all calls, in calls of `problem`: by the least that a GPU can take for each

    @property
    def kind(self) -> str:
        """That winners belong to."""
        return winners.name_of(self.problem)


@dataclass(frozen=True)
class Demand:
    """The problems of a program with the number of calls; and of calls that are none for kernels here, the reasons."""

    command: tuple[str, ...]
    calls: Mapping[Problem, int]
    refused: Mapping[str, int]

    def only(self, refusal: Callable[[Problem], str | None]) -> Demand:
        """Those that are not refused; the others' reasons are counted among the refused."""
        calls, refused = {}, dict(self.refused)
        for problem, count in self.calls.items():
            if reason := refusal(problem):
                refused[reason] = refused.get(reason, 0) + count
            else:
                calls[problem] = count
        return Demand(self.command, calls, refused)

    def alike(self, gpu: GpuDescription) -> list[Alike]:
        """The problems in groups, those first that should take most of the GPU's time."""
        groups: dict[object, dict[Problem, int]] = {}
        for problem, count in self.calls.items():
            groups.setdefault(_likeness(problem), {})[problem] = count
        made = []
        for members in groups.values():
            least = {problem: least_us(problem, gpu) for problem in members}
            heaviest = max(members, key=lambda problem: members[problem] * least[problem])
            weight = sum(count * least[problem] for problem, count in members.items()) / least[heaviest]
            made.append(Alike(heaviest, sum(members.values()), len(members), weight))
        return sorted(made, key=lambda each: -each.weight * least_us(each.problem, gpu))

    def save(self, file: Path) -> None:
        """As JSON. ResultsError where that cannot be written."""
        content = {
            "format": FORMAT,
            "command": list(self.command),
            "problems": [{"calls": count, **fields_of(problem)} for problem, count in self.calls.items()],
            "refused": [{"calls": count, "reason": reason} for reason, count in self.refused.items()],
        }
        write_json(file, content)

    @classmethod
    def load(cls, file: Path) -> Demand:
        """What was saved; ResultsError where the file is missing or no such file."""
        content = read_json(file)
        try:
            if content["format"] != FORMAT:
                raise ResultsError(f"{file} has format {content['format']}, this program reads {FORMAT}: record anew")
            calls = {_problem(each): _count(each) for each in content["problems"]}
            refused = {str(each["reason"]): _count(each) for each in content["refused"]}
            return cls(tuple(map(str, content["command"])), calls, refused)
        except (KeyError, TypeError, ValueError, UnsupportedProblemError) as error:
            raise ResultsError(
                f"{file} is no record of a program: {type(error).__name__} {error}. Record anew"
            ) from None


def least_us(problem: Problem, gpu: GpuDescription) -> float:
    """Microseconds that the GPU takes at least: at the peak of its tensor cores, or of its memory."""
    p = problem
    rows, keys = (p.total_q, p.total_k) if p.packed else (p.batch * p.seqlen_q, p.batch * p.seqlen_k)
    num_bytes = 2 * _ELEMENT_BYTES * p.head_dim * (rows * p.num_heads + keys * p.num_heads_k)
    return max(p.flops / gpu.dense_bf16_tflops / 1e6, num_bytes / gpu.bandwidth_gb_s / 1e3)


def chooser(card: Card, version: str, folder: Path) -> Callable[[Problem], Version]:
    """What gives the rung that `attention(version=...)` launches for a problem, with what is adopted in a folder."""
    return lambda problem: choice(problem, card, version, folder)[0]


def refusal(choose: Callable[[Problem], Version], problem: Problem) -> str | None:
    """Why no rung is chosen for a problem, in words that are the same for all such problems."""
    try:
        choose(problem)
    except (ConfigError, UnsupportedProblemError) as refused:
        return str(refused).partition(";")[0]
    return None


def stand_in(problem: Problem) -> Problem:
    """The plain problem that is nearest: it is what winners are found with, and what torch's kernels compute too.

    Packed sequences become a batch of the longest, of as many tokens; windows, softcaps, ALiBi and dropout
    are left out.
    """
    plain: dict[str, Any] = {"window_left": None, "window_right": None, "softcap": 0.0, "alibi": False}
    plain["dropout_p"] = 0.0
    if problem.packed:
        plain |= {
            "operation": "forward",
            "batch": max(1, problem.total_q // problem.seqlen_q),
            **dict.fromkeys(("seqlens_q", "seqlens_k"), ()),
            **dict.fromkeys(("total_q", "total_k")),
        }
    return dataclasses.replace(problem, **plain)


def read_json(file: Path) -> Any:
    """What is in a file of JSON; ResultsError where there is none."""
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise ResultsError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ResultsError(f"{file} is damaged: {error}") from None


def write_json(file: Path, content: object) -> None:
    """Replaces the file whole. ResultsError where that cannot be done."""
    try:
        temporary = file.with_name(f".{file.name}.new")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(file)
    except OSError as error:
        raise ResultsError(f"cannot write {file}: {error.strerror or error}") from error


def fields_of(problem: Problem) -> dict[str, Any]:
    """Those of a problem that say it all, as far as they are not the defaults; a softmax_scale is left out."""
    usual = {each.name: each.default for each in dataclasses.fields(Problem)}
    usual |= {"num_heads_k": problem.num_heads, "head_dim_v": problem.head_dim}
    values = {name: value for name, value in dataclasses.asdict(problem).items() if value != usual[name]}
    for name in ("softmax_scale", *(_DERIVED if problem.packed else ())):
        values.pop(name, None)
    return values


def _problem(values: Mapping[str, Any]) -> Problem:
    return Problem(**{name: value for name, value in values.items() if name != "calls"})


def _count(values: Mapping[str, Any]) -> int:
    if type(count := values["calls"]) is not int or count < 1:
        raise ValueError(f"calls={count!r} is no number of calls")
    return count


def _likeness(problem: Problem) -> object:
    p = problem
    sizes = p.num_heads, p.num_heads_k, None if p.packed else p.batch
    lengths = p.seqlen_q.bit_length(), p.seqlen_k.bit_length()
    features = p.window_left, p.window_right, p.softcap > 0, p.alibi, p.dropout_p > 0
    return p.operation, winners.name_of(p), p.lse, sizes, lengths, *features
