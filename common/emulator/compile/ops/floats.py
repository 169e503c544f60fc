"""Arithmetic on f32 and f64 (PTX ISA, "Floating-Point Instructions"). Arithmetic is numpy's of the same type, which
rounds to nearest even; .approx functions are right to the last bit or two, not what the hardware's tables give."""

from .registry import Match, alu

_SIGN = {"add": "+", "sub": "-", "mul": "*"}
_FTZ = r"(?P<ftz>\.ftz)?"
_SAT = r"(?P<sat>\.sat)?"
_UNARY = {
    "rcp": "np.reciprocal({})",
    "sqrt": "np.sqrt({})",
    "rsqrt": "np.reciprocal(np.sqrt({}))",
    "ex2": "np.exp2({})",
    "lg2": "np.log2({})",
    "sin": "np.sin({})",
    "cos": "np.cos({})",
    "tanh": "np.tanh({})",
}


def _flushed(m: Match, result: str, *sources: str) -> str:
    """Applies the .ftz and .sat of an instruction whose `result` is a format over its sources."""
    found = m.groupdict()
    if found.get("ftz"):
        result = f"flush({result.format(*(f'flush({source})' for source in sources))})"
    else:
        result = result.format(*sources)
    return f"saturate({result})" if found.get("sat") else result


@alu(rf"(?P<f>add|sub|mul|fma|mad)\.(?P<mode>rz|rm|rp){_FTZ}{_SAT}\.(?P<t>f32)")
def directed(m: Match, *sources: str) -> str:
    forms = {
        "add": "fma_directed({}, f4.type(1), {}, MODE)",
        "sub": "fma_directed({}, f4.type(1), -{}, MODE)",
        "mul": "round_directed({}.astype(f8) * {}, MODE)",
    }
    return _flushed(m, forms.get(m["f"], "fma_directed({}, {}, {}, MODE)").replace("MODE", repr(m["mode"])), *sources)


@alu(rf"(add|sub|mul)(?:\.rn)?{_FTZ}{_SAT}\.(?P<t>f32)")
def arithmetic(m: Match, a: str, b: str) -> str:
    return _flushed(m, f"{{}} {_SIGN[m[1]]} {{}}", a, b)


@alu(r"(add|sub|mul)(?:\.rn)?\.(?P<t>f64)")
def arithmetic_f64(m: Match, a: str, b: str) -> str:
    return f"{a} {_SIGN[m[1]]} {b}"


@alu(rf"(fma|mad)\.rn{_FTZ}{_SAT}\.(?P<t>f32)")
def fma(m: Match, a: str, b: str, c: str) -> str:
    return _flushed(m, "fma_f32({}, {}, {})", a, b, c)


@alu(r"(fma|mad)\.rn\.(?P<t>f64)")
def fma_f64(m: Match, a: str, b: str, c: str) -> str:
    return f"fma_f64({a}, {b}, {c})"


@alu(rf"div\.(rn|approx|full){_FTZ}\.(?P<t>f32)")
def divide(m: Match, a: str, b: str) -> str:
    return _flushed(m, "divide_approximately({}, {})" if m[1] == "approx" else "{} / {}", a, b)


@alu(r"div\.rn\.(?P<t>f64)")
def divide_f64(m: Match, a: str, b: str) -> str:
    return f"{a} / {b}"


@alu(rf"(rcp|sqrt)\.(?:rn|approx){_FTZ}\.(?P<t>f32)")
def reciprocal(m: Match, a: str) -> str:
    return _flushed(m, _UNARY[m[1]], a)


@alu(rf"(rsqrt|ex2|lg2|sin|cos)\.approx{_FTZ}\.(?P<t>f32)")
def approximate(m: Match, a: str) -> str:
    return _flushed(m, _UNARY[m[1]], a)


@alu(r"tanh\.approx\.(?P<t>f32)")
def tanh(m: Match, a: str) -> str:
    return _UNARY["tanh"].format(a)


@alu(r"(rcp|sqrt)\.rn\.(?P<t>f64)")
def reciprocal_f64(m: Match, a: str) -> str:
    return _UNARY[m[1]].format(a)


@alu(rf"(min|max){_FTZ}(?P<nan>\.NaN)?\.(?P<t>f32)")
def min_max(m: Match, a: str, b: str) -> str:
    return _flushed(m, f"{m[1]}_{'nan' if m['nan'] else 'number'}({{}}, {{}})", a, b)


@alu(r"(min|max)\.(?P<t>f64)")
def min_max_f64(m: Match, a: str, b: str) -> str:
    return f"{m[1]}_number({a}, {b})"


@alu(rf"(abs|neg){_FTZ}\.(?P<t>f32)")
def abs_neg(m: Match, a: str) -> str:
    return _flushed(m, "np.abs({})" if m[1] == "abs" else "-{}", a)


@alu(r"(abs|neg)\.(?P<t>f64)")
def abs_neg_f64(m: Match, a: str) -> str:
    return f"np.abs({a})" if m[1] == "abs" else f"-{a}"


@alu(r"copysign\.(?P<t>f32|f64)")
def copysign(m: Match, a: str, b: str) -> str:
    """The sign of `a` on the magnitude of `b`."""
    return f"np.copysign({b}, {a})"
