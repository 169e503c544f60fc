"""Training: steps of an optimizer through attention, whose gradients the backward ladder computes."""

import torch

from flashladder import attention

device = "cuda" if torch.cuda.is_available() else "cpu"
heads, head_dim, rows, words = 2, 64, 64, 16

torch.manual_seed(0)
embed = torch.nn.Embedding(words, heads * head_dim)
qkv = torch.nn.Linear(heads * head_dim, 3 * heads * head_dim)
head = torch.nn.Linear(heads * head_dim, words)
model = torch.nn.ModuleList([embed, qkv, head]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

half = torch.randint(words, (1, rows // 2), device=device)
text = torch.cat([half, half], dim=1)  # the second half repeats the first: only attention can know it

losses = []
for _ in range(3):
    x = embed(text[:, :-1])
    q, k, v = qkv(x).bfloat16().unflatten(-1, (3, heads, head_dim)).unbind(2)
    o = attention(q, k, v, causal=True)
    logits = head(x + o.flatten(2).float())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

assert losses[-1] < losses[0], losses
print("losses:", ", ".join(f"{loss:.3f}" for loss in losses))
