"""flashladder.masks: which keys each row sees, by the exact answer and by the kernel, beside torch's operators.

With Q = 0 and V = 1 on its diagonal, O is P, whose elements are 0 where a row does not see a key.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashladder import attention, masks, packed_attention
from flashladder.common.api import expressions
from flashladder.common.api.options import options_of
from flashladder.common.api.validate import OPEN
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.operations import forward

COLUMNS = 64  # at least as many as keys


def by_textbook(q, k, v, *, mask, tensors=None, causal=False, window=OPEN):
    """What attention should give, by no kernel."""
    none = {"softmax_scale": None, "softcap": 0.0, "alibi_slopes": None, "sinks": None, "dropout_p": 0.0}
    asked = {"causal": causal, "window": window, "deterministic": False, "version": "51"}
    options = expressions.added(options_of(q.device, q.shape[0], 1, **asked, **none), mask, None, tensors, q, k)
    expressions.check(options, q, k)
    problem = options.forward_problem(q, k, v, lse=True)
    return forward.attention(problem, {"q": q, "k": k, "v": v, **options.tensors}, torch.float64)[0]


def seen(attend, asked, batch, rows, keys):
    """Which keys each row sees: (batch, rows, keys)."""
    q = torch.zeros(batch, rows, 1, COLUMNS).bfloat16()
    k = torch.zeros(batch, keys, 1, COLUMNS).bfloat16()
    v = torch.eye(keys, COLUMNS).bfloat16()[None, :, None].expand(batch, -1, -1, -1)
    return attend(q, k, v, **asked)[:, :, 0, :keys] > 0


def at(rows, keys):
    """Positions of rows, (rows, 1), and of keys."""
    return torch.arange(keys - rows, keys)[:, None], torch.arange(keys)


class Case:
    """Sizes and random tensors, of a batch or of all sequences alike."""

    def __init__(self, batch, rows, keys, seed, is_batched):
        self.batch, self.rows, self.keys, self.is_batched = batch, rows, keys, is_batched
        self.q, self.k = at(rows, keys)
        self.causal = self.k <= self.q
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, most, *shape, least=0):
        shape = (self.batch, *shape) if self.is_batched else shape
        return torch.randint(least, most + 1, shape, generator=self.generator)

    def rising(self):
        """Whole numbers of tokens, in runs."""
        return (self.draw(3, self.keys) == 0).cumsum(-1)

    def __call__(self, tensor):
        """With the batch in front."""
        return tensor if self.is_batched else tensor.expand(self.batch, *tensor.shape)


def documents(case):
    number = case.rising()
    own = case(number)[:, case.q[:, 0]]
    return masks.documents(number), case.causal & (own[..., None] == case(number)[:, None])


def documents_both_ways(case):
    number = case.rising().int()
    own = case(number)[:, case.q[:, 0]]
    return masks.documents(number, causal=False), own[..., None] == case(number)[:, None]


def prefix(case):
    length = case.draw(case.keys)
    return masks.prefix(length), case.causal | (case.k < case(length)[:, None, None])


def images(case):
    image = case.rising() % 3
    own = case(image)[:, case.q[:, 0], None]
    return masks.images(image), case.causal | ((own == case(image)[:, None]) & (own > 0))


def chunks(case):
    return masks.chunks(4), case.causal & (case.q // 4 == case.k // 4)


def chunks_of_sequences(case):
    number = case.rising()
    start = (number[..., None] > number[..., None, :]).sum(-1)  # tokens of those before
    own, of_key = case(start)[:, case.q[:, 0], None], case(start)[:, None]
    same = (own == of_key) & ((case.q - own) // 4 == (case.k - of_key) // 4)
    return masks.chunks(4, start), case.causal & same


def sinks_and_window(case):
    return masks.sinks_and_window(2, 3), case.causal & ((case.k < 2) | (case.q - case.k <= 3))


def prompt_and_window(case):
    prompt = case.draw(case.keys)
    return masks.prompt_and_window(prompt, 3), case.causal & (
        (case.k < case(prompt)[:, None, None]) | (case.q - case.k <= 3)
    )


def dilated(case):
    away = case.q - case.k
    return masks.dilated(3, 2, 1), (away % 3 == 0) & (away <= 6) & (away >= -3)


def neighbourhood(case):
    rows, columns = (case.q // 5 - case.k // 5).abs(), (case.q % 5 - case.k % 5).abs()
    return masks.neighbourhood(5, 1, 2), (rows <= 1) & (columns <= 2)


def draft_tree(case):
    drawn = case.draw(2**20, case.rows)
    parents = drawn % torch.arange(1, case.rows + 1) - 1
    sees = torch.ones(case.batch, case.rows, case.keys).bool()
    first = case.keys - case.rows
    sees[..., first:] = False
    for b, of_tokens in enumerate(case(parents).tolist()):
        for token in range(case.rows):
            above = token
            while above >= 0:
                sees[b, token, first + above] = True
                above = of_tokens[above]
    return masks.draft_tree(parents), sees


def of_blocks(case):
    """Of three rows and two keys."""
    drawn = case.draw(1, 1, -(-case.rows // 3), -(-case.keys // 2)).bool()
    of_row = case(drawn)[:, 0, torch.arange(case.rows) // 3]
    return masks.of_blocks(drawn, 3, 2, causal=True), case.causal & of_row[..., torch.arange(case.keys) // 2]


NAMED = [
    documents,
    documents_both_ways,
    prefix,
    images,
    chunks,
    chunks_of_sequences,
    sinks_and_window,
    prompt_and_window,
    dilated,
    neighbourhood,
    draft_tree,
    of_blocks,
]
EACH = pytest.mark.parametrize("named", NAMED, ids=lambda named: named.__name__)
CASES = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(0, 24), st.integers(0, 2**31), st.booleans())


def check(attend, named, sizes):
    batch, rows, more, *drawn = sizes
    case = Case(batch, rows, rows + more, *drawn)
    asked, expected = named(case)
    found = seen(attend, asked, batch, rows, rows + more)
    assert torch.equal(found, expected.expand(found.shape))


@EACH
@settings(max_examples=25, deadline=None)
@given(sizes=CASES)
def test_who_sees_whom(named, sizes):
    check(by_textbook, named, sizes)


@pytest.mark.slow
@EACH
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=CASES)
def test_who_sees_whom_by_the_kernel(named, sizes):
    check(attention, named, sizes)


@pytest.mark.slow
def test_chunks_of_packed_sequences_count_from_the_start_of_each():
    lengths = torch.tensor([5, 11, 3])
    starts = torch.tensor([0, 5, 16, 19], dtype=torch.int32)
    q, v = torch.zeros(19, 1, COLUMNS).bfloat16(), torch.eye(19, COLUMNS).bfloat16()[:, None]
    found = packed_attention(q, q, v, starts, starts, 11, 11, **masks.chunks(4))[:, 0, :19] > 0
    blocks = [(at(n, n)[0] // 4 == at(n, n)[1] // 4) & (at(n, n)[1] <= at(n, n)[0]) for n in lengths.tolist()]
    assert torch.equal(found, torch.block_diag(*blocks).bool())


@pytest.mark.slow
def test_blocks_of_groups_of_heads_and_their_gradients():
    """As exact attention has them: four heads, of which two share what they see."""
    made = torch.Generator().manual_seed(5)
    q, k, v, d_o = (torch.randn(1, n, heads, 64, generator=made) for n, heads in ((90, 4), (140, 2), (140, 2), (90, 4)))
    seen = torch.rand(2, 3, 3, generator=made) < 0.4
    seen[..., 1] |= ~seen.any(-1)
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, **masks.of_blocks(seen, 32, 64, group=2))
    o.backward(d_o.bfloat16())
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    visible = seen.repeat_interleave(2, 0).repeat_interleave(32, 1)[:, :90].repeat_interleave(64, 2)[..., :140]
    heads_first = [x.transpose(1, 2) for x in exact]
    by_torch = torch.nn.functional.scaled_dot_product_attention(*heads_first, visible, enable_gqa=True)
    by_torch = by_torch.transpose(1, 2)
    by_torch.backward(d_o.bfloat16().double())
    assert (o - by_torch).abs().max() < 0.02
    for found, wanted in zip((q, k, v), exact, strict=True):
        assert (found.grad - wanted.grad).abs().max() < 0.02 * wanted.grad.abs().max()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: masks.documents(torch.ones(3)), "document is (3,) torch.float32; it should be of whole numbers"),
        (lambda: masks.images(torch.tensor(3)), "with 1 dimensions"),
        (lambda: masks.prefix(3), "length=3 is of type int"),
        (lambda: masks.prefix(torch.ones(2, 3).int()), "length is (2, 3)"),
        (lambda: masks.chunks(0), "size=0: it should be 1 or more"),
        (lambda: masks.chunks(2.5), "size=2.5"),
        (lambda: masks.sinks_and_window(-1, 3), "sinks=-1: it should be 0 or more"),
        (lambda: masks.neighbourhood(0, 1, 1), "width=0: it should be 1 or more"),
        (lambda: masks.of_blocks(torch.ones(3, 4)), "seen is (3, 4) torch.float32; it should be bool, (row blocks"),
        (lambda: masks.of_blocks(torch.ones(3).bool()), "seen is (3,)"),
        (lambda: masks.of_blocks(torch.ones(3, 4).bool(), block_k=0), "block_k=0: it should be 1 or more"),
        (lambda: masks.of_blocks(torch.ones(0, 3, 4).bool()), "seen is (0, 3, 4); it should have 1 or more of each"),
        (lambda: masks.of_blocks(torch.ones(0, 2, 3, 4).bool()), "seen is (0, 2, 3, 4); it should have 1 or more"),
        (lambda: masks.draft_tree([-1, 0]), "parents is of type list"),
        (lambda: masks.draft_tree(torch.tensor([0, 1])), "each is a token before its own"),
        (lambda: masks.draft_tree(torch.ones(1, 2, 3).int()), "parents is (1, 2, 3)"),
    ],
)
def test_what_makes_no_mask(make, said):
    with pytest.raises(UnsupportedProblemError) as refused:
        make()
    assert said in str(refused.value)
