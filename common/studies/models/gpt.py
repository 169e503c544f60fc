"""A small GPT over bytes, whose attention is whatever function it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

VOCABULARY = 256  # bytes

# Of q, k and v, (batch, seqlen, heads, head_dim): O under a causal mask.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batches."""

    layers: int
    heads: int
    head_dim: int
    batch: int
    seqlen: int

    @property
    def width(self) -> int:
        """Columns of what goes from layer to layer."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """Attention and a perceptron, each on what a norm gives, and added to what came in."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.attend = sizes.heads, attend
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.out(self.attend(*qkv.unbind(2)).flatten(2))
        return x + self.down(gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    """The loss of predicting each next byte."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.places = nn.Embedding(sizes.seqlen, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, attend) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        given, wanted = text[:, :-1], text[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(each.numel() for each in model.parameters())


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own attention."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
