"""Generation: a prompt goes into a cache of keys and values, then one row after the other attends to it."""

import torch

from flashladder import attention, flash_attn_with_kvcache

device = "cuda" if torch.cuda.is_available() else "cpu"
batch, heads, heads_k, head_dim, prompt, room, steps = 1, 4, 2, 64, 60, 128, 3


def random(rows: int, heads: int) -> torch.Tensor:
    return torch.randn(batch, rows, heads, head_dim, device=device, dtype=torch.bfloat16)


torch.manual_seed(0)
k_cache, v_cache = (torch.zeros(batch, room, heads_k, head_dim, device=device, dtype=torch.bfloat16) for _ in "kv")
lengths = torch.zeros(batch, dtype=torch.int32, device=device)  # rows that the cache holds of each sequence

for step in range(1 + steps):
    rows = prompt if step == 0 else 1
    q, k, v = random(rows, heads), random(rows, heads_k), random(rows, heads_k)
    o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)  # writes k and v too
    lengths += rows

total = int(lengths[0])
again = attention(q, k_cache[:, :total], v_cache[:, :total], causal=True)
torch.testing.assert_close(o, again, atol=0.02, rtol=0.02)
print(f"{total} rows in the cache; the last row is that of attention over all of them")
