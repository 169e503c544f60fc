"""Threads that execute a text of PTX, each on its own until it has to wait for others.

A thread waits at a barrier for its CTA, and at a .sync or .aligned instruction for the threads of its warp that the
instruction names, wherever each of them came from: PTX asks for no more (since Volta, "Independent Thread Scheduling").
"""

import re
from dataclasses import dataclass, field

from . import numbers
from .instructions import semantics, width_of
from .numbers import FORMATS, decode, encode

# Where the variables of a space begin; generic addresses are the same, and tell the space.
BASES = {"shared": 1 << 20, "local": 1 << 24, "global": 1 << 32}
TOGETHER = ("shfl", "vote", "redux", "mma", "ldmatrix", "bar", "barrier")
TYPES_OF_WIDTH = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


class UndefinedError(Exception):
    """The program does what PTX leaves undefined, or waits for ever."""


@dataclass
class Statement:
    """An instruction: its guard (register, whether negated), opcode, and operands as text."""

    guard: tuple[str, bool] | None
    opcode: str
    operands: list[str]

    def __post_init__(self):
        self.root = self.opcode.split(".")[0]


@dataclass
class Thread:
    """One thread. `waits` is the values it brought to an instruction that it executes together with others."""

    number: int
    cta: int
    registers: dict[str, int]
    local: bytearray
    place: int = 0
    waits: tuple | None = None
    left: bool = False

    @property
    def lane(self):
        return self.number % 32


@dataclass
class Program:
    """Statements, the places of labels, the widths of registers, and where variables lie."""

    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    variables: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BASES, 0))


def parse(code, declarations):
    program = Program()
    for space, align, size in re.findall(r"\.(\w+) \.align (\d+) \.b8 \w+\[(\d+)\];", declarations):
        program.sizes[space] += -program.sizes[space] % int(align) + int(size)
    for space, name, size in re.findall(r"\.(\w+) \.align \d+ \.b8 (\w+)\[(\d+)\];", declarations):
        program.variables[name] = BASES[space] + program.sizes[space] - int(size)  # one variable a space
    for text in re.findall(r"[\w$]+:|[^;:]+(?:::[^;:]+)*;", code):
        text = text.strip().removesuffix(";").strip()
        if text.endswith(":"):
            program.labels[text[:-1]] = len(program.statements)
        elif text.startswith(".reg"):
            _, type, names = text.split(None, 2)
            program.widths |= {name.strip(): width_of(type[1:]) for name in names.split(",")}
        elif text:
            guard = re.match(r"@(!?)(\w+)\s+(.*)", text, re.S)
            opcode, _, rest = (guard[3] if guard else text).partition(" ")
            operands = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
            program.statements.append(Statement((guard[2], bool(guard[1])) if guard else None, opcode, operands))
    return program


def interpret(code, inputs, widths, *, declarations="", num_threads=32, grid=1):
    """Runs `code` on every thread.

    Args:
        inputs: initial values (a list of one integer a thread) by register.
        widths: bits of the registers that the code does not declare; a predicate has 1.

    Returns:
        The registers of each thread at the end.

    Raises:
        UndefinedError: see there.
    """
    program = parse(code, declarations)
    program.widths |= widths
    memory, threads = bytearray(program.sizes["global"]), []
    for cta in range(grid):
        shared = bytearray(program.sizes["shared"])
        members = []
        for number in range(num_threads):
            registers = {name: values[cta * num_threads + number] for name, values in inputs.items()}
            members.append(Thread(number, cta, registers, bytearray(program.sizes["local"])))
        Cta(program, members, shared, memory, grid).run()
        threads += members
    return [thread.registers for thread in threads]


