"""How matrices lie in the registers of a warp (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix").

Lane 4g + t of a warp holds, with e = 0, 1 the lower and upper half of a register:
    A (16 x 16): register 2h + r: row g + 8r, columns 2t + e + 8h      (m16n8k8: registers r)
    B (16 x 8):  register h:      rows 2t + e + 8h, column g           (m16n8k8: one register)
    C (16 x 8):  register 2r + e: row g + 8r, column 2t + e (f32)
    ldmatrix:    matrix n in register n: row g, columns 2t + e; with .trans: row 2t + e, column g

A warp of a warpgroup holds 16 of the 64 rows of wgmma's A and D in the same way (PTX ISA, 9.7.15.5.1.1): A (16 x 32
bytes) as four registers, D (16 x n) as blocks of eight columns, two packed to a register if they are f16.
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["eights_to_halves", "multiply", "to_eights"]


def _table_of_eights(exponent_bits: int) -> np.ndarray:
    """f4 of every 8-bit float with this many exponent bits: 4 (e4m3, without infinity) or 5 (e5m2)."""
    bits, fraction_bits = np.arange(256), 7 - exponent_bits
    bias = (1 << exponent_bits - 1) - 1
    exponent, fraction = bits >> fraction_bits & (1 << exponent_bits) - 1, bits & (1 << fraction_bits) - 1
    scaled = np.where(exponent > 0, (1 << fraction_bits) + fraction, fraction)
    values = np.ldexp(scaled.astype(np.float32), np.maximum(exponent, 1) - bias - fraction_bits)
    if exponent_bits == 5:
        values[exponent == 31] = np.where(fraction[exponent == 31] == 0, np.inf, np.nan)
    else:
        values[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -values, values).astype(np.float32)


_EIGHTS = {"e4m3": _table_of_eights(4), "e5m2": _table_of_eights(5)}
_AS_HALVES = {
    type: np.where(np.isnan(values), np.uint16(0x7FFF), values.astype("f2").view("u2"))
    for type, values in _EIGHTS.items()
}


def eights_to_halves(pairs: np.ndarray, type: str) -> np.ndarray:
    """Packed pairs of f16 (u4) of packed pairs of 8-bit floats (u2), exact."""
    return _AS_HALVES[type].take(np.ascontiguousarray(pairs)[..., None].view("u1")).view("u4")[..., 0]


_MAGNITUDES = _EIGHTS["e4m3"][:127]
_BETWEEN = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2


def to_eights(x: np.ndarray) -> np.ndarray:
    """u2 of the nearest e4m3 of f4, of two that are as near the even one; beyond the largest that, NaN for NaN."""
    size = np.abs(x)
    nearest = np.searchsorted(_BETWEEN, size)  # the lower one, where it is between two
    is_between = _BETWEEN[np.minimum(nearest, len(_BETWEEN) - 1)] == size
    nearest = np.where(np.isnan(x), 127, nearest + (is_between & (nearest % 2 == 1)))
    return (nearest | np.signbit(x) * 128).astype("u2")


def _stack(fragments: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """(len, CTAs, 32) of registers of shape (1 or CTAs, 1 or 32)."""
    rows = max(fragment.shape[0] for fragment in fragments)
    stacked = np.empty((len(fragments), rows, 32), dtype)
    for target, fragment in zip(stacked, fragments, strict=True):
        target[...] = fragment
    return stacked


def widen(octets: np.ndarray, type: str) -> np.ndarray:
    """f4 of an array of c16, each of which is 16 bytes of floats: the last axis becomes 8 or 16 times as long."""
    if type in _EIGHTS:
        return _EIGHTS[type].take(np.ascontiguousarray(octets).view("u1"))
    bits = np.ascontiguousarray(octets).view("u2")
    if type == "f16":
        return bits.view("f2").astype("f4")
    wide = bits.astype("u4")
    wide <<= np.uint32(16)
    return wide.view("f4")


def multiply(
    type: str, num_rows: int, a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray] | None
) -> np.ndarray:
    """Several mma at once: C + A B in f4, for `num_rows` blocks of 16 rows and some blocks of 8 columns.

    Args:
        type: "bf16" or "f16".
        a: registers of A (packed pairs, u4), block by block, each along k: 4 a step of m16n8k16, 2 of m16n8k8.
        b: registers of B, block by block, each along k: 2 (1) a step.
        c: accumulators, 4 registers for each row block and column block, row by row; None: zero.
    Returns:
        The same accumulators, (registers, CTAs, 32) f4.
    """
    halves = len(a) // (2 * num_rows)  # eights along k
    num_cols, depth = len(b) // halves, 8 * halves
    # The eight values te of four neighbouring lanes stay together. A from (m, h, r, CTA, g, te) to
    # (CTA, m, r, g, h, te); B from (n, h, CTA, t, e, te) to its transpose (CTA, e, n, t, h, te): columns as suits C.
    left = _stack(a, "u4").view("c16").reshape(num_rows, halves, 2, -1, 8).transpose(3, 0, 2, 4, 1)
    right = _stack(b, "u4").view("c16").reshape(num_cols, halves, -1, 4, 2).transpose(2, 4, 0, 3, 1)
    left = widen(left, type).reshape(-1, 16 * num_rows, depth)
    right = widen(right, type).reshape(-1, 8 * num_cols, depth)
    product = left @ right.transpose(0, 2, 1)
    # C from (CTA, m, r, g, e, n, t) to (m, n, r, e, CTA, g, t).
    product = product.reshape(-1, num_rows, 2, 8, 2, num_cols, 4).transpose(1, 5, 2, 4, 0, 3, 6)
    result = np.ascontiguousarray(product).reshape(4 * num_rows * num_cols, -1, 32)
    return result if c is None else _add(result, _stack(c, "f4"))


def _add(product: np.ndarray, accumulators: np.ndarray) -> np.ndarray:
    """The sum, in the array of `product` unless only the accumulators differ between CTAs."""
    fits = product.shape[1] >= accumulators.shape[1]
    return np.add(product, accumulators, out=product if fits else None)


def matrix_of_fragments(registers: Sequence[np.ndarray], type: str) -> np.ndarray:
    """A of a warp of a warpgroup: four registers for each 32 bytes along k, to (CTAs, 16, k) f4."""
    octets = _stack(registers, "u4").view("c16")  # (step, h, r, CTA, g), each the 16 bytes of four neighbouring lanes
    rows = octets.reshape(len(registers) // 4, 2, 2, -1, 8).transpose(3, 2, 4, 0, 1)
    return widen(np.ascontiguousarray(rows).reshape(rows.shape[0], 16, -1), type)


def accumulators_of(product: np.ndarray) -> np.ndarray:
    """D of a warpgroup in pieces of columns, (CTAs, pieces, 64, columns), as the values of each warp's lanes: for every
    eight columns four, row by row, (4 warps, n / 2, CTAs, 32)."""
    count, pieces, _, columns = product.shape
    blocks = product.reshape(count, pieces, 4, 2, 8, columns // 8, 4, 2).transpose(2, 1, 5, 3, 7, 0, 4, 6)
    return np.ascontiguousarray(blocks).reshape(4, -1, count, 32)


def halves_to_registers(values: np.ndarray) -> np.ndarray:
    """Accumulators in f4, (n / 2, CTAs, 32), to packed pairs of f16, (n / 4, CTAs, 32) u4."""
    pairs = np.stack([values[0::2], values[1::2]], axis=-1).astype("f2")
    return pairs.view("u4")[..., 0]


def registers_to_halves(registers: Sequence[np.ndarray]) -> np.ndarray:
    """The inverse of halves_to_registers."""
    pairs = _stack(registers, "u4").view("f2").astype("f4")
    pairs = pairs.reshape(len(registers), -1, 32, 2)
    return pairs.transpose(0, 3, 1, 2).reshape(2 * len(registers), -1, 32)


def rows_to_registers(rows: np.ndarray, trans: bool) -> np.ndarray:
    """ldmatrix: rows (CTAs, 8n) of 16 bytes (c16) to registers (n, CTAs, 32) u4."""
    if not trans:
        return rows.view("u4").reshape(rows.shape[0], -1, 32).transpose(1, 0, 2)
    halves = rows.view("u2").reshape(rows.shape[0], -1, 8, 8).transpose(1, 0, 3, 2)
    return np.ascontiguousarray(halves).view("u4").reshape(halves.shape[0], -1, 32)


def registers_to_rows(registers: Sequence[np.ndarray], trans: bool) -> np.ndarray:
    """stmatrix: n registers to rows (CTAs, 8n) of 16 bytes (c16)."""
    halves = _stack(registers, "u4").view("u2").reshape(len(registers), -1, 8, 8)
    order = (1, 0, 3, 2) if trans else (1, 0, 2, 3)
    return np.ascontiguousarray(halves.transpose(order)).view("c16").reshape(halves.shape[1], -1)
