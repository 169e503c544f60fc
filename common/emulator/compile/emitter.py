"""Collects the Python of one basic block.

A register is an array of shape (1 or CTAs, 1 or 32): uniform registers stay small and broadcast. Inside a block every
write gets a new Python name, so values are never changed in place, moves are mere aliases, and an instruction can be
emitted later than it stands (pending.py).
"""

from collections.abc import Mapping

import numpy as np

from ..errors import PtxSyntaxError
from ..parse.ptx import NUMPY_TYPES, Address, Imm, Instruction, Not, Operand, Reg, Sink, Special, Symbol
from .pending import PendingMma, joined
from .program import Program, PtxBlock


class BlockEmitter:
    """Collects the Python lines of one block. The families of ops/ call its methods."""

    def __init__(self, block: PtxBlock, program: Program, last_read: Mapping[Reg, int]) -> None:
        """`last_read`: the last instruction of the block that reads each register."""
        self.block, self.slots, self.namespace = block, program.slots, program.namespace
        self.lines: list[str] = []
        self.loads: list[str] = []
        self.names: dict[Reg, str] = {}
        self.written: dict[Reg, None] = {}
        self.views: dict[tuple[str, str], str] = {}
        self.pending: list[PendingMma] = []
        self.pending_names: set[str] = set()
        self._pending_views: dict[str, str] = {}
        self.guard: str | None = None
        self.result = "None"
        self._num_names, self._last_read = 0, last_read

    def begin(self, instruction: Instruction, is_guarded: bool) -> None:
        """The next instruction. What is written under its guard keeps old values, unless it ends the block."""
        self.current, self.guard = instruction, None
        if instruction.guard and is_guarded:
            guard = self.read(instruction.guard, "pred")
            self.guard = f"~{guard}" if instruction.guard_negated else guard

    # -- names and lines

    def line(self, text: str) -> None:
        """Appends one line of Python."""
        self.lines.append(text)

    def new_name(self, prefix: str = "t") -> str:
        """A Python name that nothing else in this block uses."""
        self._num_names += 1
        return f"{prefix}{self._num_names}"

    def let(self, expression: str) -> str:
        """Names the value of an expression."""
        name = self.new_name()
        self.line(f"{name} = {expression}")
        return name

    # -- operands

    def name_of(self, reg: Reg) -> str:
        """The Python name that holds a register now; it may stand for a pending mma's result."""
        name = self.names.get(reg)
        if name is None:
            slot = self.slots[reg]
            name = self.names[reg] = f"r{slot}"
            self.loads.append(f"{name} = R[{slot}]")
        return name

    def read(self, operand: Operand, type: str) -> str:
        """An expression for an operand as an array of the numpy type of a PTX type."""
        code = NUMPY_TYPES[type]
        if isinstance(operand, Imm):
            return self.namespace.constant(self._immediate_bits(operand, code), code)
        if isinstance(operand, Reg):
            name = self.name_of(operand)
            if name in self.pending_names:
                self.flush()
            return self._as_type(name, operand.storage, code)
        if isinstance(operand, Special):
            storage = "u8" if operand.name in ("%clock64", "%globaltimer") else "u4"
            return self._as_type(f"w.special({operand.name!r})", storage, code)
        if isinstance(operand, Symbol):
            return self._as_type(f"w.address_of({operand.name!r}, {operand.offset})", "u8", code)
        if isinstance(operand, Not):
            return f"(~{self.read(operand.reg, 'pred')})"
        raise PtxSyntaxError(f"operand {operand} cannot be read as .{type}")

    def _immediate_bits(self, operand: Imm, code: str) -> int:
        size = np.dtype(code).itemsize
        if code == "?":
            return int(operand.value != 0)
        if code[0] != "f":
            if operand.float_bits not in (0, 8 * size):
                raise PtxSyntaxError(
                    f"a float of {operand.float_bits} bits as one of {8 * size}, {self.current.described()}"
                )
            return operand.value
        value = np.array(operand.value)
        if operand.float_bits:
            value = value.astype(f"u{operand.float_bits // 8}").view(f"f{operand.float_bits // 8}")
        return int(value.astype(code).view(f"u{size}"))

    def _as_type(self, name: str, storage: str, code: str) -> str:
        if storage == code:
            return name
        key = (name, code)
        if key not in self.views:
            size, wanted = int(storage[1]), int(code[1])
            if size < wanted:
                raise PtxSyntaxError(f"{8 * wanted} bits of a {8 * size}-bit register, {self.current.described()}")
            bits = name if storage[0] == "u" else f"{name}.view(u{size})"
            if size > wanted:
                bits = f"{bits}.astype(u{wanted})"
            self.views[key] = self.let(bits if code[0] == "u" else f"{bits}.view({code})")
        return self.views[key]

    def address(self, operand: Operand) -> str:
        """An expression for the byte address (u4 or u8 array) of a memory operand."""
        assert isinstance(operand, Address)
        if isinstance(operand.base, Symbol):
            return f"w.address_of({operand.base.name!r}, {operand.base.offset + operand.offset})"
        if isinstance(operand.base, Imm):
            return self.namespace.constant(operand.base.value + operand.offset, "u8")
        code = operand.base.storage
        base = self.read(operand.base, f"{code[0]}{int(code[1]) * 8}")
        return f"{base} + {self.namespace.constant(operand.offset, code)}" if operand.offset else base

    def write(self, operand: Operand, expression: str, type: str) -> None:
        """Assigns an array of a PTX type to a register; a wider register is zero- or sign-extended."""
        if isinstance(operand, Sink):
            return
        assert isinstance(operand, Reg), operand
        code, storage = NUMPY_TYPES[type], operand.storage
        if code != storage:
            size = int(storage[1])
            if int(code[1]) < size:
                expression = f"({expression}).astype({code[0] if code[0] != 'f' else 'u'}{size})"
            if code[0] != storage[0] or int(code[1]) > size:
                expression = f"({expression}).view({storage})"
        if self.guard:
            expression = f"where({self.guard}, {expression}, {self.read(operand, operand.type)})"
        name = self.new_name("x")
        self.line(f"{name} = {expression}")
        self.names[operand], self.written[operand] = name, None

    def alias(self, target: Reg, source: Reg) -> None:
        """A move between registers of one storage: a second name for the same array."""
        self.names[target], self.written[target] = self.name_of(source), None

    def define_pending(self, target: Reg) -> str:
        """Names the f4 result of an instruction in `pending`, and the register that gets it."""
        result = name = self.new_name("x")
        if target.storage != "f4":
            name = self.new_name("x")
            self.views[name, "f4"] = result
            self._pending_views[result] = f"{name} = {result}.view({target.storage})"
        self.names[target], self.written[target] = name, None
        self.pending_names.add(name)
        return result

    def accumulator(self, operand: Operand) -> str:
        """The name of an f4 operand, which may itself be the result of an instruction in `pending`."""
        if isinstance(operand, Reg):
            name = self.name_of(operand)
            name = name if operand.storage == "f4" else self.views.get((name, "f4"), "")
            if name:
                return name
        return self.read(operand, "f32")

    def needed_names(self) -> set[str]:
        """The names that this block or a later one still reads through a register."""
        position, live = self.current.index, self.block.live_out
        names = {name for reg, name in self.names.items() if reg in live or self._last_read.get(reg, -1) >= position}
        return names | {view for (name, _), view in self.views.items() if name in names}

    def flush(self) -> None:
        """Emits the pending mma."""
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        self.pending_names.clear()
        lines, computed = joined(pending, self.needed_names(), self.namespace.constant(0, "f4"))
        self.lines += lines
        self.lines += [line for result, line in self._pending_views.items() if result in computed]
        self._pending_views.clear()

    def mask(self) -> str:
        """The mask of an instruction's side effects: lanes that are here and pass its guard."""
        return f"narrow(m, {self.guard})" if self.guard else "m"

    def function(self) -> str:
        """The source of the block's function, when all its instructions have been emitted."""
        self.flush()
        out = [(self.slots[reg], self.names[reg]) for reg in self.written if reg in self.block.live_out]
        body = self.loads + self.lines
        if out:
            body.append("if m is None:")
            body += [f"    R[{slot}] = {name}" for slot, name in out]
            body.append("else:")
            body += [f"    R[{slot}] = where(m, {name}, R[{slot}])" for slot, name in out]
        body.append(f"return {self.result}")
        return f"def block_{self.block.index}(w, R, m):\n" + "".join(f"    {line}\n" for line in body)