class Cta:
    """The threads of one CTA and the memories that they see."""

    def __init__(self, program, threads, shared, memory, grid):
        self.program, self.threads = program, threads
        self.shared, self.memory, self.grid = shared, memory, grid

    def run(self):
        while True:
            for thread in self.threads:
                while not (thread.left or thread.waits):
                    self.step(thread)
            if all(thread.left for thread in self.threads):
                return
            if not (self.meet_in_warps() or self.meet_at_barrier()):
                raise UndefinedError(f"threads wait for ever: {[(t.number, t.place) for t in self.threads if t.waits]}")

    # -- one thread

    def step(self, thread):
        if thread.place == len(self.program.statements):
            thread.left = True
            return
        statement = self.program.statements[thread.place]
        thread.place += 1
        if statement.guard and thread.registers[statement.guard[0]] == statement.guard[1]:
            return
        if statement.root == "bra":
            thread.place = self.program.labels[statement.operands[0]]
        elif statement.root in ("exit", "ret"):
            thread.left = True
        elif statement.opcode == "bar.warp.sync":
            thread.waits = statement, [self.value(thread, statement.operands[0])]
        elif statement.root in TOGETHER:
            thread.waits = statement, [None, *(self.value(thread, operand) for operand in statement.operands[1:])]
        elif statement.root in ("ld", "st", "atom", "red", "cvta"):
            getattr(self, statement.root)(thread, statement)
        else:
            self.compute(thread, statement)

    def compute(self, thread, statement):
        if statement.opcode.startswith("mov.b") and "{" in "".join(statement.operands):
            self.repack(thread, statement)
            return
        meaning = semantics(statement.opcode)
        target, *operands = statement.operands
        values = [self.read(thread, each, type) for each, type in zip(operands, meaning.sources, strict=True)]
        result = meaning.function(*values)
        if not meaning.pair:
            self.write(thread, target, result, meaning.result)
            return
        for name, value in zip(target.split("|"), result, strict=False):
            self.write(thread, name, value, "pred")

    def repack(self, thread, statement):
        target, source = statement.operands
        if target[0] == "{":
            names = [name.strip() for name in target[1:-1].split(",")]
            part = self.program.widths[source] // len(names)
            for n, name in enumerate(names):
                self.write(thread, name, thread.registers[source] >> part * n, f"b{part}")
        else:
            names = [name.strip() for name in source[1:-1].split(",")]
            part = self.program.widths[target] // len(names)
            value = sum(thread.registers[name] << part * n for n, name in enumerate(names))
            self.write(thread, target, value, f"b{part * len(names)}")

    # -- operands

    def value(self, thread, operand):
        """An operand's bits, whatever its type; of a vector, a list."""
        if operand in thread.registers:
            return thread.registers[operand]
        if operand[0] == "{":
            return [self.value(thread, item.strip()) for item in operand[1:-1].split(",")]
        if operand[0] == "!":
            return not thread.registers[operand[1:]]
        if operand in self.program.variables:
            return self.program.variables[operand]
        special = {
            "%tid.x": thread.number, "%ntid.x": len(self.threads), "%ctaid.x": thread.cta, "%nctaid.x": self.grid,
            "%laneid": thread.lane,
        }  # fmt: skip
        if operand in special:
            return special[operand]
        return int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand, 0)

    def read(self, thread, operand, type):
        value = self.value(thread, operand)
        if type == "pred":
            return bool(value)
        value &= (1 << width_of(type)) - 1
        return value - (1 << width_of(type)) if type[0] == "s" and value >> width_of(type) - 1 else value

    def write(self, thread, name, value, type):
        if name == "_":
            return
        value = int(value) & (1 << width_of(type)) - 1
        if type[0] == "s" and value >> width_of(type) - 1:
            value -= 1 << width_of(type)
        thread.registers[name] = value & (1 << self.program.widths[name]) - 1

    # -- memory

    def cells(self, thread, operand, space):
        """The memory that an address [register or variable + constant] lies in, and the index in it."""
        base, _, offset = operand[1:-1].partition("+")
        address = self.value(thread, base) + int(offset or 0)
        if not space:
            space = max((name for name in BASES if BASES[name] <= address), key=BASES.get)
        return {"shared": self.shared, "global": self.memory, "local": thread.local}[space], address - BASES[space]

    def place_of(self, thread, statement, operand):
        space = next((part for part in statement.opcode.split(".") if part in BASES), "")
        type = statement.opcode.split(".")[-1]
        return *self.cells(thread, operand, space), type, width_of(type) // 8

    def ld(self, thread, statement):
        memory, at, type, size = self.place_of(thread, statement, statement.operands[1])
        for n, name in enumerate(statement.operands[0].strip("{}").split(",")):
            value = int.from_bytes(memory[at + n * size : at + (n + 1) * size], "little")
            self.write(thread, name.strip(), value, type)

    def st(self, thread, statement):
        memory, at, _, size = self.place_of(thread, statement, statement.operands[0])
        for n, operand in enumerate(statement.operands[1].strip("{}").split(",")):
            value = self.read(thread, operand.strip(), TYPES_OF_WIDTH[size])
            memory[at + n * size : at + (n + 1) * size] = value.to_bytes(size, "little")

    def atom(self, thread, statement):
        target, place, *operands = statement.operands
        memory, at, type, size = self.place_of(thread, statement, place)
        bits = int.from_bytes(memory[at : at + size], "little")
        old = bits - (1 << 8 * size) if type[0] == "s" and bits >> 8 * size - 1 else bits
        new = updated(
            statement.opcode, type, old, [self.read(thread, each, type) for each in operands], memory is self.memory
        )
        memory[at : at + size] = (new & (1 << 8 * size) - 1).to_bytes(size, "little")
        self.write(thread, target, old, type)

    def red(self, thread, statement):
        self.atom(thread, Statement(None, statement.opcode, ["_", *statement.operands]))

    def cvta(self, thread, statement):
        self.write(thread, statement.operands[0], self.value(thread, statement.operands[1]), "u64")

    # -- together

    def meet_in_warps(self):
        """Executes the warp-wide instructions at which all that they name have arrived; whether there was one."""
        done = False
        for first in range(0, len(self.threads), 32):
            warp = {thread.lane: thread for thread in self.threads[first : first + 32]}
            for thread in warp.values():
                if thread.waits and not is_barrier(thread.waits[0]):
                    done = self.meet(warp, thread) or done
        return done

    def meet(self, warp, thread):
        opcode, members = called(thread)
        if not members >> thread.lane & 1:
            raise UndefinedError(f"thread {thread.number} is not in its own mask")
        here = {lane: warp[lane] for lane in range(32) if members >> lane & 1 and lane in warp and not warp[lane].left}
        if not all(each.waits and called(each) == (opcode, members) for each in here.values()):
            return False
        results = TOGETHER_FUNCTIONS[opcode.split(".")[0]](opcode, {lane: each.waits[1] for lane, each in here.items()})
        for lane, each in here.items():
            target = each.waits[0].operands[0]
            each.waits = None
            for name, value in zip(
                re.split(r"[|,]", target.strip("{}")), results[lane] if results else (), strict=False
            ):
                self.write(each, name.strip(), value, "b32" if name == "_" else f"u{self.program.widths[name.strip()]}")
        return True

    def meet_at_barrier(self):
        live = [thread for thread in self.threads if not thread.left]
        if not all(thread.waits and is_barrier(thread.waits[0]) for thread in live):
            return False
        ((opcode, *_),) = {(thread.waits[0].opcode, *thread.waits[0].operands[:1]) for thread in live}
        says = [bool(thread.waits[1][-1]) for thread in live] if ".red." in opcode else []
        for thread in live:
            if says:
                kind = opcode.split(".")[2]
                result = {"popc": sum(says), "and": all(says), "or": any(says)}[kind]
                self.write(thread, thread.waits[0].operands[0], result, opcode.split(".")[-1])
            thread.waits = None
        return True


