"""The inputs of one sequence while a family designs them: exact scores, through channels of q and k."""

from __future__ import annotations

import math

import torch

_TILE = 128  # rows, after which the keys that they match are shifted by one


class Sketch:
    """The inputs of one sequence while a family designs them, in fp32 and heads first.

    q is (num_heads, seqlen_q, head_dim), k is (num_heads_k, seqlen_k, head_dim), and so is v where it is not wider.
    Scores are sums of products: of what a row brings, broadcast to (num_heads, seqlen_q), and what a key brings,
    broadcast to (num_heads_k, seqlen_k).
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, head_dim_v: int, softmax_scale: float, random: torch.Generator
    ) -> None:
        self.dtype, self.scale, self.random = q.dtype, softmax_scale, random
        self.q, self.k = (torch.zeros(heads_first(x).shape, device=random.device) for x in (q, k))
        self.row = torch.arange(q.shape[1], device=random.device)[None] + q.shape[1] * self._heads()[:, None]
        self.key = torch.arange(k.shape[1], device=random.device)
        self.behind = k.shape[1] - 1 - self.key  # 0 is the last key, which is taken first
        heads_k, columns = k.shape[2], max(k.shape[3], head_dim_v)
        means = 2 ** self.uniform(heads_k, 1, columns)
        self.v = means * (0.75 + 0.5 * self.uniform(heads_k, k.shape[1], columns))
        self._channels = 0  # that are taken

    def _heads(self) -> torch.Tensor:
        return torch.arange(self.q.shape[0], device=self.q.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Random numbers from 0 to 1."""
        return torch.rand(shape, generator=self.random, device=self.random.device)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal ones."""
        return torch.randn(shape, generator=self.random, device=self.random.device)

    def near(self, nats: float) -> torch.Tensor:
        """A number for each row, all within 3 % of a weight: no one rounding of P decides a family's mean error."""
        return nats + 0.06 * (self.uniform(*self.row.shape) - 0.5)

    def add(self, of_row: torch.Tensor | float, of_key: torch.Tensor) -> None:
        """Adds of_row * of_key to the scores, in nats. Four channels hold it to 16 bits or more, whatever the dtype."""
        rows = torch.as_tensor(of_row, device=self.q.device).float().broadcast_to(self.q.shape[:2])
        keys = (of_key.double() / self.scale).float().broadcast_to(self.k.shape[:2])
        gain = _gain(keys, rows)
        for row_part in self._parts(rows * gain):
            for key_part in self._parts(keys / gain):
                self.q[..., self._channels] = row_part
                self.k[..., self._channels] = key_part
                self._channels += 1

    def noise(self, sigma: float) -> None:
        """Normal scores with this standard deviation, in nats, from the channels that are left."""
        q, k = (x[..., self._channels :] for x in (self.q, self.k))
        q.copy_(self.normal(*q.shape))
        k.copy_(self.normal(*k.shape) * (sigma / self.scale / math.sqrt(q.shape[-1])))
        gain = _gain(k, q)
        q *= gain
        k /= gain
        self._channels = self.q.shape[-1]

    def match(self, nats: float) -> None:
        """Gives each row a key of its own, whose score is this far above all others'; in turn every key, for every row.

        A row and a key match where all digits of a number agree; each digit that agrees is worth `nats`.
        """
        keys, head_dim = len(self.key), self.q.shape[-1]
        digits = next(count for count in range(1, head_dim) if (head_dim // count) ** count >= keys)
        base = head_dim // digits
        wanted = (self.row + self.row // _TILE) % keys
        worth = torch.tensor(nats / self.scale)
        gain = _gain(worth, torch.ones(1))
        for digit in range(digits):
            for x, numbers, size in ((self.q, wanted, gain), (self.k, self.key[None], float(worth) / gain)):
                channel = (numbers // base**digit % base + digit * base)[..., None]
                x.scatter_(-1, channel.expand(*x.shape[:2], 1), size)
        self._channels = head_dim

    def hide(self, keys: torch.Tensor) -> None:
        """V is zero at these keys (a mask) in the odd columns."""
        self.v[:, keys, 1::2] = 0

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two 16-bit numbers whose sum is x."""
        high = x.to(self.dtype).float()
        return high, x - high


def _gain(keys: torch.Tensor, rows: torch.Tensor) -> float:
    """The power of two that brings q and k to about the same size, so that neither leaves the range of fp16."""
    largest = [float(x.abs().max()) or 1.0 for x in (keys, rows)]
    return 2.0 ** round(math.log2(largest[0] / largest[1]) / 2)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim) of one sequence as (heads, seqlen, head_dim)."""
    return x[0].transpose(0, 1)
