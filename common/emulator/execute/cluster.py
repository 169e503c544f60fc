"""Clusters: CTAs that reach each other's shared memory (PTX ISA 2.2.2).

The CTAs of a cluster are consecutive rows of a chunk, by rank. An address of shared::cluster tells the rank of its CTA
above its low bits, as mapa makes it (9.7.9.23); an address of shared::cta says nothing there, and means the own CTA.
"""

from collections.abc import Iterator

import numpy as np

from ..errors import SynchronisationError, UnsupportedInstructionError
from .arrays import Array, Mask, every_lane, narrow

RANK_BITS = 24  # an address is (rank + 1) << RANK_BITS | the address in the CTA
MOST_CTAS = 16
GridShape = tuple[int, int, int]
ALONE: GridShape = 1, 1, 1  # without a cluster


def ranks_of(address: Array) -> Array:
    """The rank that each address names, plus 1; 0: the own CTA."""
    return address >> address.dtype.type(RANK_BITS)


def without_rank(address: Array) -> Array:
    """The addresses within their CTA."""
    return address & address.dtype.type((1 << RANK_BITS) - 1)


def ordered_ctas(grid: GridShape, cluster: GridShape) -> np.ndarray:
    """The CTAs of a grid (x fastest), those of a cluster beside each other by rank.

    Raises:
        UnsupportedInstructionError: the grid does not consist of such clusters.
    """
    if any(g % c for g, c in zip(grid, cluster, strict=True)) or np.prod(cluster) > MOST_CTAS:
        raise UnsupportedInstructionError(f"a grid of {grid} CTAs in clusters of {cluster}")
    ids = np.arange(np.prod(grid)).reshape(grid[::-1])
    (gx, gy, gz), (cx, cy, cz) = grid, cluster
    parted = ids.reshape(gz // cz, cz, gy // cy, cy, gx // cx, cx)
    return parted.transpose(0, 2, 4, 1, 3, 5).reshape(-1)


class Cluster:
    """How the rows of a chunk form clusters of a shape."""

    def __init__(self, shape: GridShape, num_ctas: int) -> None:
        self.shape, self.size = shape, int(np.prod(shape))
        self.ranks = np.arange(num_ctas) % self.size

    def rows_of(self, rows: np.ndarray, rank: int) -> np.ndarray:
        """The rows of the CTAs of a rank in the clusters of these rows."""
        return rows // self.size * self.size + rank

    def by_rank(self, address: Array, mask: Mask) -> Iterator[tuple[int, Array, Mask]]:
        """For each rank (plus 1; 0: the own CTA) that active lanes name: their addresses in the CTA, and the lanes."""
        ranks = ranks_of(address)
        if not ranks.any() and (mask is None or mask.any()):
            yield 0, address, mask
            return
        shape = np.broadcast_shapes(ranks.shape, (1, 32) if mask is None else mask.shape, (1, 32))
        active = np.broadcast_to(True if mask is None else mask, shape)
        named = np.unique(ranks if ranks.size == 1 else np.broadcast_to(ranks, shape)[active]).tolist()
        if max(named, default=0) > self.size:
            raise SynchronisationError(f"an address of rank {named[-1] - 1} in a cluster of {self.size} CTAs")
        if self.size == 1 or ranks.size == 1:
            yield 0 if self.size == 1 else named[0], without_rank(address), mask
            return
        for rank in named:
            chosen = narrow(mask, every_lane(ranks == rank))
            yield rank, without_rank(address), None if chosen.all() else chosen