def called(thread):
    """The warp-wide instruction at which a thread waits, and the mask of those that it waits for."""
    statement, values = thread.waits
    return statement.opcode, 0xFFFFFFFF if statement.opcode.startswith("mma") else values[-1] & 0xFFFFFFFF


def is_barrier(statement):
    return statement.opcode.startswith(("bar.", "barrier.")) and statement.opcode != "bar.warp.sync"


def updated(opcode, type, old, values, in_global):
    """The new value of an atomic operation."""
    name = opcode.split(".")[-2]
    value = values[0]
    if name == "cas":
        return values[1] if old == value else old
    if type == "f32":  # "Current implementation of atom.add.f32 on global memory flushes subnormal inputs and results"
        return semantics("add.ftz.f32" if in_global else "add.f32").function(old, value)
    return {
        "exch": lambda: value, "inc": lambda: 0 if old >= value else old + 1,
        "dec": lambda: value if old == 0 or old > value else old - 1, "add": lambda: old + value,
        "min": lambda: min(old, value), "max": lambda: max(old, value),
        "and": lambda: old & value, "or": lambda: old | value, "xor": lambda: old ^ value,
    }[name]()  # fmt: skip


# -- what threads of a warp do together: from the operands of each lane to the results of each lane


def shuffled(opcode, brought):
    mode, results = opcode.split(".")[2], {}
    for lane, (_, _, offset, clamp, _) in brought.items():
        offset, bound, segment = offset & 31, clamp & 31, clamp >> 8 & 31
        highest, lowest = (lane & segment) | (bound & ~segment), lane & segment
        source = {
            "up": lane - offset,
            "down": lane + offset,
            "bfly": lane ^ offset,
            "idx": lowest | (offset & ~segment),
        }[mode]
        inside = source >= highest if mode == "up" else source <= highest
        source = source if inside else lane
        if source not in brought:
            raise UndefinedError(f"lane {lane} reads lane {source}, which its mask does not name, or which has left")
        results[lane] = brought[source][1], inside
    return results


