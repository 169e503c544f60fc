"""A server: continuous batching over a paged cache, where prompts, chunks of them and tokens are rows of one call.

Lengths, pages and tokens lie on the device. The host says how many rows each sequence has in a step, and reads nothing
before the end. On a GPU steps are CUDA graphs.

    python examples/serve.py [--fp8] [--sequences 64] [--keys 2048] [--new 64]
"""

import argparse
import time

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention, silu
from torch.utils.benchmark import Timer

from flashladder import flash_attn_varlen_func, reshape_and_cache

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LAYERS, HEADS, HEADS_K, COLUMNS, VOCABULARY = (4, 32, 8, 128, 32000) if ON_GPU else (2, 2, 1, 64, 64)
SEQUENCES, KEYS, NEW, ROWS = (64, 2048, 64, 2048) if ON_GPU else (2, 20, 3, 16)
HIDDEN, PAGE, SCALE = HEADS * COLUMNS, 16, 0.05  # keys of a page; what 1 means in a cache of 8 bits
normed = nn.RMSNorm(HIDDEN, elementwise_affine=False)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        sizes = {"qkv": (HIDDEN, (HEADS + 2 * HEADS_K) * COLUMNS), "out": (HIDDEN, HIDDEN)}
        sizes |= {"up": (HIDDEN, 4 * HIDDEN), "down": (2 * HIDDEN, HIDDEN)}
        blocks = ({name: nn.Linear(*size, bias=False) for name, size in sizes.items()} for _ in range(LAYERS))
        self.blocks = nn.ModuleList(nn.ModuleDict(block) for block in blocks)
        for linear in (module for module in self.modules() if isinstance(module, nn.Linear)):
            nn.init.normal_(linear.weight, std=1.5 * linear.in_features**-0.5)

    def forward(self, tokens, positions, attend):
        """The last hidden rows, (rows, HIDDEN). attend(layer, q, k, v) is attention, of (rows, heads, COLUMNS)."""
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            q, k, v = block.qkv(normed(x)).unflatten(-1, (-1, COLUMNS)).split((HEADS, HEADS_K, HEADS_K), 1)
            x = x + block.out(attend(layer, turned(q, positions), turned(k, positions), v).flatten(1))
            gate, up = block.up(normed(x)).chunk(2, -1)
            x = x + block.down(silu(gate) * up)
        return normed(x)


