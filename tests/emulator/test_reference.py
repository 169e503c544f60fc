"""The emulator against a second interpreter (reference/): every instruction, and random programs. They agree bit for
bit, but that any NaN equals any NaN."""

import re

import numpy as np
import pytest
from lanes import run_lanes
from random_programs import DECLARATIONS, REGISTERS, SUMS, random_program
from random_ptx import ALL_INSTRUCTIONS, FLOATS_OF_POOL, NAMES, POOLS, inputs_of, small_number
from reference import interpret
from reference.numbers import FORMATS, decode

from flashladder.common.emulator import compile_ptx
from flashladder.common.emulator.compile.emitter import BlockEmitter
from flashladder.common.emulator.execute import arithmetic, exchange
from flashladder.common.emulator.execute.scheduler import Scheduler
from flashladder.common.emulator.execute.vocabulary import VOCABULARY
from flashladder.common.errors import EmulatorError

NUM_PROGRAMS, NUM_SEEDS = 40, 2  # of the default run
CODES = {name: POOLS[name[0]][2] for name in NAMES} | dict.fromkeys(SUMS, "f4")


def bits_of(values):
    """A list of Python integers."""
    return [int(v) for v in (values if values.dtype == bool else values.view(f"u{values.itemsize}")).tolist()]


def width_of(code):
    return 1 if code == "?" else 8 * np.dtype(code).itemsize


def equal(kind, a, b):
    """Whether two patterns are equal, or both NaN in a float type; of packed halves, one after the other."""
    if a == b or kind is None:
        return a == b
    if kind in ("f16", "bf16"):
        halves = ((a >> shift & 0xFFFF, b >> shift & 0xFFFF) for shift in (0, 16))
        return all(x == y or (decode(FORMATS[kind], x) is None and decode(FORMATS[kind], y) is None) for x, y in halves)
    return decode(FORMATS[kind], a) is None and decode(FORMATS[kind], b) is None


def differences(code, inputs, outputs, **options):
    """(register, thread, the emulator's bits, the reference's bits) of all that differs, run on both."""
    registers, declarations = options.pop("registers", ""), options.pop("declarations", "")
    found, _ = run_lanes(code, inputs, outputs, registers=registers, declarations=declarations, **options)
    widths = {name: width_of("?" if values.dtype == bool else values.dtype.str[1:]) for name, values in inputs.items()}
    widths |= {name: width_of(code) for name, code in outputs.items()}
    expected = interpret(
        registers + code, {name: bits_of(v) for name, v in inputs.items()}, widths, declarations=declarations, **options
    )
    wrong = []
    for name in outputs:
        kind = "f32" if name in SUMS else FLOATS_OF_POOL.get(name[0])
        for thread, bits in enumerate(bits_of(found[name])):
            if not equal(kind, bits, expected[thread][name]):
                wrong.append((name, thread, hex(bits), hex(expected[thread][name])))
    return wrong


# -- one instruction


def differing_instructions(seed, instructions=ALL_INSTRUCTIONS, num_threads=128):
    """The instructions that give something else in some lane: (text, values of its operands, both results)."""
    random = np.random.default_rng(seed)
    inputs = inputs_of(num_threads, random)
    registers = ".reg .b16 odd16; .reg .b32 odd32; .reg .b64 odd64;"
    odd = "or.b16 odd16, h1, 1; or.b32 odd32, a1, 1; or.b64 odd64, l1, 1;"
    wrong = []
    for first in range(0, len(instructions), 60):
        lines, outputs = {}, {}
        for number, (opcode, pool, sources) in enumerate(instructions[first : first + 60]):
            targets = [f"p_{number}", f"p_{number}_q"] if pool == "q" else [f"{pool}_{number}"]
            outputs |= {target: POOLS[target[0]][2] for target in targets}
            operands = list(operands_of(opcode, sources, random))
            lines |= dict.fromkeys(targets, (f"{opcode} {'|'.join(targets)}, {', '.join(operands)};", operands))
        code = odd + "\n".join(dict.fromkeys(line for line, _ in lines.values()))
        for name, thread, *results in differences(code, inputs, outputs, registers=registers, num_threads=num_threads):
            line, operands = lines[name]
            values = [hex(bits_of(inputs[each])[thread]) if each in inputs else each for each in operands]
            wrong.append((line, values, *results))
    return wrong


