"""flex_attention and create_block_mask under torch's names: functions of Python become expressions."""

import gc
import itertools
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from flashladder.common.api import differentiable
from flashladder.common.api.frontends import flex
from flashladder.common.api.frontends.flex import create_block_mask, flex_attention
from flashladder.common.api.frontends.flex_trace import trace
from flashladder.common.api.frontends.flex_tree import ROW
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.expression import Declared, Mods, normal, parse
from flashladder.common.expression.evaluate import TORCH_DTYPES, Evaluator

HEADS, ROWS, KEYS = 3, 6, 9
DOCUMENTS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 1])
SEEN = torch.rand(2, KEYS, generator=torch.Generator().manual_seed(0)) < 0.5
SLOPES, WEIGHT = torch.tensor([0.5, 0.25, 0.125]), torch.tensor(0.75)
BIAS = torch.rand(HEADS, ROWS + KEYS, generator=torch.Generator().manual_seed(1))


def causal(b, h, q, k):
    return q >= k


def documents(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


MASKS = {
    "causal": causal,
    "documents": documents,
    "both": torchs.and_masks(causal, documents),
    "either": torchs.or_masks(causal, documents),
    "no mask": torchs.noop_mask,
    "a window": lambda b, h, q, k: (q - k).abs() < 3,
    "rounding": lambda b, h, q, k: ((q - k) // 2 == (k - q) % 3) | (q // 4 != k % 2),
    "neither": lambda b, h, q, k: ~(q >= k) ^ (k > 3),
    "flags": lambda b, h, q, k: SEEN[b, q] & torch.logical_or(SEEN[0][k], h == 0),
    "a choice": lambda b, h, q, k: torch.where(h == 1, k < 4, SEEN[b, k]),
    "bits": lambda b, h, q, k: ((DOCUMENTS[k] & 1) == 0) | ((q ^ k) > 4),
    "signs": lambda b, h, q, k: ((q - k) // (h - 4) == (k - 3) % (2 - 3 * h - 4)) | ((q - k) % 2147483647 > 4),
    "powers": lambda b, h, q, k: (
        ((q - k) % 2**h == 0) & (torch.div(q, 2 ** (h + 1), rounding_mode="trunc") != 2 ** (k - 3))
    ),
    "floors": lambda b, h, q, k: torch.floor(q) // 2 == torch.ceil(k) % 2.0 + h // 0.75,
    "lower": lambda b, h, q, k: torch.minimum(q >= k, k > 2) | torch.maximum(h == 2, k == 0),
    "64 bits read": lambda b, h, q, k: ((DOCUMENTS[k] + q * 40503) * 1103515245 + 12345) % 2147483648 < 2**30,
    "64 bits not needed": lambda b, h, q, k: q.long() - k.long() + (q > k).long() < torch.where(h > 1, 1, 2) * 2,
    "32 bits": lambda b, h, q, k: DOCUMENTS[k].int() * 2000000011 + q > 5,
    "types": lambda b, h, q, k: (k.float() / 2 > q.to(torch.float64)) | SEEN[b, k].int().bool(),
}
SCORES = {
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "a table": lambda s, b, h, q, k: s + BIAS[h, q - k + KEYS - 1] + BIAS[h][2],
    "a softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "masked": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "a scalar": lambda s, b, h, q, k: (s * WEIGHT).clamp(-1, 1) + torch.sigmoid(s) - 2 ** (-h / 2),
    "a square": lambda s, b, h, q, k: s**2.0 - (q * 30011) ** 2.0 * 1e-9 + 2.0**h,
    "floats": lambda s, b, h, q, k: (
        torch.full_like(s, -7) // 2 * (k % 3) + torch.ones_like(s) // 2 - torch.full_like(q, -3) // 2
    ),
    "a number": lambda s, b, h, q, k: (
        s * torch.tensor(0.5) + q.new_tensor(3) + torch.full((), -7, dtype=torch.float32) // 2
    ),
    "in place": lambda s, b, h, q, k: s.add_(k).mul_(SLOPES[h]),
    "many": lambda s, b, h, q, k: sum([k, q] * 20, s * h) - (q - (k - s)),
    "functions": lambda s, b, h, q, k: torch.minimum(s.exp(), s.abs() ** 0.5) + (q - k) ** 2 / 8 - s.floor(),
}


def in_view(s, b, h, q, k):
    view = s.view(())
    view += 1
    return s


def grown(s, b, h, q, k):
    for _ in range(30):
        s = s * s
    return s


BYTES = torch.arange(KEYS, dtype=torch.uint8)
READS = {  # ways in which a value would become a part of the text
    "item": torch.Tensor.item, "int": int, "float": float, "bool": bool, "equal": lambda x: torch.equal(x, x),
    "is_nonzero": torch.is_nonzero, "allclose": lambda x: torch.allclose(x, x), "full": lambda x: torch.full((), x),
    "slice": lambda x: BIAS[:, x.long() :][0, 0], "tolist": torch.Tensor.tolist, "numpy": lambda x: int(x.numpy()),
}  # fmt: skip


def by_torch(function, *score):
    """What it gives at all places, of one after the other."""
    shape = (2, HEADS, ROWS, KEYS)
    found = [
        function(*(each[place].clone() for each in score), *(torch.tensor(x, dtype=torch.int32) for x in place))
        for place in itertools.product(*map(range, shape))
    ]
    return torch.stack(found).reshape(shape)


def by_expression(function, *score):
    made = trace("a mod", function, torch.device("cpu"), bool(score), "t")
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    named = {name: Declared(name, names[x.dtype], x.dim()) for name, x in made.tensors.items()}
    tree = (parse.score if score else parse.mask)(made.text, named)
    values = dict(zip("bhqk", (torch.arange(size) for size in (2, HEADS, ROWS, KEYS)), strict=True))
    values["q"] = values["q"] + KEYS - ROWS
    values = {name: x.reshape(-1, *[1] * (3 - "bhqk".index(name))) for name, x in values.items()}
    values |= {"seqlen_q": torch.tensor(ROWS), "seqlen_k": torch.tensor(KEYS)}
    values |= dict(zip("s", score, strict=False))
    return Evaluator(values, made.tensors).value(tree).expand(2, HEADS, ROWS, KEYS)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_torch_makes_of_the_function(name):
    assert torch.equal(by_expression(MASKS[name]), by_torch(MASKS[name]))


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_what_torch_makes_of_the_function(name):
    s = torch.randn(2, HEADS, ROWS, KEYS, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(by_expression(SCORES[name], s), by_torch(SCORES[name], s).float())


def test_the_text_reads_as_it_would_be_written():
    made = trace("mask_mod", MASKS["both"], torch.device("cpu"), False, "m")
    assert made.tensors["m0"] is DOCUMENTS
    text = normal(parse.mask(made.text.replace(normal(ROW), "q"), {"m0": Declared("m0", "int64", 1)}))
    assert text == "true&&q>=k&&m0[q]==m0[k]"


@pytest.mark.parametrize(
    ("function", "bounds"),
    [(causal, (True, None, None)), (torchs.and_masks(causal, lambda b, h, q, k: q - k < 4), (True, 3, None))],
    ids=["causal", "window"],
)
def test_a_window_of_as_many_rows_as_keys_is_asked_for_as_one(function, bounds, monkeypatch):
    """Of other lengths it is none, as torch counts rows from the first. There is one text for each of both."""
    asked, attend = [], differentiable.attend
    monkeypatch.setattr(differentiable, "attend", lambda *given: asked.append(given[3]) or attend(*given))
    q, k, v = torch.randn(3, 1, 1, KEYS, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    made = {
        lengths: create_block_mask(function, None, None, *lengths, device="cpu")
        for lengths in ((KEYS, KEYS), (40, 40), (ROWS, KEYS), (7, 40))
    }
    found = flex_attention(q, k, v, block_mask=made[KEYS, KEYS])
    assert (asked[0].causal, asked[0].window_left, asked[0].window_right) == bounds
    assert not hasattr(asked[0], "mods")
    place = torch.arange(KEYS)
    seen = function(torch.tensor(0), torch.tensor(0), place[:, None], place)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), seen)
    assert (found - exact).abs().max() < 0.02
    equal, _, other, _ = texts = [each.expression for each in made.values()]
    assert texts == [equal, equal, other, other]
    assert Mods.of(other).window_apart is None


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda b, h, q, k: q >= k and k > 3, "& | ~ in place of `and`, `or`, `not`"),
        (lambda b, h, q, k: k > 3 if q > k else k > 5, "torch.where in place of `if`"),
        (lambda b, h, q, k: torch.cumsum(q, 0) > k, "mask_mod uses cumsum of torch: no expression has it"),
        (lambda b, h, q, k: (k == DOCUMENTS).any(), "mask_mod uses eq of torch: it gives 9 values"),
        (lambda b, h, q, k: DOCUMENTS[q.item()] == k, "mask_mod cannot be traced"),
        (lambda b, h, q, k: SEEN[b], "reads 1 of the 2 indices of a tensor (2, 9)"),
        (lambda b, h, q, k: SEEN[b][1:][k], "mask_mod uses slice of torch: what has some of its indices"),
        (lambda b, h, q, k: True, "mask_mod gives True, no tensor"),
        (lambda b, h, q, k: q.float() ** 1.5 > k, "mask_mod uses pow of torch"),
        (lambda b, h, q, k: (q.long() * 40503 + k) % 1000 < 500, "mask_mod uses mul of torch: it may leave 32 bits"),
        (lambda b, h, q, k: 2 ** q.long() > k, "mask_mod uses pow of torch: it may leave 32 bits"),
        (lambda b, h, q, k: q + 2**40 > k, "mask_mod uses add of torch: it gives int32 of a number with more than 32"),
        (lambda b, h, q, k: (q * 5).to(torch.int8) >= k, "mask_mod uses _to_copy of torch: it gives torch.int8"),
        (lambda b, h, q, k: q.short() >= k, "it gives torch.int16"),
        (lambda b, h, q, k: BYTES[k] + BYTES[q] > 3, "mask_mod uses add of torch: it gives torch.uint8"),
        (lambda b, h, q, k: q.half() > k, "mask_mod uses _to_copy of torch: it rounds to torch.float16"),
        (lambda b, h, q, k: q.bfloat16() > k, "it rounds to torch.bfloat16"),
        (
            lambda b, h, q, k: q.view(torch.float32) > k,
            "mask_mod uses view of torch: no expression reads bits as another",
        ),
        (lambda b, h, q, k: torch.fmod(q / 2, 2) > k, "mask_mod uses fmod of torch: "),
        (lambda b, h, q, k: WEIGHT.add_(1) > k, "mask_mod uses add_ of torch: it changes a tensor"),
        (lambda b, h, q, k: torch.where(q > k, WEIGHT, float("nan")) > 1, "NaN is no number of an expression"),
        (
            lambda b, h, q, k: in_view(q, b, h, q, k) > 1,
            "mask_mod uses add_ of torch: it changes a tensor that has a view",
        ),
        (lambda b, h, q, k: grown(q / 2, b, h, q, k) > 1, "more than 4,000 letters: use a tensor"),
        (lambda b, h, q, k: sum([k] * 120) > q, "more than 100 operations wait for each other"),
        (lambda b, h, q, k: q * 1j == k, "1j is no number of an expression"),
        ("text", "mask_mod is 'text'; it should be a function"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_the_operation(function, said):
    with pytest.raises(UnsupportedProblemError) as refused:
        create_block_mask(function, None, None, ROWS, KEYS, device="cpu")
    assert said in str(refused.value)


@pytest.mark.parametrize("name", READS)
def test_no_tensor_gives_its_value_to_the_text(name):
    with pytest.raises(UnsupportedProblemError, match="mask_mod cannot be traced: it asks a tensor for its value"):
        create_block_mask(lambda b, h, q, k: q - k < READS[name](WEIGHT), None, None, ROWS, KEYS, device="cpu")


def test_what_a_function_reads_is_read_again(monkeypatch):
    """Whatever holds it: no copy of an earlier trace is taken."""
    settings, seen = types.SimpleNamespace(table=torch.nn.Parameter(BIAS, requires_grad=False)), []
    monkeypatch.setattr(flex, "attention", lambda q, k, v, **asked: seen.append(asked) or q)
    q = torch.randn(1, 1, ROWS, 64).bfloat16()

    def score(s, b, h, q, k):
        return (lambda x: x * settings.width + score.added + settings.table[:, 4:][h, k])(s)

    for settings.width, score.added, table in ((16777217, 1, BIAS), (16777217.0, 2, BIAS + 1)):
        settings.table.data = table
        flex_attention(q, q, q, score_mod=score)
        assert torch.equal(seen[-1]["tensors"]["t0"], table[:, 4:])
    assert [asked["score"] for asked in seen] == ["s*16777217+1+t0[h][k]", "s*16777216.0+2+t0[h][k]"]


def test_no_tensor_outlives_a_call():
    def known_by(table):
        trace("score_mod", lambda s, b, h, q, k: s + table[h, k], torch.device("cpu"), True, "t")
        return weakref.ref(table)

    known = known_by(torch.zeros(HEADS, KEYS))
    gc.collect()
    assert known() is None


def test_threads_trace_one_after_the_other():
    def text(number):
        return trace("score_mod", lambda s, b, h, q, k: s * number + k, torch.device("cpu"), True, "t").text

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(text, range(2, 34))) == [f"s*{number}+k" for number in range(2, 34)]


def test_numbers_made_inside_are_literals_and_tensors_lie_on_one_device():
    def text(function):
        return trace("score_mod", function, torch.device("meta"), True, "t").text

    assert text(lambda s, b, h, q, k: s * torch.tensor(0.5) + torch.tensor([3])[0]) == "s*0.5+3"
    with pytest.raises(UnsupportedProblemError, match=r"score_mod reads a tensor \(\) on cpu: it should lie on meta"):
        text(lambda s, b, h, q, k: s * WEIGHT)


def blocks_of(listed, full=None, **given):
    """torch's block mask of blocks of 16 rows and 32 keys, (heads, 2, 3) each, of truth values."""
    lists = [(x.sum(-1).int()[None], x.int().argsort(dim=-1, descending=True, stable=True).int()[None])
             for x in (listed, full) if x is not None]  # fmt: skip
    return torchs.BlockMask.from_kv_blocks(*(x for each in lists for x in each), BLOCK_SIZE=(16, 32),
                                           seq_lengths=(30, 90), **given)  # fmt: skip


@pytest.mark.slow
def test_lists_of_blocks_hide_what_they_do_not_list():
    """With a function and without one: full blocks are seen whole, and of others what the function shows."""
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, rows, 64, generator=made).bfloat16() for rows in (30, 90, 90))
    listed, full = torch.tensor([[[1, 0, 1], [0, 1, 0]], [[0, 0, 1], [1, 1, 0]]]).bool(), torch.zeros(2, 2, 3).bool()
    full[0, 0, 1] = full[1, 1, 2] = True
    by_function = torch.arange(90) % 3 != torch.arange(30)[:, None] % 3

    def within(b, h, q_idx, kv_idx):
        return kv_idx % 3 != q_idx % 3

    def elements(blocks):
        return blocks.repeat_interleave(16, 1)[:, :30].repeat_interleave(32, 2)[..., :90]

    for block_mask, seen in (
        (blocks_of(listed), elements(listed)),
        (blocks_of(listed[:1]), elements(listed[:1])),
        (blocks_of(listed, full, mask_mod=within), elements(listed) & by_function | elements(full)),
    ):
        found = flex_attention(q, k, v, block_mask=block_mask)
        exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), seen)
        assert (found - exact).abs().max() < 0.02


