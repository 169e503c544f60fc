"""Random programs with branches and loops, against an interpreter that takes one thread at a time."""

import itertools
from contextlib import suppress

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import run_lanes

REGISTERS = ["a", "b", "c"]
THREADS, GRID = 64, 2
MASK = 0xFFFFFFFF

registers = st.sampled_from(REGISTERS)
constants = st.integers(0, 9)
assignments = st.tuples(
    st.just("set"), st.sampled_from(["add", "sub", "mul.lo", "xor"]), registers, registers, constants
)
conditions = st.tuples(st.sampled_from(["lt", "eq", "ge"]), registers, st.integers(0, 40))
guarded = st.tuples(st.just("guarded"), conditions, registers, constants)
leaves = st.tuples(st.just("leave"), conditions)


def compound(blocks):
    return st.one_of(
        st.tuples(st.just("if"), conditions, blocks, blocks),
        st.tuples(st.just("loop"), registers, blocks),  # (register & 3) rounds
    )


blocks = st.recursive(
    st.lists(st.one_of(assignments, guarded, leaves), max_size=3),
    lambda inner: st.lists(st.one_of(assignments, guarded, compound(inner)), min_size=1, max_size=4),
    max_leaves=8,
)


def compile_block(block, labels):
    """PTX of a block; every loop has a counter of its own."""
    lines = []
    for statement in block:
        kind, n = statement[0], next(labels)
        if kind == "set":
            _, operation, target, source, constant = statement
            type_name = "b32" if operation == "xor" else "u32"
            lines.append(f"{operation}.{type_name} {target}, {source}, {constant};")
        elif kind == "guarded":
            lines.append(f"{condition(statement[1])} @p add.u32 {statement[2]}, {statement[2]}, {statement[3]};")
        elif kind == "leave":
            lines.append(f"{condition(statement[1])} @p bra end;")
        elif kind == "if":
            _, test, then, otherwise = statement
            lines.append(f"{condition(test)} @!p bra else{n};")
            lines += [
                *compile_block(then, labels),
                f"bra fi{n};",
                f"else{n}:",
                *compile_block(otherwise, labels),
                f"fi{n}:",
            ]
        else:
            _, register, body = statement
            lines += [
                f".reg .b32 n{n}; and.b32 n{n}, {register}, 3;",
                f"loop{n}: setp.eq.u32 p, n{n}, 0; @p bra done{n};",
            ]
            lines += [f"sub.u32 n{n}, n{n}, 1;", *compile_block(body, labels), f"bra loop{n};", f"done{n}:"]
    return lines


def condition(test):
    comparison, register, constant = test
    return f"setp.{comparison}.u32 p, {register}, {constant};"


class Left(Exception):
    """The thread has gone to the end."""


def interpret(block, state):
    """Runs a block on one thread's registers."""
    for statement in block:
        kind = statement[0]
        if kind == "set":
            _, operation, target, source, constant = statement
            x = state[source]
            results = {"add": x + constant, "sub": x - constant, "mul.lo": x * constant, "xor": x ^ constant}
            state[target] = results[operation] & MASK
        elif kind == "guarded":
            if holds(statement[1], state):
                state[statement[2]] = (state[statement[2]] + statement[3]) & MASK
        elif kind == "leave":
            if holds(statement[1], state):
                raise Left
        elif kind == "if":
            interpret(statement[2] if holds(statement[1], state) else statement[3], state)
        else:
            for _ in range(state[statement[1]] & 3):
                interpret(statement[2], state)


def holds(test, state):
    comparison, register, constant = test
    return {"lt": state[register] < constant, "eq": state[register] == constant, "ge": state[register] >= constant}[
        comparison
    ]


@settings(max_examples=150, deadline=None)
@given(program=blocks, seed=st.integers(0, 1000))
def test_random_program(program, seed):
    random = np.random.default_rng(seed)
    starts = {name: random.integers(0, 40, THREADS * GRID, np.uint32) for name in REGISTERS}
    moves = "".join(f"mov.b32 {name}, start_{name};" for name in REGISTERS)
    code = moves + "\n".join(compile_block(program, itertools.count())) + "\nend:"
    inputs = {f"start_{name}": values for name, values in starts.items()}
    outputs, _ = run_lanes(
        code, inputs, dict.fromkeys(REGISTERS, "u4"), registers=".reg .pred p;", num_threads=THREADS, grid=GRID
    )
    for thread in range(THREADS * GRID):
        state = {name: int(values[thread]) for name, values in starts.items()}
        with suppress(Left):
            interpret(program, state)
        assert {name: int(outputs[name][thread]) for name in REGISTERS} == state
