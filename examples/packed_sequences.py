"""Sequences of different lengths behind one another, without padding: one launch computes all of them."""

import torch

from flashladder import attention, packed_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
lengths = [70, 5, 33]
heads, heads_k, head_dim = 4, 2, 64

torch.manual_seed(0)
q, k, v = (
    torch.randn(sum(lengths), n, head_dim, device=device, dtype=torch.bfloat16) for n in (heads, heads_k, heads_k)
)
cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)  # where each one begins
o = packed_attention(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=True)

for rows in torch.arange(sum(lengths), device=device).split(lengths):
    alone = attention(q[None, rows], k[None, rows], v[None, rows], causal=True)[0]
    torch.testing.assert_close(o[rows], alone, atol=0.02, rtol=0.02)
print(f"{len(lengths)} sequences, {tuple(o.shape)} in all: each is as by itself")