SHAPE, COUNT, INDICES = "of int32 or int64, (1, 1 or 2, 2 or more", "block_mask.kv_num_blocks", "block_mask.kv_indices"


def ints(*shape, of=1):
    return torch.full(shape, of, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BLOCK_SIZE", (0, 32), "block_mask.BLOCK_SIZE is (0, 32); it should be two whole numbers above 0"),
        ("BLOCK_SIZE", 16, "block_mask.BLOCK_SIZE is 16; it should be two whole numbers"),
        ("kv_num_blocks", [1], f"{COUNT} is of type list; it should be a torch.Tensor"),
        ("kv_num_blocks", ints(1, 2, 1), f"{COUNT} is (1, 2, 1) torch.int32 on cpu; it should be {SHAPE}), on cpu"),
        ("kv_num_blocks", torch.ones(1, 2, 2), f"(1, 2, 2) torch.float32 on cpu; it should be {SHAPE}), on cpu"),
        ("kv_num_blocks", ints(2), f"{COUNT} is (2,) torch.int32 on cpu; it should be {SHAPE}"),
        ("kv_num_blocks", ints(3, 2, 2), f"{COUNT} is (3, 2, 2) torch.int32 on cpu; it should be {SHAPE}"),
        ("kv_indices", ints(1, 3, 2, 3), f"{INDICES} is (1, 3, 2, 3) torch.int32 on cpu; it should be {SHAPE}"),
        ("kv_indices", ints(1, 2, 2, 3).to("meta"), f"on meta; it should be {SHAPE}, blocks), on cpu"),
        ("kv_indices", ints(1, 1, 2, 3), f"{INDICES} is (1, 1, 2, 3); with kv_num_blocks of (1, 2, 2) it should be"),
        ("full_kv_indices", torch.ones(1, 2, 2, 3), "block_mask.full_kv_indices is (1, 2, 2, 3) torch.float32"),
        ("kv_num_blocks", ints(1, 2, 2, of=4), f"{COUNT} has 4; it should have 0 to 3"),
        ("kv_num_blocks", ints(1, 2, 2, of=-1), f"{COUNT} has -1; it should have 0 to 3"),
        ("kv_indices", ints(1, 2, 2, 3, of=-2), f"{INDICES} has -2; it should have 0 or more"),
    ],
)
def test_lists_that_are_for_no_such_query_are_refused(name, value, said):
    q, k = torch.randn(1, 2, 30, 64).bfloat16(), torch.randn(1, 2, 90, 64).bfloat16()
    block_mask = blocks_of(torch.ones(2, 2, 3).bool(), torch.zeros(2, 2, 3).bool())
    setattr(block_mask, name, value)
    with pytest.raises(UnsupportedProblemError) as refused:
        flex_attention(q, k, k, block_mask=block_mask)
    assert said in str(refused.value)


