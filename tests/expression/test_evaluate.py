"""What trees come to: by torch, and by the C text that kernels are compiled from."""

import ctypes
import random
import subprocess
from pathlib import Path

import pytest
import torch

from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.errors import ExpressionError
from flashladder.common.expression import Declared, Node, Type, c, parse, ranges
from flashladder.common.expression.evaluate import Evaluator, evaluate
from flashladder.common.expression.typed import FUNCTIONS
from flashladder.common.paths import CUDA_HEADERS
from flashladder.tests.support.random_expressions import EXTENT, TENSORS, random_tensors, random_tree

SIZES = {"b": 2, "h": 3, "q": 5, "k": 6}
OF_C = {"bool": "bool", "uint8": "unsigned char", "int16": "short", "int32": "int", "int64": "long long"}
OF_C |= {"fp32": "float", "fp64": "double"}

Ends = tuple[int, int]
Place = tuple[int, int, Ends, Ends]  # b, h, the first and last q, and k


def places(**sizes: int) -> dict[str, torch.Tensor]:
    shape = [sizes[name] for name in "bhqk"]
    found = {}
    for dimension, name in enumerate("bhqk"):
        view = [1] * 4
        view[dimension] = shape[dimension]
        found[name] = torch.arange(shape[dimension]).view(view)
    return found | {"seqlen_q": torch.tensor(sizes["q"]), "seqlen_k": torch.tensor(sizes["k"])}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-7 / 2", -3),
        ("-7 % 2", -1),
        ("7 / (k - k)", 0),
        ("7 % 0", 0),
        ("(-2147483648) / -1", 2147483648),  # of 64 bits, as 2147483648 is in C
        ("int(-2147483648.0) / -1", -2147483648),
        ("2147483647 + 1", -2147483648),
        ("1 << 33", 2),
        ("-8 >> 1", -4),
        ("~5", -6),
        ("6 ^ 3 | 8 & 12", 13),
        ("int(-2.9)", -2),
        ("int(3e9)", 2147483647),
        ("int(0.0 / 0.0)", 0),
        ("int(4294967298)", 2),
        ("1.0 / 0.0", float("inf")),
        ("min(3, 2.5)", 2.5),
        ("max(0.0 / 0.0, 1)", 1.0),
        ("abs(-3)", 3),
        ("true + true", 2),
        ("3 == 3.0 ? 1 : 0", 1),
        ("floor(-2.5)", -3.0),
    ],
)
def test_operators_and_functions(text: str, expected: float) -> None:
    assert float(evaluate(parse.score(text), places(**SIZES), {}).reshape(-1)[0]) == expected


def test_a_mask_of_images_beside_the_causal_one() -> None:
    image = torch.tensor([0, 1, 1, 1, 0, 2, 2])
    mask = parse.mask("k <= q || image[q] == image[k] && image[k] != 0", {"image": Declared("image", "int64", 1)})
    found = evaluate(mask, places(b=1, h=1, q=7, k=7), {"image": image})[0, 0]
    row, key = torch.arange(7)[:, None], torch.arange(7)
    assert torch.equal(found, (key <= row) | ((image[:, None] == image) & (image != 0)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t[k] < 1", "t has 4 elements along its only dimension, and at b=0, h=0, q=0, k=4 its index is 4"),
        ("q < 3 && t[q - 1] < 1", "at b=0, h=0, q=0, k=0 its index is -1"),
        (
            "u[h][t[b] + k] == 0",
            "u has 3 elements along its second dimension, and at b=0, h=0, q=0, k=3 its index is 3",
        ),
        ("u[b][h] == 0 ? t[q] == 0 : true", "at b=0, h=0, q=4, k=0 its index is 4"),
    ],
)
def test_reads_beyond_a_tensor_are_told_in_the_words_of_the_expression(text: str, said: str) -> None:
    named = {"t": Declared("t", "int32", 1), "u": Declared("u", "int32", 2)}
    tensors = {"t": torch.zeros(4, dtype=torch.int32), "u": torch.zeros(3, 3, dtype=torch.int32)}
    with pytest.raises(ExpressionError) as refused:
        evaluate(parse.mask(text, named), places(**SIZES), tensors, text=text)
    message, line, caret = str(refused.value).splitlines()
    assert said in message
    assert text in line
    assert text[caret.index("^") - 2 :].startswith(("k]", "q - 1]", "t[b] + k]", "q]"))


