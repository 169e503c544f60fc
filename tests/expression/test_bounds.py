"""Indices that leave their tensor by sizes alone, as a GPU's tensors are checked, whose elements nobody looks at."""

import pytest
import torch

from flashladder.common.errors import ExpressionError
from flashladder.common.expression import Declared, bounds, parse

NAMED = {"t": Declared("t", "fp32", 1), "u": Declared("u", "int32", 2)}
SIZE, FAR = 64, 1000


def check(text: str, extent: int, left: int = FAR, right: int = FAR, rows: int = SIZE) -> None:
    """For tensors of so many elements, along each dimension, and for 4 heads and 2 sequences."""
    q, k = bounds.edges(SIZE - rows, SIZE, left, right)
    places = {"b": torch.arange(2)[:, None, None], "h": torch.arange(4)[:, None], "q": q, "k": k}
    places |= {"seqlen_q": torch.tensor(rows), "seqlen_k": torch.tensor(SIZE)}
    bounds.check("score", text, parse.score(text, NAMED), places, {"t": (extent,), "u": (extent, extent)})


@pytest.mark.parametrize(
    ("text", "needed", "seen"),
    [
        ("t[q]", 64, {}),
        ("t[seqlen_q - 1]", 64, {}),
        ("t[q - k + 63]", 127, {}),
        ("t[q * seqlen_k + k]", 4096, {}),
        ("t[(b * 4 + h) * seqlen_q + q]", 512, {}),
        ("t[abs(q - k)]", 64, {}),
        ("t[abs(q * 2 - 3) - 1]", 123, {}),
        ("t[abs((q - k) % 8)]", 8, {}),
        ("t[k * 4 % 6]", 5, {}),
        ("t[max(q - k, 0) + q]", 127, {}),
        ("t[k << 1]", 127, {}),
        ("t[q ^ 1]", 64, {}),
        ("t[q & 40]", 41, {}),
        ("t[int(k * 2.0)]", 127, {}),
        ("t[(q < k) + q]", 64, {}),
        ("t[q < 8 ? 70 : k]", 71, {}),
        ("t[q - k]", 64, {"right": 0}),
        ("t[q - k]", 6, {"left": 5, "right": 0}),
        ("t[q - k + 3]", 9, {"left": 5, "right": 3}),
        ("t[q - 40]", 24, {"rows": 24}),
        ("t[q]", 64, {"rows": 70, "right": 0}),
        ("u[h][k]", 64, {}),
        ("u[u[h][b]][k]", 64, {}),
    ],
)
def test_a_tensor_has_what_is_read_of_it_and_not_one_less(text: str, needed: int, seen: dict[str, int]) -> None:
    check(text, needed, **seen)
    with pytest.raises(ExpressionError, match=f"has {needed - 1} elements along its"):
        check(text, needed - 1, **seen)


@pytest.mark.parametrize("text", ["t[q - k]", "t[(q - k) % 8]", "t[k - 1]"])
def test_indices_below_0(text: str) -> None:
    with pytest.raises(ExpressionError, match="its index is -"):
        check(text, 1000)


def test_what_a_condition_or_a_tensor_decides_is_not_known() -> None:
    check("q < 3 && t[q] > 0 ? t[q] : s + t[u[0][0]]", 3)


@pytest.mark.parametrize(("left", "right"), [(FAR, FAR), (FAR, 0), (5, 0), (3, 2), (0, 7)])
@pytest.mark.parametrize("first_row", [-9, 0, 11])
def test_edges_have_each_position_and_distance_that_is_seen(left: int, right: int, first_row: int) -> None:
    rows, keys = torch.arange(first_row, 20)[:, None], torch.arange(20)
    seen = (keys >= rows - left) & (keys <= rows + right)
    expected = [x.expand_as(seen)[seen] for x in (rows, keys)]
    found = bounds.edges(first_row, 20, left, right)
    assert set(zip(*(x.tolist() for x in found), strict=True)) <= set(zip(*(x.tolist() for x in expected), strict=True))
    for ours, theirs in zip((*found, found[0] - found[1]), (*expected, expected[0] - expected[1]), strict=True):
        assert set(ours.tolist()) == set(theirs.tolist())