def test_what_is_no_block_mask_is_refused():
    q = torch.randn(1, 1, 32, 64).bfloat16()
    sliced = torchs.create_block_mask(causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)[:1]
    with pytest.raises(UnsupportedProblemError, match=r"mask_mod cannot be traced: .*slic"):
        flex_attention(q, q, q, block_mask=sliced)
    with pytest.raises(UnsupportedProblemError, match="block_mask is of type str; create_block_mask makes one"):
        flex_attention(q, q, q, block_mask="x")


def test_block_masks_of_other_sizes_and_shared_heads_are_refused():
    q, k = torch.randn(1, 4, ROWS, 64).bfloat16(), torch.randn(1, 2, KEYS, 64).bfloat16()
    for wrong, said in (
        ({"Q_LEN": 7}, r"block_mask is of \(7, 9\) rows and keys, query and key have \(6, 9\)"),
        ({"H": 3}, "block_mask is of H=3, query has 4"),
    ):
        sizes = {"B": None, "H": None, "Q_LEN": ROWS, "KV_LEN": KEYS}
        mask = create_block_mask(causal, **sizes | wrong, device="cpu")
        with pytest.raises(UnsupportedProblemError, match=said):
            flex_attention(q, k, k, block_mask=mask, enable_gqa=True)
    with pytest.raises(UnsupportedProblemError, match="with enable_gqa=True heads of key are shared"):
        flex_attention(q, k, k)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "score"), [("causal", None), ("both", "alibi"), (None, "a softcap"), ("flags", "masked")]
)
def test_it_gives_what_torchs_function_gives(mask, score):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, HEADS, ROWS, 64, generator=generator).bfloat16()
    k, v = torch.randn(2, 2, 1, KEYS, 64, generator=generator).bfloat16()
    asked = {"score_mod": score and SCORES[score], "enable_gqa": True, "scale": 0.2}
    own = mask and create_block_mask(MASKS[mask], None, None, ROWS, KEYS, device="cpu")
    of_torch = mask and torchs.create_block_mask(MASKS[mask], None, None, ROWS, KEYS, device="cpu")
    o, lse = flex_attention(q, k, v, **asked, block_mask=own, return_lse=True)
    expected = torchs.flex_attention(q.float(), k.float(), v.float(), **asked, block_mask=of_torch, return_lse=True)
    assert torch.allclose(o.float(), expected[0], rtol=0, atol=0.02)
    assert torch.allclose(lse, expected[1], rtol=0, atol=1e-4)
    assert torch.equal(flex_attention(q, k, v, **asked, block_mask=of_torch), o)
    compiled = torch.compile(flex_attention, backend="eager")
    assert torch.equal(compiled(q, k, v, **asked, block_mask=own), o)