def operands_of(opcode, sources, random):
    """The first register of a pool for its first operand in an instruction, and so on."""
    for n, source in enumerate(sources):
        if source == "n":
            yield str(small_number(opcode, random))
        else:
            yield f"odd{opcode[-2:]}" if source == "o" else f"{source}{sources[:n].count(source)}"


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_instruction(seed):
    assert differing_instructions(seed) == []


# -- programs


def differing_program(seed):
    """A random program, and where the emulator and the reference do not agree on it."""
    random = np.random.default_rng(seed)
    num_threads, grid = [(32, 1), (32, 2), (40, 1), (64, 1)][int(random.integers(4))]
    inputs = {f"i_{name}": values for name, values in inputs_of(num_threads * grid, random).items()}
    code = random_program(random, num_threads)
    options = {"registers": REGISTERS, "declarations": DECLARATIONS, "num_threads": num_threads, "grid": grid}
    return code, differences(code, inputs, CODES, **options)


@pytest.mark.parametrize("batch", range(4))
def test_random_programs(batch):
    for seed in range(batch, NUM_PROGRAMS, 4):
        code, wrong = differing_program(seed)
        assert not wrong, f"seed {seed}:\n{code}\n{wrong[:5]}"


@pytest.mark.slow
def test_many_more():
    for seed in range(1000, 1005):
        assert differing_instructions(seed) == []
    for seed in range(10_000, 10_300):
        code, wrong = differing_program(seed)
        assert not wrong, f"seed {seed}:\n{code}\n{wrong[:5]}"


# -- faults that the emulator once had, or might have: the comparison finds each


def without_nan(function):
    return lambda x, *rest: function(np.where(np.isnan(x), x.dtype.type(0), x), *rest)


def rounded_twice(wide, short):
    return lambda a, b, c: (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(short)


FAULTS = {
    "NaN converts to 0": ("cvt", arithmetic, "float_to_int", without_nan(arithmetic.float_to_int)),
    "relu makes NaN zero": ("cvt|fma", arithmetic, "max_nan", np.fmax),
    "fma of halves rounds twice": ("fma", arithmetic, "fma_odd", arithmetic.fma_f32),
    "fma of f32 rounds twice": ("fma", arithmetic, "fma_f32", rounded_twice("f8", "f4")),
    "fma of f64 rounds twice": ("fma", arithmetic, "fma_f64", rounded_twice("g", "f8")),
    "min takes any zero": ("min", arithmetic, "min_number", np.fmin),
    "max takes any zero": ("max", arithmetic, "max_number", np.fmax),
    "rounding down gives +0": ("add|sub", arithmetic, "fma_directed", lambda a, b, c, mode: arithmetic.round_directed(
        a.astype("f8") * b + c, mode)),
    "flush loses the sign": ("neg|mul", arithmetic, "flush", lambda x: np.where(np.abs(x) < 2.0**-126, np.float32(0),
        x)),
    "a predicate is its lowest bit": ("mov|xor", BlockEmitter, "_immediate_bits", lambda self, operand, code:
        operand.value & 1),
    "shifts wrap": ("shl", arithmetic, "shift_left", lambda a, n: a << (n % (8 * a.itemsize)).astype(a.dtype)),
}  # fmt: skip
FAULTS_OF_PROGRAMS = {
    "the lowest block first": (Scheduler, "_next", lambda self, warp: min(warp.ready)),
    "atom flushes nothing": (exchange, "flush", lambda x: x),
}  # fmt: skip


@pytest.fixture
def _compiled_anew():
    compile_ptx.cache_clear()
    yield
    compile_ptx.cache_clear()


@pytest.mark.usefixtures("_compiled_anew")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_instruction_is_found(fault, monkeypatch):
    opcodes, owner, name, replacement = FAULTS[fault]
    monkeypatch.setattr(owner, name, replacement)
    if owner is arithmetic:
        monkeypatch.setitem(VOCABULARY, name, replacement)
    chosen = [each for each in ALL_INSTRUCTIONS if re.match(rf"({opcodes})\b", each[0])]
    assert any(differing_instructions(seed, chosen) for seed in range(4))


@pytest.mark.usefixtures("_compiled_anew")
@pytest.mark.parametrize("fault", FAULTS_OF_PROGRAMS)
def test_a_fault_that_takes_a_program_is_found(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS_OF_PROGRAMS[fault])
    assert any(is_found(seed) for seed in range(2 * NUM_PROGRAMS))


def is_found(seed):
    try:
        return bool(differing_program(seed)[1])
    except EmulatorError:
        return True
