"""Text of a mask or a score: what it becomes, and what is said of what it should not be."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common.errors import ExpressionError, UnsupportedProblemError
from flashladder.common.expression import Declared, Type, c, names, normal, parse
from flashladder.tests.support.random_expressions import TENSORS, random_tree

NAMED = {
    each.name: each
    for each in (
        Declared("image", "int32", 1),
        Declared("slope", "fp32", 1),
        Declared("bias", "bf16", 3),
        Declared("seen", "bool", 2),
        Declared("shift", "int64", 0),
    )
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k <= q || image[q] == image[k]", "k<=q||image[q]==image[k]"),
        ("((k) <= (q))", "k<=q"),
        ("(k <= q || k < 4) && q < 9", "(k<=q||k<4)&&q<9"),
        ("k <= q || (k < 4 && q < 9)", "k<=q||k<4&&q<9"),
        ("seen[b, q] & (k - (q - 1) < 0x10)", "seen[b][q]&k-(q-1)<16"),
        ("!(k < q) == !!true", "!(k<q)==!!true"),
        ("(q >> shift & 1) != 0", "(q>>shift&1)!=0"),
        ("k < q ? k > 3 : (q < 2 ? true : false)", "k<q?k>3:q<2?true:false"),
        ("(k < q ? true : false) ? k > 3 : false", "(k<q?true:false)?k>3:false"),
    ],
)
def test_masks_are_written_in_one_way(text: str, expected: str) -> None:
    assert normal(parse.mask(text, NAMED)) == expected
    assert parse.mask(expected, NAMED) == parse.mask(text, NAMED)


@pytest.mark.parametrize(
    ("text", "expected", "kind"),
    [
        ("s + slope[h] * (k - q)", "s+slope[h]*(k-q)", Type.FLOAT),
        ("k <= q ? s : -inf", "k<=q?s:-inf", Type.FLOAT),
        ("s + bias[h][q][k]", "s+bias[h][q][k]", Type.FLOAT),
        ("- -s - (s - s)", "--s-(s-s)", Type.FLOAT),
        ("max(s, 1e3) * .5", "max(s,1000.0)*0.5", Type.FLOAT),
        ("shift + q", "shift+q", Type.LONG),
        ("3000000000", "3000000000", Type.LONG),
        ("(k == q) + 1", "(k==q)+1", Type.INT),
    ],
)
def test_scores_are_numbers(text: str, expected: str, kind: Type) -> None:
    found = parse.score(text, NAMED)
    assert (normal(found), found.type) == (expected, kind)


WRONG = [
    ("k - q", "is a truth value, and this is a whole number", "^~~~~", 0),
    ("slope[h]", "is a truth value, and this is a number of fp32", "^~~~~~~~", 0),
    ("k <= q and q < 3", "in C it is &&", "^~~", 7),
    ("imag[q] == 1", "did you mean image?", "^~~~", 0),
    ("image[q][k] == 1", "image has 1 dimension, and this names 2", "^~~~~~~~~~~", 0),
    ("k < image", "image has 1 dimension, and this names none", "^~~~~", 4),
    ("bias[h, q] < 0", "bias has 3 dimensions, and this names 2", "^~~~~~~~~~", 0),
    ("image[slope[h]] == 1", "an index is a whole number", "^~~~~~~~", 6),
    ("k[0] < 1", "k is a number, and takes no index", "^", 0),
    ("s > 1", "which a mask does not know", "^", 0),
    ("k <= q = 3", "equality is ==", "^", 7),
    ("(k <= q", "here ) should follow, for the ( at 1", "^", 7),
    ("min(k, q < 3", "here ) should follow, for the ( at 4", "^", 12),
    ("k < q ? true", "here : should follow, for the ? at 7", "^", 12),
    ("k <", "here a value should stand", "^", 3),
    ("", "here a value should stand", "^", 0),
    ("k < * q", "here a value should stand, not *", "^", 4),
    ("0 <= k < q", "join two by &&", "^~~~~~", 0),
    ("k < q && shift", "no truth value; compare it", "^~~~~", 9),
    ("!k", "no truth value; compare it", "^", 1),
    ("k ? true : false", "no truth value; compare it", "^", 0),
    ("k < q ? 1 : false", "both should be numbers, or truth values", "^~~~~~~~~~~~~~~~~", 0),
    ("(k < q) == 1", "they are never compared", "^~~~~~~~~~~~", 0),
    ("~(k < q)", "write ! for its opposite", "^~~~~~~", 1),
    ("slope[h] % 2 == 0", "% takes whole numbers", "^~~~~~~~", 0),
    ("(k < q) & 1", "& takes whole numbers", "^~~~~~~", 0),
    ("min(k) < 3", "min takes 2 arguments, not 1", "^~~~~~", 0),
    ("exp < 3", "exp is a function: exp(...)", "^~~", 0),
    ("k < q; system(0)", "no expression has this", "^", 5),
    ('k < "q"', "no expression has this", "^", 4),
    ("k < 99999999999999999999", "at most 64 bits", "^~~~~~~~~~~~~~~~~~~~", 4),
    ("k < 1e39", "fp32 has no number as large", "^~~~", 4),
    ("k < 1e400", "fp32 has no number as large", "^~~~~", 4),
    ("k < q\n  && x", "no name x", "^", 5),
    ("\tk < x", "no name x", "^", 5),
]


@pytest.mark.parametrize(("text", "said", "marks", "column"), WRONG, ids=[each[0] or "nothing" for each in WRONG])
def test_the_place_of_an_error_is_shown(text: str, said: str, marks: str, column: int) -> None:
    with pytest.raises(ExpressionError) as refused:
        parse.mask(text, NAMED)
    message, line, caret = str(refused.value).splitlines()
    assert message.startswith("mask: ")
    assert said in message
    assert line[2:] in text.splitlines() or line[2:] == text
    assert caret.expandtabs(1) == " " * (2 + column) + marks
    assert isinstance(refused.value, UnsupportedProblemError)


@pytest.mark.parametrize("text", [".1", "0.3333333", "16777217.0", "3.4028235e38", "1e-45", "1e-7", "8388608.5", "0.0"])
def test_numbers_of_fp32_are_written_shortly_and_read_back(text: str) -> None:
    tree = parse.score(text)
    assert len(normal(tree)) <= max(len(text) + 1, 7)
    assert parse.score(normal(tree)) == tree


def test_no_index_depends_on_the_score() -> None:
    with pytest.raises(ExpressionError, match="an index that depends on the score s is in no bounds"):
        parse.score("s + slope[int(s)]", NAMED)


def test_a_truth_value_is_no_score() -> None:
    with pytest.raises(ExpressionError, match="a score is a number, and this is a truth value"):
        parse.score("k < q", NAMED)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(" * 41 + "k < q" + ")" * 41, "more than 40 deep"),
        ("k" + " + 1" * 200 + " < q", "operations wait for each other"),
        ("!" * 300 + "true", "operations wait for each other"),
    ],
)
def test_texts_that_no_stack_has_room_for_are_refused(text: str, said: str) -> None:
    with pytest.raises(ExpressionError, match=said):
        parse.mask(text, NAMED)


def test_compilers_read_no_name_of_a_user() -> None:
    """A name may be a macro or a keyword there."""
    tensors = {name: Declared(name, "int32", 1) for name in ("int32_t", "NULL", "double", "__LINE__")}
    printed = c(parse.mask("int32_t[q] == NULL[k] && double[q] < __LINE__[k]", tensors))
    assert set(tensors).isdisjoint(part for part in printed.replace("params.of_", "of_").replace("(", " ").split())


def test_names_that_are_read() -> None:
    assert names(parse.score("k < seqlen_k - 4 ? s : image[h]", NAMED)) == {"k", "seqlen_k", "s", "h"}


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(list(Type)))
def test_random_trees_are_read_as_they_were_written(chance: random.Random, kind: Type) -> None:
    tensors = {each.name: each for each in TENSORS}
    tree = random_tree(chance, kind, depth=5)
    text = normal(tree)
    found = (parse.mask if kind == Type.BOOL else parse.score)(text, tensors)
    assert found == tree
    assert normal(found) == text
