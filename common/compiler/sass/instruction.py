"""SASS, the machine code of a kernel, as nvdisasm prints it, taken apart."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from flashladder.common.compiler.toolchain import find_tool
from flashladder.common.emulator.parse.names import unescaped
from flashladder.common.errors import ToolchainError
from flashladder.common.paths import AS_NAMES

BYTES = 16  # of every instruction, on sm_70 and later
NO_BARRIER = 7

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x([0-9a-f]{16}) \*/$")
_SECOND_WORD = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/$")
_SECTION = re.compile(r"^\t\.section\t\.text\.([\w.$]+),")
_LABEL = re.compile(r"^([\w.$]+):$")
_SOURCE = re.compile(r'^\s*//## File "((?:\\.|[^"\\])+)", line (\d+)')
_GUARD = re.compile(r"^@(!?U?P\w+)\s+(.*)$")
_TARGET = re.compile(r"`\(([\w.$]+)\)")
_COMMA = re.compile(r",\s*(?![^\[]*\])")  # between operands, not within an address


@dataclass(frozen=True)
class Control:
    """What the compiler tells the scheduler of a warp, the upper bits of every instruction.

    The vendor does not document them; the fields are as read from known kernels. Bits 105 to 125 of 128.
    """

    stall: int  # cycles before the warp's next instruction may issue
    yields: bool  # the scheduler should rather take another warp next
    write_barrier: int  # scoreboard that the result will release; NO_BARRIER for none
    read_barrier: int  # scoreboard that is released when the operands have been read
    wait_mask: int  # scoreboards to wait for, a bit each
    reuse: int  # operands to keep in the operand cache, a bit each

    @classmethod
    def decode(cls, second_word: int) -> Control:
        """The fields in the upper 64 bits of an instruction."""
        bits = second_word >> 41
        return cls(
            stall=bits & 0xF,
            yields=not bits >> 4 & 1,
            write_barrier=bits >> 5 & 7,
            read_barrier=bits >> 8 & 7,
            wait_mask=bits >> 11 & 0x3F,
            reuse=bits >> 17 & 0xF,
        )

    def __str__(self) -> str:
        """Such as `B0-2---:R0:W-:Y:S04`: waits for scoreboards 0 and 2, reads release 0, yields, stalls 4 cycles."""
        waits = "".join(str(i) if self.wait_mask >> i & 1 else "-" for i in range(6))
        read, write = ("-" if b == NO_BARRIER else str(b) for b in (self.read_barrier, self.write_barrier))
        return f"B{waits}:R{read}:W{write}:{'Y' if self.yields else '-'}:S{self.stall:02}"


class Position(NamedTuple):
    """A line of source."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class SassInstruction:
    """One machine instruction."""

    address: int
    guard: str  # "P0", "!P0" or "!PT"; empty where it always executes
    opcode: str  # with its modifiers: "LDSM.16.M88.4"
    operands: tuple[str, ...]
    control: Control
    source: tuple[Position, ...] = ()  # innermost first, then where it was inlined; empty without -lineinfo
    target: int | None = None  # address of the label among the operands

    @cached_property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def is_filler(self) -> bool:
        """Whether it can never execute: the compiler pads some waits with `@!PT LDS RZ, [RZ]`."""
        return self.guard == "!PT"

    @property
    def text(self) -> str:
        """As assembly."""
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".rstrip()


def disassemble(cubin: Path, others: Collection[str] = ()) -> list[SassInstruction]:
    """The instructions of a cubin's kernel and of the functions that it calls, in order, without the final padding.

    `others` are kernels of the cubin that are left out. ToolchainError where nvdisasm is missing or refuses the file.
    """
    return parse("\n".join(_without_kernels(_nvdisasm(cubin, "-c", "-gi", "-hex"), others)))


def _nvdisasm(cubin: Path, *options: str) -> str:
    """What it prints; ToolchainError where it prints no instruction."""
    command = [str(find_tool("nvdisasm")), *options, str(cubin)]
    result = subprocess.run(command, capture_output=True, errors=AS_NAMES)
    if result.returncode or not any(map(_INSTRUCTION.match, result.stdout.splitlines())):
        said = result.stderr.strip() or "it printed no instructions"
        raise ToolchainError(f"nvdisasm cannot disassemble {cubin}: {said}. A whole cubin of one kernel would work")
    return result.stdout


def disassemble_functions(cubin: Path) -> dict[str, list[SassInstruction]]:
    """The instructions of each function of a cubin, by its name, without the lines of source that they are of."""
    found: dict[str, list[str]] = {}
    name = ""
    for row in _nvdisasm(cubin, "-c", "-hex").splitlines():
        if match := _SECTION.match(row):
            name = match[1]
        found.setdefault(name, []).append(row)
    return {name: parse("\n".join(rows)) for name, rows in found.items() if name}


def parse(listing: str) -> list[SassInstruction]:
    """The instructions in what `nvdisasm -c -gi -hex` printed (-gi may be left out), without the final padding."""
    lines = list(_lines(listing))
    labels = dict(_labels(lines))
    return _without_padding([_instruction(line, labels) for line in lines if isinstance(line, _Line)])


def _without_kernels(listing: str, others: Collection[str]) -> Iterator[str]:
    """The lines of a listing, but for the code of these kernels."""
    is_left_out = False
    for row in listing.splitlines():
        if match := _SECTION.match(row):
            is_left_out = match[1] in others
        if not is_left_out:
            yield row


@dataclass(frozen=True)
class _Line:
    address: int
    text: str
    second_word: int
    source: tuple[Position, ...]


def _lines(listing: str) -> Iterator[_Line | str]:
    """Instructions and labels of the code sections."""
    source: list[Position] = []
    source_is_complete = True
    pending = None
    for row in listing.splitlines():
        if match := _SOURCE.match(row):
            if source_is_complete:
                source, source_is_complete = [], False
            source.append(Position(unescaped(match[1]), int(match[2])))
        elif match := _LABEL.match(row):
            yield match[1]
        elif match := _INSTRUCTION.match(row):
            pending, source_is_complete = match, True
        elif pending and (match := _SECOND_WORD.match(row)):
            yield _Line(int(pending[1], 16), pending[2], int(match[1], 16), tuple(source))
            pending = None


def _labels(lines: list[_Line | str]) -> Iterator[tuple[str, int]]:
    """Every label with the address of the instruction that follows it."""
    waiting: list[str] = []
    for line in lines:
        if isinstance(line, str):
            waiting.append(line)
        else:
            yield from ((name, line.address) for name in waiting)
            waiting.clear()


def _instruction(line: _Line, labels: dict[str, int]) -> SassInstruction:
    match = _GUARD.match(line.text)
    guard, text = (match[1], match[2]) if match else ("", line.text)
    opcode, _, rest = text.partition(" ")
    target = _TARGET.search(rest)
    return SassInstruction(
        address=line.address,
        guard=guard,
        opcode=opcode,
        operands=tuple(operand.strip() for operand in _COMMA.split(rest) if operand.strip()),
        control=Control.decode(line.second_word),
        source=line.source,
        target=labels.get(target[1]) if target else None,
    )


def _without_padding(instructions: list[SassInstruction]) -> list[SassInstruction]:
    """Without the endless loop and the NOPs that follow the last function."""
    end = len(instructions)
    while end and instructions[end - 1].base == "NOP":
        end -= 1
    if end and instructions[end - 1].base == "BRA" and instructions[end - 1].target == instructions[end - 1].address:
        end -= 1
    return instructions[:end]
