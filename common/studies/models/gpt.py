"""A small GPT over bytes, whose attention is whatever function it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256  # bytes

# Of q, (batch, seqlen, heads, head_dim), and of k and v with heads_k: O under a causal mask.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batches."""

    layers: int
    heads: int
    head_dim: int
    batch: int
    seqlen: int
    heads_k: int | None = None  # of K and V; as heads without it

    @property
    def width(self) -> int:
        """Columns of what goes from layer to layer."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """Attention and a perceptron, each on what a norm gives, and added to what came in."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        width, heads_k = sizes.width, sizes.heads_k or sizes.heads
        self.heads, self.head_dim, self.attend = (sizes.heads, heads_k, heads_k), sizes.head_dim, attend
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, sum(self.heads) * self.head_dim), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.head_dim))
        x = x + self.out(self.attend(*qkv.split(self.heads, 2)).flatten(2))
        return x + self.down(gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    """The loss of predicting each next byte. With `checkpoints` a block keeps its input alone for the backward pass."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.sizes, self.checkpoints = sizes, False
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.places = nn.Embedding(sizes.seqlen, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, attend) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        given, wanted = text[:, :-1], text[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(each.numel() for each in model.parameters())


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """torch's own attention."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=grouped)
    return o.transpose(1, 2)
