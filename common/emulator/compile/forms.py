"""What a wgmma.mma_async says of itself: the shape, types and places of its matrices."""

from dataclasses import dataclass
from typing import Any

ROWS = 64  # of A
ROW_BYTES = 32  # of k in one product, whatever the type

ProductShape = tuple[int, tuple[bool, bool]]  # n, and whether A and B are MN-major


@dataclass(frozen=True)
class Form:
    """A wgmma.mma_async as it stands in the program.

    Attributes:
        index: the instruction.
        columns: n.
        types: of A and B; result: "f32" or "f16".
        slots: the accumulators' registers, with the numpy type codes that they are stored as in `storage`.
        a_in_registers: A is given by fragments.
        transposed: whether A and B are MN-major.
        negative: the product is subtracted.
    """

    index: int
    columns: int
    types: tuple[str, str]
    result: str
    slots: tuple[int, ...]
    storage: tuple[str, ...]
    a_in_registers: bool
    transposed: tuple[bool, bool]
    negative: bool

    @property
    def shape(self) -> ProductShape:
        """What says where A and B lie, besides their descriptors."""
        return self.columns, self.transposed

    @property
    def depth(self) -> int:
        """k."""
        return 32 if self.types[0] in ("e4m3", "e5m2") else 16

    @property
    def shared_bytes(self) -> int:
        """What a product reads of shared memory, once for its four warps: B, and A if it lies there."""
        return (self.columns + (0 if self.a_in_registers else ROWS)) * ROW_BYTES

    @property
    def kind(self) -> tuple[Any, ...]:
        """Products of one kind can be done as one, along k."""
        return self.shape, self.types, self.a_in_registers
