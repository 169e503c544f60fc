"""Each basic block becomes one Python function on numpy arrays.

A register is an array of shape (1 or CTAs, 1 or 32): uniform registers stay small and broadcast. Inside a block every
write gets a new Python name, so values are never changed in place, moves are mere aliases, and an instruction can be
emitted later than it stands (see ops/mma.py). Arithmetic runs on all lanes; the mask of the lanes that are really here
applies to side effects and to the write-back of the registers that live on.

A block function takes (w, R, m): the Warp, its registers (a list of arrays) and the mask (None: all lanes of all CTAs).
It returns what its last instruction needs: a predicate for a branch, operand values for a gate, otherwise None.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from . import arithmetic, fragments
from .arrays import ALL_LANES, narrow
from .cfg import PtxBlock, build_blocks, perhaps_unwritten, reads, sources, writes
from .cluster import ClusterCall
from .errors import PtxSyntaxError
from .gates import BarrierCall
from .inflight import check_products, copies_in, loads_of_products
from .mbarrier import MbarrierCall
from .ops import lookup
from .ops.mma import PendingMma, emit_pending
from .order import FENCED, PUBLISHED, USED
from .polls import is_poll
from .ptx import NUMPY_TYPES, Address, Imm, Instruction, Not, Operand, PtxKernel, Reg, Sink, Special, Symbol
from .registers import RegisterCall
from .strength import is_wide_fence
from .warpgroup import WaitCall, warpgroup_of

BlockFunction = Callable[[Any, list[np.ndarray], np.ndarray | None], Any]


class Namespace:
    """The globals of the generated code: helper functions and constants, shared by all blocks of a kernel."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {name: getattr(arithmetic, name) for name in arithmetic.__all__}
        self.values.update({name: getattr(fragments, name) for name in fragments.__all__})
        self.values.update({code: np.dtype(code) for code in set(NUMPY_TYPES.values()) if code != "?"})
        self.values.update(np=np, where=np.where, narrow=narrow)
        self.values.update(
            BarrierCall=BarrierCall, ClusterCall=ClusterCall, MbarrierCall=MbarrierCall, RegisterCall=RegisterCall
        )
        self.values.update(all_lanes=ALL_LANES.astype(np.uint32)[None])
        self.values.update(WaitCall=WaitCall, warpgroup_of=warpgroup_of)
        self._constants: dict[tuple[int, str], str] = {}

    def constant(self, bits: int, code: str) -> str:
        """The name of a (1, 1) array of numpy type `code` with this bit pattern (wrapped to its width)."""
        key = (bits, code)
        if key not in self._constants:
            size = np.dtype(code).itemsize
            value = np.full((1, 1), bits % (1 << 8 * size), f"u{size}").view(code)
            value.setflags(write=False)
            self._constants[key] = name = f"k{len(self._constants)}"
            self.values[name] = value
        return self._constants[key]

    def named(self, name: str, value: Any) -> str:
        """The name of any other constant."""
        self.values[name] = value
        return name


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel as executable blocks; `slots` tells where in R a register lies. Each use of a `doubtful` register is
    checked: a lane may not have written it."""

    kernel: PtxKernel
    blocks: list[PtxBlock]
    slots: dict[Reg, int]
    namespace: Namespace
    doubtful: frozenset[Reg]
    functions: list[BlockFunction] = field(default_factory=list)

    @cached_property
    def num_planes(self) -> int:
        """How many of the planes of order.py the kernel needs."""
        if any(is_wide_fence(i) for i in self.kernel.instructions):
            return PUBLISHED + 1
        return USED + 1 if self.copies_in else FENCED + 1

    @cached_property
    def polls(self) -> frozenset[int]:
        """The blocks that may look at what other CTAs write."""
        return frozenset(block.index for block in self.blocks if any(is_poll(i) for i in block.instructions))

    @cached_property
    def copies_in(self) -> bool:
        """Whether bulk copies write shared memory."""
        return copies_in(self.kernel)

    @cached_property
    def loads_of_products(self) -> dict[int, frozenset[int]]:
        """By wgmma: the loads from shared memory behind its registers; empty where no copy may overtake them."""
        return loads_of_products(self.kernel) if self.copies_in else {}

    @property
    def used_loads(self) -> frozenset[int]:
        """All of these loads."""
        return frozenset[int]().union(*self.loads_of_products.values())


class BlockEmitter:
    """Collects the Python lines of one block. The families of ops/ call its methods."""

    def __init__(self, block: PtxBlock, program: Program) -> None:
        self.block, self.slots, self.namespace = block, program.slots, program.namespace
        self._doubtful = program.doubtful
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
        self._num_names = 0
        self._last_read = {reg: instruction.index for instruction in block.instructions for reg in reads(instruction)}

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
        pending, self.pending = self.pending, []
        self.pending_names.clear()
        computed = emit_pending(self, pending)
        self.lines += [line for result, line in self._pending_views.items() if result in computed]
        self._pending_views.clear()

    def mask(self) -> str:
        """The mask of an instruction's side effects: lanes that are here and pass its guard."""
        return f"narrow(m, {self.guard})" if self.guard else "m"

    # -- the block

    def emit(self) -> str:
        """The source of the block's function."""
        for instruction in self.block.instructions:
            self.current = instruction
            self.guard = None
            operation, match = lookup(instruction)
            if instruction.guard and not operation.ending:
                guard = self.read(instruction.guard, "pred")
                self.guard = f"~{guard}" if instruction.guard_negated else guard
            for reg in self._doubtful.intersection(sources(instruction)):
                self.line(f"w.require_written({instruction.index}, {reg.name!r}, {self.slots[reg]}, {self.mask()})")
            operation.emit(self, instruction, match)
            for reg in self._doubtful.intersection(writes(instruction)):
                self.line(f"w.note_written({self.slots[reg]}, {self.mask()})")
        if self.pending:
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


