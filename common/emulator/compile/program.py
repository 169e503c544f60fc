"""A compiled kernel: its basic blocks, the functions that they became, and the globals of these."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..parse.ptx import NUMPY_TYPES, Instruction, PtxKernel, Reg

BlockFunction = Callable[[Any, list[np.ndarray], np.ndarray | None], Any]
_POLL = re.compile(r"ld\.(volatile|relaxed|acquire)\..*|atom\..*")


def is_poll(instruction: Instruction) -> bool:
    """Whether it may look at what other CTAs write."""
    return bool(_POLL.fullmatch(instruction.opcode)) and ".shared" not in instruction.opcode


@dataclass
class PtxBlock:
    """Instructions without a branch in their midst; `last` tells how control leaves it.

    Attributes:
        target: the block a branch goes to, -1 if none.
        falls_through: control can go on to the next block.
        ending: what its last instruction does to control, see ops.registry.Op.
        synchronises: it ends with what a warp may have to wait for, or others wait for.
        live_in, live_out: registers whose values matter before and after.
        post_dominators: the other blocks that lanes which stand here are sure to come to before they leave.
    """

    index: int
    instructions: list[Instruction]
    target: int = -1
    falls_through: bool = True
    ending: str = ""
    synchronises: bool = False
    live_in: set[Reg] = field(default_factory=set)
    live_out: set[Reg] = field(default_factory=set)
    post_dominators: frozenset[int] = frozenset()

    @property
    def last(self) -> Instruction:
        return self.instructions[-1]

    def successors(self) -> list[int]:
        return [self.target] * (self.target >= 0) + [self.index + 1] * self.falls_through


class Namespace:
    """The globals of the generated code, shared by all blocks of a kernel: constants, and a vocabulary of helpers
    that whoever runs the code brings."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = dict(vocabulary)
        self.values.update({code: np.dtype(code) for code in set(NUMPY_TYPES.values()) if code != "?"})
        self.values.update(np=np, where=np.where)
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
    def zeros(self) -> list[np.ndarray]:
        """What each slot holds at the start; one array for all of a type, as registers are replaced, never changed."""
        kinds = {reg.storage for reg in self.slots}
        zero = {kind: np.zeros((1, 1), kind) for kind in kinds}
        for each in zero.values():
            each.setflags(write=False)
        return [zero[reg.storage] for reg in self.slots]

    @cached_property
    def polls(self) -> frozenset[int]:
        """The blocks that may look at what other CTAs write."""
        return frozenset(block.index for block in self.blocks if any(is_poll(i) for i in block.instructions))
