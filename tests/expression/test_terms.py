"""Which parts of a mask are evaluated once for a key, or for a row."""

import pytest

from flashladder.common.expression import Declared, Mods, normal, parse
from flashladder.common.expression.terms import terms

NAMED = {
    "doc": Declared("doc", "int32", 1),
    "image": Declared("image", "int64", 2),
    "far": Declared("far", "int64", 0),
}
ROOT_OF_K, ROOT_OF_Q = (f"int(8*sqrt(({of}+0.5)/seqlen_k))" for of in "kq")


@pytest.mark.parametrize(
    ("mask", "of_key", "of_row"),
    [
        ("k<=q", [], []),
        ("k<=q&&q-k<=1024", [], []),
        ("k<=q||4*k<seqlen_k", [], []),
        ("q-k<=far&&min(k,q)>-k", [], []),  # `far` is the same for all
        (f"k<=q&&{ROOT_OF_K}=={ROOT_OF_Q}", [ROOT_OF_K], [ROOT_OF_Q]),
        ("doc[q]==doc[k]", ["doc[k]"], ["doc[q]"]),
        ("doc[q]==doc[k]&&k<=q", ["doc[k]"], ["doc[q]"]),
        ("image[b][q]<=2*image[h][k]+seqlen_k", ["2*image[h][k]+seqlen_k"], ["image[b][q]"]),
        ("k/64==q/64", ["k/64"], ["q/64"]),
        ("k%7==0||q>9", ["k%7==0"], []),
        ("0.5*k<q", ["0.5*k"], []),
        ("doc[q-k]==doc[doc[k]+q]", ["doc[k]"], []),  # the largest
        # Each once, and wherever it stands
        ("doc[k]>0||k<=q&&doc[k]<q&&q/9>doc[k]", ["doc[k]>0"], ["q/9"]),
        ("doc[k]>q||k<=q&&doc[k]<q", ["doc[k]"], []),
        # Where a condition decides, nothing is read
        ("k<=q&&doc[q]==doc[k]", [], []),
        ("k<=q||doc[k]>0", [], []),
        ("k<=q?doc[q]>0:doc[k]>0", [], []),
        ("doc[k]>q?k<=q:k>q", ["doc[k]"], []),
        ("!(k<=q&&doc[k]>0)", [], []),
        ("k<=q&&doc[k/64]==q%3", ["k/64"], ["q%3"]),
        ("(k<9&&doc[k]>0)!=(q<9)", ["k<9&&doc[k]>0"], []),  # in it the condition still decides
    ],
)
def test_terms_are_the_largest_that_are_surely_read_and_costly(mask, of_key, of_row):
    tree = parse.mask(mask, NAMED)
    assert [normal(each) for each in terms(tree, "k")] == of_key
    assert [normal(each) for each in terms(tree, "q")] == of_row


def test_the_mask_takes_its_terms():
    header = Mods.parse("doc:bool[];mask=k<=q&&k/2<q||doc[k]").header()
    assert "    struct OfKey {" in header
    assert "        int x0;" in header
    assert any("return {expression::quotient(at.k, 2)};" in line for line in header)
    assert any("return (((at.k <= at.q) && (key.x0 < at.q)) || read<bool>" in line for line in header)
    assert "    static constexpr bool has_terms = true;" in header
    assert "    static constexpr bool has_terms = false;" in Mods.parse("mask=k<=q").header()