def compile_kernel(kernel: PtxKernel) -> Program:
    """Generates and compiles the code of all blocks.

    Raises:
        EmulatorError: an unknown instruction, or a register that may be touched while a product in flight uses it.
    """
    blocks = build_blocks(kernel)
    check_products(blocks)
    slots: dict[Reg, int] = {}
    for instruction in kernel.instructions:
        for reg in (*writes(instruction), *reads(instruction)):
            slots.setdefault(reg, len(slots))
    program = Program(kernel, blocks, slots, Namespace(), perhaps_unwritten(blocks))
    program.functions.extend(_compile_blocks(program, blocks))
    return program


def substitute(program: Program, instruction: Instruction, substitutes: list[Instruction]) -> Program:
    """The same program with others in place of one instruction; they write what it writes, or registers of their own,
    and only the last of them may end a block, if it did."""
    old = next(block for block in program.blocks if instruction in block.instructions)
    at = old.instructions.index(instruction)
    kept = [*old.instructions[:at], *substitutes, *old.instructions[at + 1 :]]
    new = replace(old, instructions=kept, ending=lookup(kept[-1])[0].ending if kept else "")
    slots = dict(program.slots)
    for reg in (reg for each in substitutes for reg in writes(each)):
        slots.setdefault(reg, len(slots))
    program = replace(program, slots=slots)
    blocks, functions = list(program.blocks), list(program.functions)
    blocks[old.index] = new
    check_products(blocks)
    (functions[old.index],) = _compile_blocks(program, [new])
    return replace(program, blocks=blocks, functions=functions)


def _compile_blocks(program: Program, blocks: list[PtxBlock]) -> list[BlockFunction]:
    source = "\n".join(BlockEmitter(block, program).emit() for block in blocks)
    functions = dict(program.namespace.values)
    exec(compile(source, f"<{program.kernel.name}>", "exec"), functions)
    return [functions[f"block_{block.index}"] for block in blocks]