def turned(x, positions):
    """x with rotary embeddings."""
    angles = positions[:, None, None] * 10000.0 ** (-2 / COLUMNS * torch.arange(COLUMNS // 2, device=DEVICE))
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x.dtype)


class Server:
    """Up to so many sequences at a time, of up to `room` keys each, and up to ROWS rows in a step."""

    def __init__(self, model: Llama, sequences: int, room: int, fp8: bool) -> None:
        self.model, self.sequences, pages, self.graphs = model, sequences, -(-room // PAGE), {}
        of_cache, dtype = (sequences * pages, PAGE, HEADS_K, COLUMNS), torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.cache = [[torch.empty(of_cache, dtype=dtype, device=DEVICE) for _ in "kv"] for _ in range(LAYERS)]
        self.scales = dict.fromkeys(("k_descale", "v_descale"), torch.full((1,), SCALE, device=DEVICE)) if fp8 else {}
        self.tokens = torch.zeros(sequences, pages * PAGE + 1, dtype=torch.long, device=DEVICE)
        self.table = torch.full((sequences, pages), -1, dtype=torch.int32, device=DEVICE)
        self.new, self.lengths, self.prompts = torch.zeros(3, sequences, dtype=torch.int32, device=DEVICE)
        self.free = torch.randperm(sequences * pages).tolist()

    def step(self, rows: int) -> None:
        """Runs the new rows of each sequence, and writes the next token of those whose prompt has ended."""
        ends, row = self.new.cumsum(0), torch.arange(rows, device=DEVICE)
        self.starts, owner = pad(ends, (1, 0)).int(), torch.searchsorted(ends, row, right=True)
        is_row, owner = owner < self.sequences, owner.clamp(max=self.sequences - 1)  # others are behind the last
        positions = torch.where(is_row, self.lengths[owner] + row - self.starts[owner], 0)
        self.slots = torch.where(is_row, self.table[owner, positions // PAGE].long() * PAGE + positions % PAGE, -1)
        self.lengths += self.new
        hidden = self.model(self.tokens[owner, positions], positions, self.attend)
        best = self.model.head(hidden[ends - 1]).argmax(-1)[:, None]
        place, is_next = self.lengths.long()[:, None], (self.new > 0) & (self.lengths >= self.prompts)
        self.tokens.scatter_(1, place, torch.where(is_next[:, None], best, self.tokens.gather(1, place)))

    def attend(self, layer, q, k, v):
        """New keys go to their slots, and each row sees the keys of its sequence up to its own."""
        reshape_and_cache(k, v, *self.cache[layer], self.slots, **self.scales)
        options = {"block_table": self.table, "seqused_k": self.lengths, "causal": True, **self.scales}
        most = len(q), self.table.shape[1] * PAGE  # rows and keys of a sequence
        return flash_attn_varlen_func(q, *self.cache[layer], self.starts, None, *most, **options)

    def captured(self, rows: int) -> torch.cuda.CUDAGraph:
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            self.step(rows)
        return graph

    def launch(self, rows: int) -> None:
        """A step; on a GPU it is captured once for so many rows, and replayed for any lengths."""
        if rows in self.graphs:
            self.graphs[rows].replay()
        else:
            self.step(rows)
            self.graphs |= {rows: self.captured(rows)} if ON_GPU else {}

    def serve(self, requests: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """The tokens that follow each prompt, on the device: as many as it wants."""
        waiting, running, answers = list(enumerate(requests)), {}, {}
        while waiting or running:
            for sequence in set(range(self.sequences)) - set(running):
                if waiting and len(self.free) >= (pages := -(-(len(waiting[0][1][0]) + waiting[0][1][1]) // PAGE)):
                    index, (prompt, wanted) = waiting.pop(0)
                    self.tokens[sequence, : len(prompt)], self.lengths[sequence] = prompt, 0
                    self.prompts[sequence] = len(prompt)
                    taken, self.free = self.free[:pages], self.free[pages:]
                    upload(self.table[sequence, :pages], taken)
                    running[sequence] = [index, len(prompt), wanted, 0, taken]  # 0 keys are in the cache
            new, left = [0] * self.sequences, ROWS
            for sequence in sorted(running, key=lambda s: running[s][1] - running[s][3]):  # tokens first, then prompts
                new[sequence] = min(left, max(1, running[sequence][1] - running[sequence][3]))
                left -= new[sequence]
            upload(self.new, new)
            self.launch(self.sequences if max(new) == 1 else ROWS)
            for sequence in list(running):
                running[sequence][3] += new[sequence]
                index, prompted, wanted, held, taken = running[sequence]
                if held == prompted + wanted - 1:  # the last token needs no key
                    answers[index] = self.tokens[sequence, prompted : held + 1].clone()
                    self.free += taken
                    del running[sequence]
        return [answers[index] for index in range(len(requests))]

    def milliseconds(self, keys: int) -> list[float]:
        """Of a step in which all sequences have so many keys and one new row, and of the same without attention."""
        self.table.copy_(torch.randperm(self.table.numel(), device=DEVICE).view_as(self.table))
        self.new.fill_(1)
        self.prompts.fill_(0)
        self.attend, found = (lambda layer, q, k, v: q), []
        for graph in (self.graphs[self.sequences], self.captured(self.sequences)):
            self.lengths.fill_(keys)
            found.append(1e3 * Timer("graph.replay()", globals={"graph": graph}).timeit(20).mean)
        return found


def upload(into: torch.Tensor, numbers: list[int]) -> None:
    """Without waiting for the device."""
    into.copy_(torch.tensor(numbers, dtype=into.dtype, pin_memory=ON_GPU), non_blocking=True)


def shortfall(model: Llama, prompt: torch.Tensor, answer: torch.Tensor) -> float:
    """By how much, at most, the logit of a token of the answer is less than the largest one, by torch's attention."""

    def attend(_, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    tokens = torch.cat((prompt, answer[:-1]))
    logits = model.head(model(tokens, torch.arange(len(tokens), device=DEVICE), attend)[-len(answer) :]).float()
    return float((logits.amax(1) - logits.gather(1, answer[:, None])[:, 0]).max())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp8", action="store_true", help="keep keys and values in e4m3")
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--keys", type=int, default=KEYS, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=NEW, help="tokens wanted of each")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Llama().to(DEVICE, torch.bfloat16)
    prompts = torch.linspace(args.keys, 1, 2 * args.sequences - (not ON_GPU)).int().tolist()
    requests = [(torch.randint(VOCABULARY, (prompt,), device=DEVICE), args.new) for prompt in prompts]
    server = Server(model, args.sequences, args.keys + max(32, args.new), args.fp8)
    for _ in range(1 + ON_GPU):  # the first time kernels are compiled, and graphs captured
        begin = time.perf_counter()
        answers = server.serve(requests)
        count = sum(len(answer.tolist()) for answer in answers)  # waits for all of them
        speed = count / (time.perf_counter() - begin)
    checked = range(0, len(answers), -(-len(answers) // 4))
    worst = max(shortfall(model, requests[index][0], answers[index]) for index in checked)
    assert worst < (1.0 if args.fp8 else 0.3), f"a token's logit is {worst:.3f} below the best one by torch's attention"
    print(f"{len(answers)} requests: logits of the tokens of {len(checked)} are at most {worst:.3f} below torch's best")
    print(f"{speed:,.0f} tokens a second{'' if ON_GPU else '; on the emulator times mean nothing'}")
    if ON_GPU:
        ms, rest = server.milliseconds(args.keys)
        print(f"a step of {args.sequences} tokens over {args.keys} keys: {ms:.3f} ms, attention {ms - rest:.3f} of it")


if __name__ == "__main__":
    main()
