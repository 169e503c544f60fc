"""How matrices lie in the registers of a warp (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix").

Lane 4g + t of a warp holds, with e = 0, 1 the lower and upper half of a register:
    A (16 x 16): register 2h + r: row g + 8r, columns 2t + e + 8h      (m16n8k8: registers r)
    B (16 x 8):  register h:      rows 2t + e + 8h, column g           (m16n8k8: one register)
    C (16 x 8):  register 2r + e: row g + 8r, column 2t + e (f32)
    ldmatrix:    matrix n in register n: row g, columns 2t + e; with .trans: row 2t + e, column g
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["multiply", "stack_accumulators"]


def _stack(fragments: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """(len, CTAs, 32) of registers of shape (1 or CTAs, 1 or 32)."""
    rows = max(fragment.shape[0] for fragment in fragments)
    stacked = np.empty((len(fragments), rows, 32), dtype)
    for target, fragment in zip(stacked, fragments, strict=True):
        target[...] = fragment
    return stacked


def stack_accumulators(fragments: Sequence[np.ndarray]) -> np.ndarray:
    """The C fragments of n mma, as multiply() takes them: (n, 4, CTAs or 1, 32) f4."""
    stacked = _stack(fragments, "f4")
    return stacked.reshape(-1, 4, *stacked.shape[1:])


def _widen(bits: np.ndarray, type: str) -> np.ndarray:
    """f4, contiguous, of an array of 16-bit patterns."""
    if type == "f16":
        return bits.view(np.float16).astype(np.float32, order="C")
    wide = bits.astype(np.uint32, order="C")
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def multiply(type: str, a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: np.ndarray) -> np.ndarray:
    """n mma.m16n8k16 (or k8) with one A: C + A B in f4.

    Args:
        type: "bf16" or "f16".
        a: the 4 (2) registers of A, packed pairs (u4).
        b: the 2 (1) registers of B of each mma.
        c: accumulators (n, 4, CTAs or 1, 32) f4.
    Returns:
        (n, 4, CTAs, 32) f4.
    """
    depth = len(a) // 2
    packed_a, packed_b = _stack(a, "u4").view("u2"), _stack(b, "u4").view("u2")
    # A from (h, r, CTA, g, te) to (CTA, r, g, h, te); B from (n, h, CTA, g, te) to its transpose (CTA, n, g, h, te).
    left = _widen(packed_a.reshape(depth, 2, -1, 8, 8).transpose(2, 1, 3, 0, 4), type).reshape(-1, 16, 8 * depth)
    right = _widen(packed_b.reshape(-1, depth, packed_b.shape[1], 8, 8).transpose(2, 0, 3, 1, 4), type)
    num = len(b) // depth
    product = left @ right.reshape(-1, 8 * num, 8 * depth).transpose(0, 2, 1)
    # From (CTA, r, g, n, t, e) to (n, r, e, CTA, g, t).
    product = product.reshape(-1, 2, 8, num, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    rows = max(product.shape[3], c.shape[2])
    result = np.empty((num, 2, 2, rows, 8, 4), np.float32)
    np.add(product, c.reshape(num, 2, 2, -1, 8, 4), out=result)
    return result.reshape(num, 4, rows, 32)


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
