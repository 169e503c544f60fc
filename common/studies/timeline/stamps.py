"""Puts time stamps into the PTX of a rung of Hopper: where its warpgroups wait, start products and start copies.

A stamp is the SM's clock, which all warps of an SM share, and where it was taken. One thread a warpgroup, its first,
stores it, in the CTAs of SM 0. Each of these warpgroups gets a lane of the buffer, until there are none left:
event e of lane n is at e * LANES + n. A thread carries one register for it: where its next event goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashladder.common.compiler.artifact import Artifact
from flashladder.common.emulator.parse.parser import parse
from flashladder.common.emulator.parse.ptx import (
    Address,
    Imm,
    Instruction,
    Operand,
    PtxKernel,
    Reg,
    Symbol,
    TensorAddress,
)
from flashladder.common.errors import BuildError
from flashladder.common.paths import AS_NAMES

LANES, EVENTS = 16, 1024  # warpgroups that are recorded, and the events of each
EVENT_BYTES = 8  # the clock; where, and what
BUFFER, TAKEN = "timeline_events", "timeline_lanes_taken"
PAYLOAD_BITS = 20  # of the second word: an address of shared memory, or who begins
NEAR = 8  # instructions, apart from moves, within which another stamp says as much
_NOT_RECORDED = 1 << 31  # an index that counts on, and never gets to the buffer
_WARPGROUP_BITS = 3

BEGIN, REACHED, ARRIVED, ISSUED, DONE = "begin", "reached", "arrived", "issued", "done"
COPY, STORE, STORED, BARRIER, REGISTERS, END = "copy", "store", "stored", "barrier", "registers", "end"
QK, PV = "Q K^T", "P V"
UNNAMED = "a tile"  # of a tensor that the PTX does not tell


@dataclass(frozen=True)
class Site:
    """A place that takes stamps.

    `kind`: a warpgroup begins; has reached a wait; a barrier's phase has ended (`arrived`); products were started
    (`issued`) or waited for (`done`); a copy starts, a store starts, stores are done with shared memory; a barrier of
    threads; registers have moved; the end. `what`: which products, which tensor, or how many groups may still run.
    """

    kind: str
    what: str = ""
    line: int = 0  # of kernel.cu


@dataclass(frozen=True)
class Stamped:
    """PTX with stamps, and its sites: site n is number n + 1 in a stamp, so that a stamp is never 0."""

    ptx: str
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class _Stamp:
    """A site, the line of PTX that it comes before, and the register whose value goes with it."""

    site: Site
    before: int  # counted from 0
    payload: str = ""


def stamp(artifact: Artifact) -> Stamped:
    """The artifact's PTX with stamps. BuildError where it has no products of Hopper, or a wait of an unknown form."""
    text = artifact.ptx.read_text(errors=AS_NAMES)
    kernel = parse(text, artifact.entry)
    if not any(i.opcode.startswith("wgmma.mma_async") for i in kernel.instructions):
        raise BuildError(f"{artifact.version} has no products of warpgroups: time stamps are for rungs from 25 on")
    lines = text.split("\n")
    maps = {f"{each.tensor.upper()}": 128 * place for place, each in enumerate(artifact.launch.tensor_maps)}
    stamps = list(_Finder(kernel, lines, {offset: name for name, offset in maps.items()}).stamps())
    first = kernel.instructions[0].line - 1
    sites = (Site(BEGIN), *(each.site for each in stamps))
    inserted: dict[int, list[str]] = {first: _begin()}
    for number, each in enumerate(stamps, start=2):
        inserted.setdefault(each.before, []).extend(_take(number, each.payload))
    entry = next(n for n, line in enumerate(lines) if re.search(rf"\.entry {artifact.entry}\b", line))
    made = [*lines[:entry], f".global .align {EVENT_BYTES} .b8 {BUFFER}[{LANES * EVENTS * EVENT_BYTES}];"]
    made += [f".global .align 4 .u32 {TAKEN};", ""]
    for number, line in enumerate(lines[entry:], start=entry):
        made += [*inserted.get(number, []), line]
    return Stamped("\n".join(made), sites)


