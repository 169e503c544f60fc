"""Attention in a torch model: a layer whose attention is the ladder's, checked beside torch's own.

Runs on a GPU, or on the CPU, where an emulator computes: a few hundred rows take a second.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from flashladder import attention

device = "cuda" if torch.cuda.is_available() else "cpu"


class SelfAttention(torch.nn.Module):
    def __init__(self, heads: int, heads_k: int, head_dim: int) -> None:
        super().__init__()
        self.split = [heads, heads_k, heads_k]
        self.head_dim = head_dim
        self.qkv = torch.nn.Linear(heads * head_dim, sum(self.split) * head_dim, bias=False)
        self.out = torch.nn.Linear(heads * head_dim, heads * head_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.split, dim=2)  # (batch, rows, heads, dim)
        return self.out(attention(q, k, v, causal=True).flatten(2))


torch.manual_seed(0)
layer = SelfAttention(heads=4, heads_k=2, head_dim=64).to(device, torch.bfloat16)
x = torch.randn(2, 100, 4 * 64, device=device, dtype=torch.bfloat16)
with torch.no_grad():
    y = layer(x)
    q, k, v = (t.transpose(1, 2) for t in layer.qkv(x).unflatten(-1, (-1, 64)).split(layer.split, dim=2))
    torchs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torchs = layer.out(torchs.transpose(1, 2).flatten(2))

torch.testing.assert_close(y, torchs, atol=0.02, rtol=0.02)
print(f"{tuple(y.shape)} on {device}: within {(y - torchs).abs().max():.4f} of torch's")