@pytest.mark.parametrize(
    "text",
    ["q >= 2 && t[q - 2] == 0", "q < 2 || t[q - 2] == 0", "k < 4 ? t[k] == 0 : k == 5", "!(k < 4) || t[k] == 0"],
)
def test_what_is_behind_a_condition_is_read_where_it_holds(text: str) -> None:
    evaluate(parse.mask(text, {"t": Declared("t", "int32", 1)}), places(**SIZES), {"t": torch.zeros(4)})


def compiled(folder: Path, trees: list[Node]) -> ctypes.CDLL:
    """The C text of trees, as functions of positions and of a struct of tensors, by the host's compiler."""
    members = "".join(f"  const {OF_C[each.dtype]} *{each.field};\n" for each in TENSORS)
    members += "".join(f"  int {each.extent(d)};\n" for each in TENSORS for d in range(1, each.rank))
    functions = "".join(
        f'extern "C" double tree{n}(const Params &params, const Place &at) {{ const float s = 0.25f * at.k - at.q; '
        f"(void)s; return static_cast<double>({c(each)}); }}\n"
        for n, each in enumerate(trees)
    )
    functions += "".join(
        f'extern "C" int within{n}(const Params &params, const Place &at, Range q, Range k) '
        f"{{ const Maybe x = {ranges.c(each)}; return x.may + 2 * x.must; }}\n"
        for n, each in enumerate(trees)
        if each.type == Type.BOOL
    )
    source = f'#define __device__\n#include "softmax/expression.cuh"\nstruct Params {{\n{members}}};\n{functions}'
    (folder / "trees.cpp").write_text(source)
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    command = [toolchain().host_compiler, *flags, "-I", CUDA_HEADERS, folder / "trees.cpp", "-o", folder / "trees.so"]
    subprocess.run([str(word) for word in command], check=True)
    return ctypes.CDLL(str(folder / "trees.so"))


def params_of(tensors: dict[str, torch.Tensor]) -> ctypes.Array[ctypes.c_char]:
    pointers = [tensors[each.name].data_ptr() for each in TENSORS]
    extents = [EXTENT for each in TENSORS for _ in range(1, each.rank)]
    return (ctypes.c_char * 256).from_buffer_copy(
        b"".join([*(p.to_bytes(8, "little") for p in pointers), *(e.to_bytes(4, "little") for e in extents)]).ljust(256)
    )


