"""flex_attention and create_block_mask under torch's names: functions of Python become expressions."""

import itertools

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from flashladder.common.api.frontends import flex
from flashladder.common.api.frontends.flex import create_block_mask, flex_attention
from flashladder.common.api.frontends.flex_trace import ROW, trace
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.expression import Declared, normal, parse
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
    "types": lambda b, h, q, k: (k.float() / 2 > q.to(torch.float64)) | SEEN[b, k].int().bool(),
}
SCORES = {
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "a table": lambda s, b, h, q, k: s + BIAS[h, q - k + KEYS - 1] + BIAS[h][2],
    "a softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "masked": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "a scalar": lambda s, b, h, q, k: (s * WEIGHT).clamp(-1, 1) + torch.sigmoid(s) - 2 ** (-h / 2),
    "functions": lambda s, b, h, q, k: torch.minimum(s.exp(), s.abs() ** 0.5) + (q - k) ** 2 / 8 - s.floor(),
}


def by_torch(function, *score):
    """What it gives at all places, of one after the other."""
    shape = (2, HEADS, ROWS, KEYS)
    found = [
        function(*(each[place] for each in score), *(torch.tensor(x, dtype=torch.int32) for x in place))
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
    text = normal(parse.mask(made.text.replace(ROW, "q"), {"m0": Declared("m0", "int64", 1)}))
    assert text == "true&&q>=k&&m0[q]==m0[k]"


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
    ],
)
def test_what_cannot_be_traced_is_refused_by_the_operation(function, said):
    with pytest.raises(UnsupportedProblemError) as refused:
        create_block_mask(function, None, None, ROWS, KEYS, device="cpu")
    assert said in str(refused.value)


def test_a_function_is_traced_once_for_what_it_reads(monkeypatch):
    scale, made = torch.tensor(0.5), []
    monkeypatch.setattr(flex, "_traced", {})
    monkeypatch.setattr(flex, "trace", lambda *given: made.append(given) or trace(*given))
    number = 2

    def score(s, b, h, q, k):
        return s * scale + number

    def traced():
        return flex._score_of(score, torch.device("cpu"))

    assert traced() is traced()
    assert len(made) == 1
    before, scale = scale, torch.tensor(0.25)
    assert traced().tensors["t0"] is scale is not before
    number = 3
    assert "3" in traced().text
    assert len(made) == 3


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
