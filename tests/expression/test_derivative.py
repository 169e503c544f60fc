"""Derivatives of scores, as trees: by the text, and beside what torch differentiates."""

import random

import pytest
import torch

from flashladder.common.expression import Declared, names, normal, parse, walk
from flashladder.common.expression.derivative import ZERO, derivative
from flashladder.common.expression.evaluate import Evaluator
from flashladder.common.expression.tree import Element, Type
from flashladder.tests.support.random_expressions import S, random_score, random_tensors

NAMED = {"w": Declared("w", "bf16", 1), "t": Declared("t", "fp64", 2), "i": Declared("i", "int64", 1)}


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("s + t[h][q - k]", "1.0"),
        ("s * w[h] - k", "w[h]"),
        ("-s / w[h]", "-1.0/w[h]"),
        ("w[h] / s", "-(w[h]/s)/s"),
        ("s - (k - s) * 2", "1.0+2"),
        ("k < q ? s : -inf", "k<q?1.0:0.0"),
        ("k < q ? s : s + 1", "1.0"),
        ("max(s, -3)", "s>=-3?1.0:0.0"),
        ("min(s, w[k])", "s<=w[k]||w[k]!=w[k]?1.0:0.0"),
        ("abs(s)", "s<0.0?-1.0:s>0.0?1.0:0.0"),
        ("floor(s) + ceil(s) + int(s) + (s > 0 ? 1 : 2)", "0.0"),
        ("k - q", "0.0"),
        ("float(s) + sqrt(w[k])", "1.0"),
        ("sqrt(s)", "1.0/(sqrt(s)+sqrt(s))"),
        ("exp(-s)", "-exp(-s)"),
        ("exp2(s)", "0.6931472*exp2(s)"),
        ("log(s)", "1.0/s"),
        ("log2(s)", "1.0/(0.6931472*s)"),
        ("tanh(s)", "1.0-tanh(s)*tanh(s)"),
        ("sin(s) * cos(k)", "cos(s)*cos(k)"),
        ("cos(s)", "-sin(s)"),
    ],
)
def test_by_the_score(score: str, expected: str) -> None:
    assert normal(derivative(parse.score(score, NAMED), S)) == expected


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("s + t[h][q - k]", {"t[h][q-k]": "1.0"}),
        ("s + w[h] * (k - q)", {"w[h]": "k-q"}),
        ("s + w[h] * w[k]", {"w[h]": "w[k]", "w[k]": "w[h]"}),
        ("w[h] * s + w[h]", {"w[h]": "s+1.0"}),
        ("q > 8 ? s + t[0][q - 8] * 2 : s", {"t[0][q-8]": "q>8?2:0.0"}),
        ("s + t[i[k]][0] + i[q]", {"t[i[k]][0]": "1.0"}),
        ("w[h] > 0 ? s : 0", {"w[h]": "0.0"}),
    ],
)
def test_by_the_elements_that_it_reads(score: str, expected: dict[str, str]) -> None:
    tree = parse.score(score, NAMED)
    read = [node for node in walk(tree) if isinstance(node, Element) and node.type == Type.FLOAT]
    assert {normal(each): normal(derivative(tree, each)) for each in read} == expected


@pytest.mark.slow
def test_random_scores_have_torchs_derivatives() -> None:
    """By s, and by each tensor: the slopes at all places of an element, summed."""
    chance, compared = random.Random(53), 0
    places = {name: torch.arange(4).reshape(-1, *[1] * (3 - at)) for at, name in enumerate("bhqk")}
    places |= {"seqlen_q": torch.tensor(4), "seqlen_k": torch.tensor(4)}
    for _ in range(300):
        tree = random_score(chance, depth=3)
        floats = {name: x.double().requires_grad_() for name, x in random_tensors(3).items() if x.is_floating_point()}
        tensors = {**random_tensors(3), **floats}
        s = (
            3 * torch.randn(4, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ).requires_grad_()
        evaluator = Evaluator({**places, "s": s}, tensors, torch.float64)
        score = evaluator.value(tree).double().expand(s.shape)
        if not (score.requires_grad and score.isfinite().all()):
            continue
        with torch.no_grad():
            by_s = evaluator.value(derivative(tree, S)).double().expand(s.shape)
            by_tensors = {name: torch.zeros_like(x) for name, x in floats.items()}
            for each in {node for node in walk(tree) if isinstance(node, Element) and node.type == Type.FLOAT}:
                slope = evaluator.value(derivative(tree, each)).double().expand(s.shape)
                index = [
                    evaluator.index(each, axis, slope != 0).expand(s.shape).clamp(0, 7)
                    for axis in range(len(each.indices))
                ]
                by_tensors[each.tensor.name].index_put_(index, slope, accumulate=True)
        expected = torch.autograd.grad(score.sum(), [s, *floats.values()], materialize_grads=True)
        for found, gradient in zip([by_s, *by_tensors.values()], expected, strict=True):
            same = found.isfinite() & gradient.isfinite()
            torch.testing.assert_close(found[same], gradient[same], rtol=1e-5, atol=1e-5)
            compared += int((same & (gradient != 0)).sum())
    assert compared > 20_000


def test_nothing_is_read_that_the_score_does_not_read() -> None:
    """What a condition keeps from a tensor stays behind it."""
    tree = parse.score("q > 4 ? exp(s * w[q - 5]) : k > 2 && w[k - 3] > 0 ? log(w[k - 3]) : s", NAMED)
    values = {name: torch.arange(8).reshape(-1, *[1] * (3 - at)) for at, name in enumerate("bhqk")}
    values |= {"s": torch.ones(8, 8, 8, 8), "seqlen_q": torch.tensor(8), "seqlen_k": torch.tensor(8)}
    evaluator = Evaluator(values, {"w": torch.ones(5)})
    for by in (S, *(node for node in walk(tree) if isinstance(node, Element))):
        assert (found := derivative(tree, by)) != ZERO
        assert evaluator.value(found).isfinite().all()
    assert names(derivative(tree, S)) == {"q", "k", "s"}


def test_what_is_not_chosen_has_no_gradient() -> None:
    """Not NaN either, as 0 times infinity is."""
    tree = parse.score("s > 0 ? sqrt(s) : w[k]", {"w": NAMED["w"]})
    s = torch.tensor([0.0, 4.0, -1.0], requires_grad=True)
    places = {name: torch.zeros(3, dtype=torch.int64) for name in "bhqk"}
    Evaluator({**places, "s": s}, {"w": torch.ones(1)}).value(tree).sum().backward()
    assert torch.equal(s.grad, torch.tensor([0.0, 0.25, 0.0]))
