"""Random typed trees, and tensors that they read within their bounds."""

import random

import torch

from flashladder.common.errors import ExpressionError
from flashladder.common.expression import Mods, typed
from flashladder.common.expression.tree import (
    DTYPES,
    POSITIONS,
    SCORE,
    SIZES,
    Declared,
    Element,
    Name,
    Node,
    Number,
    Span,
    Type,
)
from flashladder.common.problem.modified import modified

EXTENT = 8  # of every dimension of a tensor
TENSORS = (
    Declared("seen", "bool", 1),
    Declared("image", "int32", 1),
    Declared("small", "uint8", 2),
    Declared("wide", "int64", 1),
    Declared("all", "int16", 0),
    Declared("slope", "fp32", 1),
    Declared("bias", "fp64", 2),
)
S = Name(name=SCORE, type=Type.FLOAT)
GROWING = ("abs", "floor", "ceil", "float", "sqrt", "exp", "exp2", "log", "log2", "tanh", "sin", "cos")
EXACT = ("min", "max", "abs", "floor", "ceil", "sqrt", "float", "int")  # functions that every machine rounds alike


def never(span: Span, message: str) -> ExpressionError:
    raise AssertionError(message)


def random_tree(chance: random.Random, kind: Type, depth: int) -> Node:
    """A tree of a type, so deep at most."""
    if depth == 0 or chance.random() < 0.1:
        return _leaf(chance, kind)
    below = depth - 1
    make = chance.choice(_KINDS[kind])
    return make(chance, kind, below)


def random_mask(chance: random.Random, depth: int) -> Mods:
    """One that hides some keys of some rows: most random trees are constant."""
    while True:
        mods = Mods.parse(Mods(mask=random_tree(chance, Type.BOOL, depth)).spelled)
        scores = modified(mods, random_tensors(seed=1), torch.zeros(2, 9, 16), 1, 0, (9, 16))
        if 0.1 < scores.isinf().float().mean() < 0.9:
            return mods


def random_score(chance: random.Random, depth: int) -> Node:
    """One that s is in, and elements of tensors of floats: of all that grows, bounded lest it overflows."""
    if depth == 0:
        return chance.choice((S, S, _element(chance, Type.FLOAT, 0), _leaf(chance, Type.FLOAT)))
    below = [random_score(chance, depth - 1) for _ in range(2)]
    kind = chance.randrange(4)
    if kind == 0:
        return typed.binary(chance.choice("+-*/"), *below, Span(0, 0), never)
    if kind == 1:
        return typed.call(chance.choice(("min", "max")), below, Span(0, 0), never)
    if kind == 2:
        return typed.choice(random_tree(chance, Type.BOOL, 2), *below, Span(0, 0), never)
    name = chance.choice(GROWING)
    bounded = typed.call("sin", below[:1], Span(0, 0), never) if name in ("exp", "exp2") else below[0]
    return typed.call(name, [bounded], Span(0, 0), never)


def _leaf(chance: random.Random, kind: Type) -> Node:
    if kind == Type.BOOL:
        return Number(value=chance.random() < 0.5, type=kind)
    if kind == Type.INT and chance.random() < 0.7:
        return Name(name=chance.choice((*POSITIONS, *SIZES)), type=kind)
    values = {
        Type.INT: ("0", "1", "7", "0x7fffffff"),
        Type.LONG: ("2147483648", "4294967297"),
        Type.FLOAT: ("0.5", "1e-3", "3.0"),
    }
    return typed.number(chance.choice(values[kind]), Span(0, 0), never)


def _number_type(chance: random.Random) -> Type:
    return chance.choice((Type.INT, Type.INT, Type.LONG, Type.FLOAT))


def _choice(chance: random.Random, kind: Type, depth: int) -> Node:
    condition = random_tree(chance, Type.BOOL, depth)
    return typed.choice(
        condition, random_tree(chance, kind, depth), random_tree(chance, kind, depth), Span(0, 0), never
    )


def _element(chance: random.Random, kind: Type, depth: int) -> Node:
    tensor = chance.choice([each for each in TENSORS if DTYPES[each.dtype] == kind])
    last = Number(value=EXTENT - 1, type=Type.INT)
    indices = [
        typed.binary("&", random_tree(chance, chance.choice((Type.INT, Type.LONG)), depth), last, Span(0, 0), never)
        for _ in range(tensor.rank)
    ]
    return Element(tensor=tensor, indices=tuple(indices), type=kind)


def _compared(chance: random.Random, _kind: Type, depth: int) -> Node:
    if chance.random() < 0.2:
        operands, signs = [Type.BOOL] * 2, typed.EQUALITY
    else:
        operands, signs = [_number_type(chance) for _ in range(2)], (*typed.EQUALITY, *typed.ORDER)
    left, right = (random_tree(chance, each, depth) for each in operands)
    return typed.binary(chance.choice(signs), left, right, Span(0, 0), never)


def _logic(chance: random.Random, kind: Type, depth: int) -> Node:
    if chance.random() < 0.2:
        return typed.unary("!", random_tree(chance, kind, depth), Span(0, 0), never)
    sign = chance.choice((*typed.LOGIC, *typed.BITS))
    return typed.binary(sign, random_tree(chance, kind, depth), random_tree(chance, kind, depth), Span(0, 0), never)


def _arithmetic(chance: random.Random, kind: Type, depth: int) -> Node:
    if chance.random() < 0.15:
        sign = chance.choice("-~" if kind.is_whole else "-")
        return typed.unary(sign, random_tree(chance, kind, depth), Span(0, 0), never)
    whole = (*typed.BITS, *typed.SHIFTS, "%") if kind.is_whole else ()
    sign = chance.choice(("+", "-", "*", "/", *whole))
    lower = [each for each in (Type.INT, Type.LONG, Type.FLOAT) if each <= kind]
    other = chance.choice(lower)
    operands = [random_tree(chance, kind, depth), random_tree(chance, other, depth)]
    if sign not in typed.SHIFTS:
        chance.shuffle(operands)
    return typed.binary(sign, *operands, Span(0, 0), never)


def _call(chance: random.Random, kind: Type, depth: int) -> Node:
    names = [name for name in EXACT if typed.FUNCTIONS[name].result in (None, kind)]
    name = chance.choice(names)
    of = kind if typed.FUNCTIONS[name].result is None else _number_type(chance)
    arguments = [random_tree(chance, of, depth) for _ in range(typed.FUNCTIONS[name].arguments)]
    return typed.call(name, arguments, Span(0, 0), never)


_NUMBERS = (_choice, _element, _arithmetic, _arithmetic, _call)
_TRUTHS = (_choice, _element, _compared, _compared, _logic, _logic)
_KINDS = {**dict.fromkeys(Type, _NUMBERS), Type.BOOL: _TRUTHS}


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Those of TENSORS."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = {"fp32": torch.float32, "fp64": torch.float64}
    return {
        each.name: (4 * torch.randn((EXTENT,) * each.rank, generator=generator))
        .abs()
        .to(dtypes.get(each.dtype) or getattr(torch, each.dtype))
        for each in TENSORS
    }
