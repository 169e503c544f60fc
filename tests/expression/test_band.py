"""Masks that are a window alone, beside what their text says of each place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashladder.common.expression import Mods
from flashladder.common.expression.band import Band, band
from flashladder.common.expression.evaluate import Evaluator

SUMS = st.builds("{0}{1}{2}".format, st.sampled_from("qk"), st.sampled_from("+-"), st.integers(0, 9))
SIDES = st.sampled_from(["q", "k", "0", "4", "-4", "q-k", "k-q", "-(q-k)", "3+q-k"]) | SUMS
COMPARISONS = st.builds("{0}{1}{2}".format, SIDES, st.sampled_from(["<", "<=", ">", ">=", "=="]), SIDES)
PARTS = st.just("true") | COMPARISONS


def shown(text: str) -> torch.Tensor:
    """What a mask shows of 14 rows, the first of which is at 3, and 20 keys."""
    q, k = torch.arange(3, 17)[:, None], torch.arange(20)
    places = {"q": q, "k": k, "seqlen_q": torch.tensor(14), "seqlen_k": torch.tensor(20)}
    seen = Evaluator(places, {}, torch.float32, "mask", text).value(Mods.of(text).mask, torch.ones(14, 20).bool())
    return seen.expand(14, 20)


@given(st.lists(PARTS, min_size=1, max_size=3).map(" && ".join))
def test_a_band_shows_what_its_text_does(text: str) -> None:
    if (found := band(Mods.of(text).mask)) is None:
        return
    q, k = torch.arange(3, 17)[:, None], torch.arange(20)
    left, right = (40 if side is None else side for side in found)
    assert torch.equal((q - k <= left) & (k - q <= right), shown(text)), found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k <= q", Band(None, 0)),
        ("q >= k && q - k < 1024", Band(1023, 0)),
        ("k - q <= 2 && q <= k + 3", Band(3, 2)),
        ("k < q + 1", Band(None, 0)),
        ("q - k >= -3 && -k >= -q - 5", Band(None, 3)),
        ("q - k >= -h", None),
        ("true && q >= k", Band(None, 0)),  # as torch's and_masks has it
        ("true", Band()),
        ("false", None),
        ("k < q", None),  # no row sees its own key
        ("k <= q || q - k < 3", None),
        ("k <= q && k > 2", None),
        ("k <= q && k >= 0", None),  # so tests ask for the expression where a window says the same
        ("2 * k <= 2 * q", None),
        ("k <= q && h < 4", None),
        ("q <= 5", None),
    ],
)
def test_what_is_a_band(text: str, expected: Band | None) -> None:
    assert band(Mods.of(text).mask) == expected