def _begin() -> list[str]:
    """Takes a lane, or none, and the first stamp."""
    return [
        "\t.reg .b32 %stamp_at;",
        "\t{",
        "\t.reg .pred mine, over;",
        "\t.reg .b32 thread, part, who;",
        "\t.reg .b64 taken;",
        "\tmov.u32 thread, %tid.x;",
        "\tand.b32 part, thread, 127;",
        "\tmov.u32 who, %smid;",
        "\tor.b32 part, part, who;",
        "\tsetp.eq.u32 mine, part, 0;",
        f"\tmov.u32 %stamp_at, {_NOT_RECORDED};",
        f"\tmov.u64 taken, {TAKEN};",
        "\t@mine atom.global.add.u32 %stamp_at, [taken], 1;",
        f"\tsetp.ge.u32 over, %stamp_at, {LANES};",
        f"\tselp.u32 %stamp_at, {_NOT_RECORDED}, %stamp_at, over;",
        "\tmov.u32 who, %ctaid.z;",
        "\tmov.u32 part, %nctaid.y;",
        "\tmad.lo.u32 who, who, part, 0;",
        "\tmov.u32 part, %ctaid.y;",
        "\tadd.u32 who, who, part;",
        "\tmov.u32 part, %nctaid.x;",
        "\tmul.lo.u32 who, who, part;",
        "\tmov.u32 part, %ctaid.x;",
        "\tadd.u32 who, who, part;",
        f"\tshl.b32 who, who, {_WARPGROUP_BITS};",
        "\tshr.u32 part, thread, 7;",
        "\tor.b32 who, who, part;",
        f"\tand.b32 who, who, {(1 << PAYLOAD_BITS) - 1};",
        *_take(1, "who"),
        "\t}",
    ]


def _take(site: int, payload: str) -> list[str]:
    """One stamp."""
    word = [f"\tadd.u32 word, {payload}, {site << PAYLOAD_BITS};"] if payload else []
    return [
        "\t{",
        "\t.reg .pred recorded;",
        "\t.reg .b32 now, word;",
        "\t.reg .b64 first, place;",
        "\tmov.u32 now, %clock;",
        *(word or [f"\tmov.u32 word, {site << PAYLOAD_BITS};"]),
        f"\tmov.u64 first, {BUFFER};",
        f"\tmad.wide.u32 place, %stamp_at, {EVENT_BYTES}, first;",
        f"\tsetp.lt.u32 recorded, %stamp_at, {LANES * EVENTS};",
        "\t@recorded st.global.v2.u32 [place], {now, word};",
        f"\tadd.u32 %stamp_at, %stamp_at, {LANES};",
        "\t}",
    ]


def unpack_who(payload: int) -> tuple[int, int]:
    """The CTA (as far as its number fits) and the warpgroup that a first event names."""
    return payload >> _WARPGROUP_BITS, payload & ((1 << _WARPGROUP_BITS) - 1)