def voted(opcode, brought):
    says = {lane: bool(predicate) for lane, (_, predicate, _) in brought.items()}
    every, some = all(says.values()), any(says.values())
    ballot = sum(1 << lane for lane, value in says.items() if value)
    result = {"all": every, "any": some, "uni": every or not some, "ballot": ballot}[opcode.split(".")[2]]
    return dict.fromkeys(brought, (result,))


def reduced(opcode, brought):
    name, type = opcode.split(".")[2:]
    values = [value - (1 << 32) if type == "s32" and value >> 31 else value for _, value, _ in brought.values()]
    result = values[0]
    for value in values[1:]:
        result = updated(f"x.{name}.{type}", type, result, [value], False)
    return dict.fromkeys(brought, (result,))


def multiplied(opcode, brought):
    """mma, its fragments as "Matrix Fragments for mma.m16n8k8" and "mma.m16n8k16" place them. The sums are exact, and
    rounded at the end: PTX leaves open in which order and precision a tensor core adds."""
    kind = opcode.split(".")[-2]
    depth = int(opcode.split(".")[3].rsplit("k", 1)[1])
    a, b, c = {}, {}, {}
    for lane in range(32):
        group, member = lane // 4, lane % 4
        _, registers_a, registers_b, registers_c = brought[lane]
        for n, pair in enumerate(registers_a):
            for e in range(2):
                a[group + 8 * (n % 2), 2 * member + e + 8 * (n // 2)] = decode(FORMATS[kind], pair >> 16 * e & 0xFFFF)
        for n, pair in enumerate(registers_b):
            for e in range(2):
                b[2 * member + e + 8 * n, group] = decode(FORMATS[kind], pair >> 16 * e & 0xFFFF)
        for n, bits in enumerate(registers_c):
            c[group + 8 * (n // 2), 2 * member + n % 2] = decode(FORMATS["f32"], bits)
    for (row, column), value in c.items():
        for k in range(depth):
            value = numbers.total(numbers.product(a[row, k], b[k, column]), value)
        c[row, column] = encode(FORMATS["f32"], value)
    places = [(n // 2, n % 2) for n in range(4)]
    return {lane: [c[lane // 4 + 8 * r, 2 * (lane % 4) + e] for r, e in places] for lane in range(32)}


TOGETHER_FUNCTIONS = {"shfl": shuffled, "vote": voted, "redux": reduced, "mma": multiplied, "bar": lambda *_: None}
