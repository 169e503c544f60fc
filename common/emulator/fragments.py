"""How matrices lie in the registers of a warp (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix").

Lane 4g + t of a warp holds, with e = 0, 1 the lower and upper half of a register:
    A (16 x 16): register 2h + r: row g + 8r, columns 2t + e + 8h      (m16n8k8: registers r)
    B (16 x 8):  register h:      rows 2t + e + 8h, column g           (m16n8k8: one register)
    C (16 x 8):  register 2r + e: row g + 8r, column 2t + e (f32)
    ldmatrix:    matrix n in register n: row g, columns 2t + e; with .trans: row 2t + e, column g
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["multiply"]


def _stack(fragments: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """(len, CTAs, 32) of registers of shape (1 or CTAs, 1 or 32)."""
    rows = max(fragment.shape[0] for fragment in fragments)
    stacked = np.empty((len(fragments), rows, 32), dtype)
    for target, fragment in zip(stacked, fragments, strict=True):
        target[...] = fragment
    return stacked


def _widen(octets: np.ndarray, type: str) -> np.ndarray:
    """f4 of an array of c16, each of which is eight 16-bit floats: the last axis becomes eight times as long."""
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
    left = _widen(left, type).reshape(-1, 16 * num_rows, depth)
    right = _widen(right, type).reshape(-1, 8 * num_cols, depth)
    product = left @ right.transpose(0, 2, 1)
    # C from (CTA, m, r, g, e, n, t) to (m, n, r, e, CTA, g, t).
    product = product.reshape(-1, num_rows, 2, 8, 2, num_cols, 4).transpose(1, 5, 2, 4, 0, 3, 6)
    result = np.ascontiguousarray(product).reshape(4 * num_rows * num_cols, -1, 32)
    return result if c is None else _add(result, _stack(c, "f4"))


def _add(product: np.ndarray, accumulators: np.ndarray) -> np.ndarray:
    """The sum, in the array of `product` unless only the accumulators differ between CTAs."""
    fits = product.shape[1] >= accumulators.shape[1]
    return np.add(product, accumulators, out=product if fits else None)


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
