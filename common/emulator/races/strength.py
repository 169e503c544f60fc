"""How accesses to global memory take part in synchronisation: by the qualifiers of loads, stores, atoms and fences."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..compile.program import PtxBlock
from ..parse.ptx import Instruction

_ACCESS = re.compile(r"(ld|st|atom|red|cp)\.")
_WIDE = {"gpu", "sys"}
_FLOAT_SUM = re.compile(r"(atom|red|cp\.reduce)\..*\.add\..*\b(f|bf)(16|32|64)")
_WORDS = re.compile(r"(?<![:\w])(volatile|relaxed|acquire|release|acq_rel|cta|cluster|gpu|sys|gl)\b")


class Strength(NamedTuple):
    """How an access takes part in synchronisation; of the scope, whether it holds other CTAs."""

    is_strong: bool
    is_wide: bool
    releases: bool
    acquires: bool
    reads: bool
    writes: bool


WEAK_WRITE = Strength(False, False, False, False, reads=False, writes=True)


@lru_cache(maxsize=4096)
def strength(opcode: str) -> Strength:
    """Of a load, store or atomic operation (9.7.9.8, 9.7.9.11, 9.7.13.5, 9.7.13.6)."""
    root, words = opcode.split(".", 1)[0], set(_WORDS.findall(opcode))
    atomic = root in ("atom", "red") or opcode.startswith("cp.reduce.")  # which is relaxed, of the GPU (9.7.9.25.4.2)
    is_strong = atomic or bool(words & {"volatile", "relaxed", "acquire", "release"})
    is_wide = bool(words & _WIDE) or "volatile" in words or (atomic and not words & {"cta", "cluster"})
    return Strength(
        is_strong,
        is_strong and is_wide,
        bool(words & {"release", "acq_rel"}),
        bool(words & {"acquire", "acq_rel"}) and root != "red",
        root in ("ld", "atom"),
        not (root == "ld" or (opcode.startswith("cp.async") and ".shared" in opcode.split(".global")[0])),
    )


def is_wide_fence(instruction: Instruction) -> bool:
    """Whether it orders accesses beyond the CTA (9.7.13.4)."""
    root, *words = instruction.opcode.split(".")
    return root in ("fence", "membar") and "proxy" not in words and bool({"gpu", "sys", "gl"} & set(words))


class Strengths(dict[int, Strength]):
    """Of what accesses memory, by instruction; read when it first runs, as until then the blocks may be changed.

    With `ordered_sums` an addition of floats is a write like any other.
    """

    def __init__(self, blocks: Sequence[PtxBlock], ordered_sums: bool = False) -> None:
        super().__init__()
        self._blocks, self._ordered_sums = blocks, ordered_sums
        self._block_of = {i.index: block.index for block in blocks for i in block.instructions}

    def __missing__(self, index: int) -> Strength:
        block = self._blocks[self._block_of[index]]
        opcode = next(i.opcode for i in block.instructions if i.index == index and _ACCESS.match(i.opcode))
        is_sum = self._ordered_sums and _FLOAT_SUM.match(opcode)
        self[index] = found = WEAK_WRITE if is_sum else strength(opcode)
        return found


def smallest_global_access(instructions: list[Instruction]) -> int:
    """The detector's word: 4 bytes, or the smallest element that the kernel moves to or from global memory."""
    return min(_sizes(instructions))


def _sizes(instructions: list[Instruction]) -> Iterator[int]:
    yield 4
    for instruction in instructions:
        root, *words = instruction.opcode.split(".")
        if root in ("ld", "st") and not {"shared", "param", "const", "local"} & set(words):
            yield int(words[-1][1:]) // 8
