"""check_mask: rows that see no key, by expressions' names; what is wrong with an expression, and with a kernel."""

import pytest
import torch

from flashladder import check_mask
from flashladder.common.api import mask_check
from flashladder.common.errors import ConfigError, ExpressionError, UnsupportedProblemError, VerificationError


@pytest.mark.parametrize(
    ("rows", "first", "words"),
    [
        ([[[0, 0, 0]]], 0, []),
        ([[[1, 1, 0], [1, 1, 0]]], 5, ["q=5 to 6 at every h"]),
        ([[[1, 0, 1], [0, 0, 0], [1, 0, 1]]], 0, ["q=0, 2 at h=0, 2"]),
        ([[[0, 0], [0, 1]], [[0, 0], [1, 1]]], -2, ["q=-1 at b=0, h=1", "q=-2 to -1 at b=1, h=1"]),
        ([[[1, 0] * 10]], 0, ["q=0, 2, 4, 6, 8, 10, 12, 14, 2 spans more at every h"]),
    ],
)
def test_rows_in_the_names_of_expressions(rows, first, words):
    assert mask_check._in_words(torch.tensor(rows).bool(), first) == words


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({}, ExpressionError, "give a mask, a score, or both"),
        ({"tensors": {"t": torch.ones(3)}}, ExpressionError, "give a mask, a score, or both"),
        ({"mask": "k <= p"}, ExpressionError, "no name p"),
        ({"mask": "t[q] > 0", "tensors": {"t": torch.ones(63)}}, ExpressionError, "q=63, k=0 its index is 63"),
        ({"mask": "k <= q", "seqlen_q": 0}, UnsupportedProblemError, "have nothing to check"),
        ({"mask": "k <= q", "version": "24"}, UnsupportedProblemError, "24_woven_general takes no mask and no score"),
        ({"mask": "k <= q", "version": "no_such"}, ConfigError, "no version no_such"),
        ({"score": "s + log(float(q - k))"}, VerificationError, "by the exact answer too: q=0 to 62 at every h"),
    ],
)
def test_what_is_wrong_with_an_expression(asked, error, said, monkeypatch):
    monkeypatch.setattr(mask_check, "translate", lambda *_: None)
    with pytest.raises(error) as refused:
        check_mask(**asked)
    assert said in str(refused.value)


@pytest.mark.slow
def test_rows_that_see_no_key_are_counted():
    """By the kernel's log-sum-exp too: that of such a row is -inf, and anything else would be wrong."""
    since = torch.tensor([0, 3])
    found = check_mask("since[h] <= k && k < q", "s / 2", {"since": since}, seqlen_q=40, seqlen_k=70)
    assert (found.num_unseeing, found.num_rows, found.unseeing) == (0, 80, ())
    assert str(found) == "each of 80 sees a key"
    found = check_mask("since[h] <= k && k < q", "s / 2", {"since": since}, seqlen_q=40, batch=2)
    assert (found.num_unseeing, found.num_rows) == (2 * (1 + 4), 160)
    assert found.unseeing == ("q=0 at b=0, h=0", "q=0 to 3 at b=0, h=1", "q=0 at b=1, h=0", "q=0 to 3 at b=1, h=1")
    assert str(found).startswith("10 of 160 see no key: q=0 at b=0, h=0; q=0 to 3 at b=0, h=1")


@pytest.mark.slow
def test_a_kernel_of_another_mask_is_wrong(monkeypatch):
    right = mask_check.translate
    monkeypatch.setattr(
        mask_check, "translate", lambda rung, _, arch: right(rung, rung.config(head_dim=64, mods="mask=k<q"), arch)
    )
    with pytest.raises(VerificationError, match="attention with mask as 51_any_mask computes it is wrong"):
        check_mask("k <= q")
