"""Where wgmma finds a matrix in shared memory (PTX ISA, 9.7.15.5.1.2, "Shared Memory Matrix Layout").

A matrix is m (or n) x k elements, and lies there in chunks of 16 bytes: along k (K-major), or along m (MN-major, the
transposed form). A descriptor gives the start, two strides and the swizzle; the canonical layouts of that section say
where chunk c of row r lies, before the swizzle, with w the chunks that a swizzled row has (1, 2, 4, 8):
    K-major:   row r of m, chunk c of k:  r / 8 * SBO + r % 8 * 16 w + c * 16      (unswizzled: c * LBO)
    MN-major:  row r of k, chunk c of m:  r / 8 * SBO + r % 8 * 16 w + c / w * LBO + c % w * 16
                                          (unswizzled: r / 8 * LBO + r % 8 * 16 + c * SBO)
The swizzle exchanges chunks by the bits of the address itself, so that a tile may be entered anywhere within a row.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_SWIZZLED_CHUNKS = (1, 8, 4, 2)  # of a row, by the descriptor's code: none, 128, 64, 32 bytes


@dataclass(frozen=True)
class Descriptor:
    """The fields of a matrix descriptor ("Matrix Descriptor Format"); offsets in bytes.

    `leading` and `stride` are LBO and SBO; `chunks` those of a swizzled row, 1: no swizzle; `phase` is the base offset:
    the rows of 128 bytes by which the pattern begins later than its alignment says.
    """

    start: int
    leading: int
    stride: int
    chunks: int
    phase: int


def read_descriptor(bits: int) -> Descriptor:
    """The fields of 64 bits."""
    start, leading, stride = (((bits >> at) & 0x3FFF) << 4 for at in (0, 16, 32))
    return Descriptor(start, leading, stride, _SWIZZLED_CHUNKS[bits >> 62 & 3], bits >> 49 & 7)


@lru_cache(maxsize=4096)
def chunk_addresses(bits: int, rows: int, chunks: int, transposed: bool) -> np.ndarray:
    """The shared address of each chunk of a matrix, (rows, chunks).

    Args:
        bits: the descriptor.
        rows: of m for a K-major matrix, of k for a transposed one.
        chunks: of a row.
        transposed: MN-major.
    """
    of = read_descriptor(bits)
    row, chunk = np.arange(rows)[:, None], np.arange(chunks)[None]
    if of.chunks > 1:
        panel, within = divmod(chunk, of.chunks) if transposed else (0, chunk)
        offset = row // 8 * of.stride + row % 8 * 16 * of.chunks + panel * of.leading + within * 16
    elif transposed:
        offset = row // 8 * of.leading + row % 8 * 16 + chunk * of.stride
    else:
        offset = row // 8 * of.stride + row % 8 * 16 + chunk * of.leading
    found = swizzled(of.start + offset, of.chunks, of.phase)
    found.setflags(write=False)
    return found


def swizzled(address: np.ndarray, chunks: int, phase: int = 0) -> np.ndarray:
    """Addresses after the swizzle of rows of `chunks` chunks (PTX ISA, 5.5.7 "Swizzling Modes"): the number of a chunk
    among 2, 4 or 8 is combined with that of its row of 128 bytes."""
    row = (address >> 7) - phase
    return np.asarray(address ^ ((row & (chunks - 1)) << 4))