class _Finder:
    """Walks a kernel's instructions in the order of its text."""

    def __init__(self, kernel: PtxKernel, lines: Sequence[str], maps: dict[int, str]) -> None:
        self.kernel, self.lines, self.maps = kernel, lines, maps
        self.since = NEAR + 1  # instructions since the last stamp, on any way that leads here
        self.after_wait = False  # whether that stamp ended a wait for a tile: what follows is to start products
        self.products: list[str] = []  # started since the last group was closed
        self.targets = set(kernel.labels.values())
        self.writers: dict[str, Instruction] = {}
        for instruction in kernel.instructions:
            if instruction.operands and isinstance(instruction.operands[0], Reg):
                self.writers.setdefault(instruction.operands[0].name, instruction)

    def stamps(self) -> Iterator[_Stamp]:
        for instruction in self.kernel.instructions:
            if instruction.index in self.targets:
                self.since, self.after_wait = NEAR + 1, False
            found = list(self._of(instruction))
            yield from found
            if found:
                self.since, self.after_wait = 0, found[-1].site.kind == ARRIVED
            elif not instruction.opcode.startswith("mov."):
                self.since += 1

    def _of(self, i: Instruction) -> Iterator[_Stamp]:
        """The stamps that an instruction asks for."""
        here, line, root = i.line - 1, _own_line(i), i.opcode
        if root.startswith("mbarrier.try_wait"):
            begin, end = self._loop(here)
            yield from self._reached(begin, line)
            yield _Stamp(Site(ARRIVED, "", line), end, _base(i.operands[1]))
        elif root.startswith("mbarrier.arrive.expect_tx"):
            yield _Stamp(Site(COPY, self._tensor(i), line), here + 1, _base(i.operands[1]))
        elif root.startswith("wgmma.mma_async"):
            # V lies row by row, so its products take B transposed, which is the last operand
            self.products.append(PV if i.text.rstrip("; ").split()[-1] == "1" else QK)
        elif root.startswith("wgmma.fence"):
            if not self.after_wait:
                yield from self._reached(here, line)
        elif root.startswith("wgmma.commit_group"):
            yield _Stamp(Site(ISSUED, " and ".join(dict.fromkeys(self.products)), line), here + 1)
            self.products = []
        elif root.startswith("wgmma.wait_group"):
            yield from self._reached(here, line)
            yield _Stamp(Site(DONE, i.text.rstrip("; ").split()[-1], line), here + 1)
        elif root.startswith(("cp.async.bulk.wait_group", "cp.async.wait_group", "bar.sync", "barrier.sync")):
            yield from self._reached(here, line)
            yield _Stamp(Site(STORED if "bulk" in root else BARRIER, "", line), here + 1)
        elif root.startswith("cp.async.bulk.commit_group"):
            yield _Stamp(Site(STORE, "", line), here + 1)
        elif root.startswith("setmaxnreg"):
            yield _Stamp(Site(REGISTERS, "", line), here + 1)
        elif root in ("ret", "exit") and i.guard is None:
            yield _Stamp(Site(END, "", line), self._above_labels(here))

    def _reached(self, before: int, line: int) -> Iterator[_Stamp]:
        """The end of what came before a wait, unless a stamp has just been taken."""
        if self.since > NEAR:
            yield _Stamp(Site(REACHED, "", line), before)

    def _loop(self, at: int) -> tuple[int, int]:
        """The lines around a loop that waits: of its label, and behind its branch."""
        label, branch = at - 1, at + 1
        if not re.match(r"\s*[\w$]+:\s*$", self.lines[label]) or not re.match(r"\s*@!?\S+\s+bra\b", self.lines[branch]):
            raise BuildError(f"line {at + 1} of the PTX waits in a loop of an unknown form:\n{self.lines[at].strip()}")
        return label, branch + 1

    def _above_labels(self, at: int) -> int:
        """The line above the labels that lead to an instruction. Roles come together there: an index that all of them
        kept until then would not fit the producer's registers."""
        top = at
        while re.match(r"\s*(\.loc\b.*|//.*|[\w$]+:\s*)?$", self.lines[top - 1]):
            top -= 1
        labels = [n for n in range(top, at) if self.lines[n].rstrip().endswith(":")]
        return min(labels, default=at)

    def _tensor(self, i: Instruction) -> str:
        """Whose tile comes to the barrier that was just told of bytes: that of the next copy's tensor map."""
        for later in self.kernel.instructions[i.index :]:
            if later.opcode.startswith("cp.async.bulk.tensor") and isinstance(later.operands[1], TensorAddress):
                offset = self._offset(later.operands[1].map)
                return self.maps.get(-1 if offset is None else offset, UNNAMED)
        return UNNAMED

    def _offset(self, operand: Operand) -> int | None:
        """The distance of an address from the beginning of the parameter that it lies in; None where it is unclear."""
        if isinstance(operand, Address):
            inner = self._offset(operand.base)
            return None if inner is None else inner + operand.offset
        if isinstance(operand, Symbol):
            return operand.offset
        writer = self.writers.get(operand.name) if isinstance(operand, Reg) else None
        if writer is None or not writer.opcode.startswith(("mov.", "cvta", "add.")):
            return None
        inner = self._offset(writer.operands[1])
        if inner is None or not writer.opcode.startswith("add."):
            return inner
        added = writer.operands[2]
        return inner + added.value if isinstance(added, Imm) else None


def _base(operand: Operand) -> str:
    """The register that an address is in. A scoped name is the one of its block, where the stamp is taken too."""
    assert isinstance(operand, Address)
    assert isinstance(operand.base, Reg)
    return operand.base.name.partition("#")[0]


def _own_line(i: Instruction) -> int:
    """The line of kernel.cu that an instruction comes from; 0 where none is named."""
    return next((line for file, line in reversed(i.source) if file.endswith("kernel.cu")), 0)