def computed(library: ctypes.CDLL, number: int, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What one of these functions gives at all positions."""
    params = params_of(tensors)
    function = getattr(library, f"tree{number}")
    function.restype = ctypes.c_double
    found = torch.empty([SIZES[name] for name in "bhqk"], dtype=torch.float64)
    for place in torch.cartesian_prod(*(torch.arange(SIZES[name]) for name in "bhqk")).tolist():
        found[tuple(place)] = function(params, (ctypes.c_int * 6)(*place, SIZES["q"], SIZES["k"]))
    return found


def by_torch(tree: Node, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    values = places(**SIZES)
    values["s"] = 0.25 * values["k"].float() - values["q"]
    return Evaluator(values, tensors).value(tree).double().expand([SIZES[name] for name in "bhqk"])


@pytest.mark.slow
def test_random_trees_come_to_the_same_in_c_and_in_torch(tmp_path: Path) -> None:
    """Every bit: only functions that round alike everywhere are among them. LONG is compared as far as fp64 goes."""
    chance, tensors = random.Random(53), random_tensors(seed=1)
    trees = [random_tree(chance, kind, depth=4) for kind in Type for _ in range(100)]
    library = compiled(tmp_path, trees)
    for number, tree in enumerate(trees):
        torch.testing.assert_close(
            computed(library, number, tensors), by_torch(tree, tensors), rtol=0, atol=0, equal_nan=True, msg=c(tree)
        )


class Range(ctypes.Structure):
    _fields_ = (("low", ctypes.c_longlong), ("high", ctypes.c_longlong))


def known(library: ctypes.CDLL, number: int, tensors: dict[str, torch.Tensor], at: Place) -> tuple[bool, bool]:
    """Whether a tree may be true somewhere in a rectangle, and whether it is everywhere."""
    b, h, (q, last_q), (k, last_k) = at
    first = (ctypes.c_int * 6)(b, h, q, k, SIZES["q"], SIZES["k"])
    found = getattr(library, f"within{number}")(params_of(tensors), first, Range(q, last_q), Range(k, last_k))
    return bool(found & 1), bool(found & 2)


def drawn(chance: random.Random) -> Place:
    b, h = chance.randrange(SIZES["b"]), chance.randrange(SIZES["h"])
    q, k = (sorted(chance.choices(range(SIZES[name]), k=2)) for name in "qk")
    return b, h, (q[0], q[1]), (k[0], k[1])


@pytest.mark.slow
def test_what_is_known_of_a_rectangle_is_so_at_each_place(tmp_path: Path) -> None:
    """And of a good part of those where a tree is the same everywhere it is known."""
    chance, tensors = random.Random(53), random_tensors(seed=1)
    trees = [random_tree(chance, Type.BOOL, depth=4) for _ in range(400)]
    library, uniform, found = compiled(tmp_path, trees), 0, 0
    for number, tree in enumerate(trees):
        exact = by_torch(tree, tensors) != 0
        for at in (drawn(chance) for _ in range(20)):
            b, h, (q, last_q), (k, last_k) = at
            of_rectangle = exact[b, h, q : last_q + 1, k : last_k + 1]
            may, must = known(library, number, tensors, at)
            assert may or not of_rectangle.any(), (c(tree), at)
            assert not must or of_rectangle.all(), (c(tree), at)
            uniform += bool(of_rectangle.all() or not of_rectangle.any())
            found += must or not may
    assert found > uniform / 2


RECTANGLES: list[tuple[str, Ends, Ends, tuple[bool, bool]]] = [
    ("k <= q", (4, 7), (0, 4), (True, True)),
    ("k <= q", (4, 7), (8, 9), (False, False)),
    ("k <= q", (4, 7), (4, 5), (True, False)),
    ("q - k < 3", (5, 8), (0, 2), (False, False)),
    ("abs(q - k) >= 3", (1, 4), (2, 6), (True, False)),
    ("seen[q / 4] && k <= q", (4, 7), (0, 4), (True, True)),
    ("seen[q / 4] && k <= q", (3, 4), (0, 2), (True, False)),
    ("k <= q && seen[k - 4]", (0, 3), (3, 4), (True, False)),  # may not be read
    ("k % 4 == 3 || k > 9", (0, 3), (0, 2), (False, False)),
    ("q * 2147483647 < 1", (0, 3), (0, 2), (True, False)),
    ("k < 8 ? q < 8 : q >= 8", (1, 7), (3, 7), (True, True)),
    ("q < 2 == k < 2", (2, 7), (3, 7), (True, True)),
    # Numbers of fp32 may be beyond all whole ones, or none.
    ("float(k) * 1e19 > 9223372036854775807", (0, 3), (1, 4), (True, True)),
    ("!(float(q) / float(k - k) <= 9223372036854775807)", (0, 3), (0, 2), (True, False)),
]


@pytest.mark.slow
def test_rectangles(tmp_path: Path) -> None:
    tensors = {**random_tensors(seed=1), "seen": torch.tensor([False, True, True, False] * 2)}
    named = {"seen": Declared("seen", "bool", 1)}
    library = compiled(tmp_path, [parse.mask(text, named) for text, *_ in RECTANGLES])
    for number, (text, q, k, expected) in enumerate(RECTANGLES):
        assert known(library, number, tensors, (0, 0, q, k)) == expected, text


@pytest.mark.slow
def test_whole_numbers_wrap_in_c_as_in_torch(tmp_path: Path) -> None:
    """Compilers assume that a number with a sign never does: k + 2147483640 > k is true then."""
    named = {"wide": Declared("wide", "int64", 1)}
    texts = [
        "k + 2147483640 > k",
        "k - 2147483647 - 2 < k",
        "(k + 1) * 1103515245 / 1103515245 == k + 1",
        "-(k - k - 2147483647 - 1) < 0",
        "abs(k - k - 2147483647 - 1) >= 0",
        "(k - k - 2147483647 - 1) / (q - q - 1) >= 0",
        "(k + 1 << 29) / 2 > 0",
        "wide[k] + 9223372036854775806 > wide[k]",
        "-(-9223372036854775807 - 1 - wide[k] + wide[k]) < 0",
    ]
    trees, tensors = [parse.mask(text, named) for text in texts], random_tensors(seed=1)
    library = compiled(tmp_path, trees)
    for number, tree in enumerate(trees):
        assert torch.equal(computed(library, number, tensors), by_torch(tree, tensors)), c(tree)


@pytest.mark.slow
def test_every_function_comes_to_the_same_in_c_and_in_torch(tmp_path: Path) -> None:
    texts = [f"{name}({', '.join(['s', '0.7'][: function.arguments])})" for name, function in FUNCTIONS.items()]
    trees = [parse.score(text) for text in texts]
    library = compiled(tmp_path, trees)
    for number, tree in enumerate(trees):
        torch.testing.assert_close(
            computed(library, number, random_tensors(1)), by_torch(tree, {}), rtol=1e-5, atol=1e-6, equal_nan=True
        )
