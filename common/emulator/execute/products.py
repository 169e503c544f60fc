"""The products that wgmma names: their form, their matrices in shared memory, and how a chain of them is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..compile.forms import ROW_BYTES, ROWS, Form, ProductShape
from .arrays import Array, classes
from .descriptors import chunk_addresses
from .fragments import halves_to_registers, matrix_of_fragments, registers_to_halves, widen
from .shared import WINDOW

_SMALL_PRODUCT = 1 << 18  # multiplications


@dataclass(frozen=True)
class Started:
    """A product of one warp in flight, in CTAs `rows` (bool), as part of each CTA's group number `group`.

    `a` holds the descriptor of A, or four fragments; `b` the descriptor; `adds` whether D is summed up. A descriptor is
    (1 or CTAs, 1). `early` holds the operands, if they have been read already.
    """

    form: Form
    rows: np.ndarray
    group: np.ndarray
    a: tuple[Array, ...]
    b: Array
    adds: Array
    early: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def matrices(self) -> tuple[Array, ...]:
        """The descriptors: of A, if it lies in shared memory, and of B."""
        return (self.b,) if self.form.a_in_registers else (*self.a, self.b)

    def operands_in(self, row: int) -> list[int]:
        """What the four warps must have alike in a CTA: descriptors, and whether D is summed up."""
        return [value_at(each, row) for each in (*self.matrices, self.adds)]


def product_of_chain(
    shared: np.ndarray, chain: Sequence[tuple[Started, ...]], rows: np.ndarray, where: np.ndarray | None
) -> np.ndarray:
    """A B of a chain in pieces of columns, (CTAs, pieces, 64, columns), in CTAs `rows` (bool), or `where` (None: all).

    Each product is given for the four warps; `shared` is shared memory in units of 16 bytes.
    """
    forms = [together[0].form for together in chain]
    if chain[0][0].early:
        of_warps = []
        for of_warp in zip(*chain, strict=True):
            lefts, rights = zip(*(each.early for each in of_warp if each.early), strict=True)
            left, right = (np.concatenate([part_of(x, where) for x in each], axis=2) for each in (lefts, rights))
            of_warps.append(_in_pieces(_with_signs(left, forms), right))
        return np.concatenate(of_warps, axis=2)
    right = _matrix(shared, 1, forms, [value_at(together[0].b, rows) for together in chain], where)
    if forms[0].a_in_registers:
        held = [[part_of(x, where) for each in of_warp for x in each.a] for of_warp in zip(*chain, strict=True)]
        left = np.concatenate([matrix_of_fragments(each, forms[0].types[0]) for each in held], axis=1)
    else:
        left = _matrix(shared, 0, forms, [value_at(together[0].a[0], rows) for together in chain], where)
    return _in_pieces(_with_signs(left, forms), right)


def read_early(shared: np.ndarray, started: Started, own: int) -> Started:
    """A product whose operands are read when it starts: of warp `own` its 16 rows of A, and B, of all CTAs."""
    form, count = started.form, len(started.rows)
    left, right = (np.zeros((count, extent, form.depth), np.float32) for extent in (16, form.columns))
    if form.a_in_registers:
        left[...] = matrix_of_fragments(started.a, form.types[0])
    for chosen in classes(started.rows, [each[:, 0] for each in started.matrices if len(each) > 1]):
        where = np.nonzero(chosen)[0]
        right[where] = _matrix(shared, 1, [form], [value_at(started.b, chosen)], where)
        if not form.a_in_registers:
            whole = _matrix(shared, 0, [form], [value_at(started.a[0], chosen)], where)
            left[where] = whole[:, 16 * own : 16 * own + 16]
    return replace(started, early=(left, right))


def _matrix(
    shared: np.ndarray, which: int, forms: Sequence[Form], bits: Sequence[int], where: np.ndarray | None
) -> np.ndarray:
    """A (0) or B (1) of a chain, (CTAs, m or n, k) f4."""
    form, transposed = forms[0], forms[0].transposed[which]
    parts = [(_addresses(form.shape, which, each) - WINDOW) >> 4 for each in bits]
    units = np.concatenate(parts, axis=0 if transposed else 1)
    chunks = (shared if where is None else shared[where]).take(units, axis=1)
    matrix = widen(chunks, form.types[which])
    return matrix.transpose(0, 2, 1) if transposed else matrix


def _in_pieces(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A times the transpose of B, in pieces of columns, (CTAs, pieces, rows, columns).

    The largest pieces for which OpenBLAS starts no threads: on a busy machine these wait for each other a hundred times
    as long as they multiply.
    """
    count, columns, depth = right.shape
    fitting = [c for c in range(8, columns + 1, 8) if columns % c == 0 and 64 * c * depth <= _SMALL_PRODUCT]
    width = max(fitting, default=8)
    return np.asarray(left[:, None] @ right.reshape(count, -1, width, depth).transpose(0, 1, 3, 2))


def summed(product: np.ndarray, old: list[Array] | None, result: str) -> np.ndarray:
    """The accumulator registers, after a product was added to what they held."""
    if result == "f16":
        return halves_to_registers(product if old is None else product + registers_to_halves(old))
    for value, summand in zip(product, old or (), strict=False):
        value += summand.view("f4")
    return product


def _addresses(shape: ProductShape, which: int, bits: int) -> np.ndarray:
    """The addresses of the chunks of one product's A (0) or B (1): (m or n, chunks of k), or (k, chunks of m or n)."""
    columns, transposed = shape
    extent = columns if which else ROWS
    if transposed[which]:
        return chunk_addresses(bits, ROW_BYTES // 2, extent // 8, True)
    return chunk_addresses(bits, extent, ROW_BYTES // 16, False)


@lru_cache(maxsize=1024)
def units_read(products: tuple[tuple[ProductShape, tuple[int, ...]], ...], own: int) -> np.ndarray:
    """The units of 16 bytes in shared memory that warp `own` of a warpgroup reads for some products, given by shape and
    descriptors: its 16 rows of A, and B."""
    found = []
    for shape, descriptors in products:
        found.append(_addresses(shape, 1, descriptors[-1]))
        if len(descriptors) > 1:
            of_a, (_, transposed) = _addresses(shape, 0, descriptors[0]), shape
            found.append(of_a[:, 2 * own : 2 * own + 2] if transposed[0] else of_a[16 * own : 16 * own + 16])
    return np.unique(np.concatenate([each.reshape(-1) for each in found]) - WINDOW) >> 4


def value_at(values: Array, rows: np.ndarray | int) -> int:
    """The value in the first of these CTAs."""
    row = int(np.argmax(rows)) if isinstance(rows, np.ndarray) else rows
    return int(values[row if len(values) > 1 else 0, 0])


def part_of(values: Array, where: np.ndarray | None) -> Array:
    return values if where is None or len(values) == 1 else values[where]


def _with_signs(left: np.ndarray, forms: Sequence[Form]) -> np.ndarray:
    """A, negative along k where the product is subtracted."""
    if not any(form.negative for form in forms):
        return left
    signs = np.array([-1 if form.negative else 1 for form in forms], np.float32)
    return np.asarray(left * np.repeat(signs, left.shape[2] // len(forms)))
