"""Masks by expressions as other people's kernels take them: functions of an element's positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashladder.common.expression import Mods
from flashladder.common.expression.tree import Binary, Call, Name, Node, Number, Unary, names, walk
from flashladder.common.problem.problem import Problem

WORDS = {"sqrt": "sqrt", "int": "whole", "float": "real"}  # of expressions, and what a library's functions are here
_OPERATORS = {"&&": "&", "||": "|", "!": "~"}


def refusal(problem: Problem) -> str | None:
    """Why nobody else is given its mask, to be read after a title; None where there is none, or a plain one."""
    mods = Mods.parse(problem.mods)
    if mods.score or mods.tensors:
        return "is given no score, and no mask that reads tensors, here"
    if problem.mods and problem.window:
        return "is given no window beside a mask here"
    parts = walk(mods.mask) if mods.mask else ()
    if any(not _is_plain(part) for part in parts):
        return f"is given masks of operators and {', '.join(WORDS)} alone here"
    return None


def _is_plain(node: Node) -> bool:
    return isinstance(node, (Number, Name, Unary, Binary)) or (isinstance(node, Call) and node.function in WORDS)


def source(problem: Problem) -> str:
    """The mask as Python, a causal one too: whether row q, counted from 0, sees key k."""
    behind = problem.seqlen_k - problem.seqlen_q
    places = {"q": f"(q + {behind})" if behind else "q", "seqlen_q": str(problem.seqlen_q)}
    places["seqlen_k"] = str(problem.seqlen_k)
    parts = [f"(k <= {places['q']})"] if problem.causal else []
    if mask := Mods.parse(problem.mods).mask:
        parts.append(_python(mask, places))
    return "lambda b, h, q, k, *_: " + " & ".join(parts)


def function(problem: Problem, words: Mapping[str, Any]) -> Callable[..., Any]:
    """The same, to be called: on what `words` work on."""
    found: Callable[..., Any] = eval(source(problem), dict(words))  # printed from a tree
    return found


def sizes(problem: Problem) -> tuple[int | None, int | None]:
    """For how many sequences and heads the mask differs; None: for none."""
    mask = Mods.parse(problem.mods).mask
    read = names(mask) if mask else set()
    return (problem.batch if "b" in read else None), (problem.num_heads if "h" in read else None)


def _python(node: Node, places: Mapping[str, str]) -> str:
    match node:
        case Number(value=value):
            return repr(value)
        case Name(name=name):
            return places.get(name, name)
        case Call(function=called, arguments=arguments):
            return f"{WORDS[called]}({', '.join(_python(each, places) for each in arguments)})"
        case Unary(operator=operator, operand=operand):
            return f"({_OPERATORS.get(operator, operator)}{_python(operand, places)})"
        case Binary(operator=operator, left=left, right=right):
            word = "//" if operator == "/" and node.type.is_whole else _OPERATORS.get(operator, operator)
            return f"({_python(left, places)} {word} {_python(right, places)})"
    raise TypeError(node)
