"""A step of an engine: requests whose keys lie in pages, new rows of each, and O as torch computes it."""

import itertools

import torch

from flashladder.common.problem.fp8 import FP8

HEADS, HEADS_K, COLUMNS, PAGE, PAGES = 4, 2, 64, 16, 11
NEW, KEYS = (1, 19, 4, 1), (33, 19, 40, 1)  # rows of a step, and keys after it: a token, a prompt, a chunk, a token
SCALE, SCORES = 2**-5, 0.2  # a power of 2: dividing by it rounds nothing
ROOM = 48


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Step:
    """Keys of four requests in pages, in random order, and the rows of a step, whose keys are not in the pages yet."""

    def __init__(self, new=NEW):
        self.rows = new
        self.q, (self.k, self.v) = normal(sum(new), HEADS, COLUMNS), normal(2, sum(KEYS), HEADS_K, COLUMNS, seed=1)
        self.q, self.k, self.v = self.q.bfloat16(), self.k.bfloat16(), self.v.bfloat16()
        self.table = torch.full((len(KEYS), ROOM // PAGE), 10**9, dtype=torch.int32)  # behind its pages is anything
        # SGLang's first page is nobody's
        pages = iter(torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(2)) + 1)
        for request, keys in enumerate(KEYS):
            for page in range(-(-keys // PAGE)):
                self.table[request, page] = next(pages)
        self.ends = [0, *itertools.accumulate(KEYS)]
        self.slots = [
            self.table[request, place // PAGE].item() * PAGE + place % PAGE
            for request, keys in enumerate(KEYS)
            for place in range(keys)
        ]
        self.is_new = [place >= keys - rows for keys, rows in zip(KEYS, new, strict=True) for place in range(keys)]
        self.new = torch.tensor([place for place, is_new in enumerate(self.is_new) if is_new])
        self.old = torch.tensor([place for place, is_new in enumerate(self.is_new) if not is_new])
        self.starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
        self.lengths = torch.tensor(KEYS, dtype=torch.int32)

    def slots_of(self, places):
        return torch.tensor(self.slots)[places]

    def fill(self, *caches):
        """What came before lies in the caches, (pages, PAGE, heads, columns), and elsewhere what nobody may read."""
        for cache, keys in zip(caches, (self.k, self.v), strict=True):
            cache.fill_(torch.nan)
            slots = self.slots_of(self.old)
            cache[slots // PAGE, slots % PAGE] = (keys[self.old] / scale_of(cache.dtype)).to(cache.dtype)

    def output(self, dtype, window=None, softcap=0.0, sinks=None, slopes=0.0):
        """As torch computes it, (rows, heads, columns); a window counts keys to the left of a row's own."""
        outputs = []
        for request, (first, last) in enumerate(itertools.pairwise(self.ends)):
            unit = scale_of(dtype)
            k, v = ((x[first:last] / unit).to(dtype).float() * unit for x in (self.k, self.v))
            q = self.q[self.starts[request] : self.starts[request + 1]].float()
            k, v = (x.repeat_interleave(HEADS // HEADS_K, 1) for x in (k, v))
            scores = SCORES * torch.einsum("qhd,khd->hqk", q, k)
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            row = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
            scores = scores - torch.as_tensor(slopes).reshape(-1, 1, 1) * row.abs()
            hidden = (row < 0) | (row > (len(k) if window is None else window))
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), -1)
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v))
        return torch.cat(outputs)


def scale_of(dtype):
    return SCALE if dtype == FP8 else 1.0


def require_close(found, wanted):
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0.03)
