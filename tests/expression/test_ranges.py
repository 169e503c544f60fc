"""What is known of a rectangle by the elements that it reads: beside all its scores, and which ones are read for it."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.expression import Declared, c, parse, ranges
from flashladder.common.paths import CUDA_HEADERS

pytestmark = pytest.mark.slow

MOST = 48  # of q and of k
EXTENT = 70  # of a tensor's second dimension
TENSORS = {
    "doc": (Declared("doc", "int32", 1), np.int32, "int"),
    "wide": (Declared("wide", "int64", 1), np.int64, "long long"),
    "tiny": (Declared("tiny", "int8", 1), np.int8, "signed char"),
    "flag": (Declared("flag", "bool", 1), np.bool_, "bool"),
    "pair": (Declared("pair", "int16", 2), np.int16, "short"),
    "both": (Declared("both", "bool", 2), np.bool_, "bool"),
}
FREE = (  # whose indices only grow or fall with q and with k
    "doc[q] == doc[k]",
    "doc[q] != doc[k] && k <= q",
    "k <= q || doc[q] != 0 && doc[q] == doc[k]",
    "wide[q] < wide[k] + 1",
    "tiny[q + k] > 2",
    "flag[k]",
    "!flag[q] || flag[k]",
    "k >= tiny[q] + (q - tiny[q]) / 3 * 3",
    "doc[max(q - 5, 0)] >= doc[min(k + 1, 9)]",
    "wide[47 - k] == 2147483648 * doc[q / 4]",
    "pair[1][q] == pair[0][k]",
    "pair[q / 16][k] - pair[2][k] < 2",
    "both[q / 8][k / 4]",
    "q >= 5 && flag[q - 5]",
    "doc[q * 3 / 2] % 3 == 1",
    "(flag[q] ? doc[q] : tiny[k]) < 2",
    "abs(doc[2 * q] - doc[2 * q + k % 1]) <= 1 || flag[k]",
)
ONE_WAY = (  # numbers of fp32 that only grow or fall
    "int(8 * sqrt((k + 0.5) / seqlen_k)) == int(8 * sqrt((q + 0.5) / seqlen_k))",
    "k < 0.25 * seqlen_k || k <= q",
    "float(k) <= float(q) + 2.5",
    "-sqrt(k / 3.0) >= floor((q - 30) * 0.25)",
    "sqrt(k - 20) < 3.0",
    "int(sqrt(20.0 - q)) != int(ceil(k * 0.1))",
    "k / 0.5 == q * 2.0",
    "5.5 - k > 1 / (doc[0] - doc[0] + 0.5)",
)
ROUNDED_ONCE = (  # or twice, as a compiler likes
    "floor(q * 0.25 - 7.5) < k",
    "float(k * 0.7) + 0.1 <= 30.5",
    "k * 0.7 / 1.0 - 0.1 <= 30.5",
    "30.5 >= -(k * 0.7) + q / 3.0",
)
OTHER = (  # which may pass over numbers
    "doc[abs(2 * q - 2 * k - 1)] == 1",
    "doc[(2 * q + k) % 7] < 3",
    "doc[q * 3 % 7] < 2",
    "doc[q - k - q + 47] < 3 || k > q",
    "k > q || doc[(q - k) * (q - k)] < 3",
    "doc[max(q, 47 - q)] < 1",
    "flag[doc[q] & 7] && wide[doc[k]] < 3",
    "pair[q % 3][k / 2] == tiny[k]",
    "float(doc[q]) < doc[k] + 0.5",
    "0.5 / (k - 3) < 0.25",
    *ROUNDED_ONCE,
    "sqrt(q - k) <= 2.0",
    "int(5 - int(sqrt(k - 5))) == 3",
    "k * 0.0 == q / 0.0",
    "min(sqrt(k - 5), 3.0) > 1.5",
)
TEXTS = (*FREE, *ONE_WAY, *OTHER)
SOURCE = """
#define __device__
#include "softmax/expression.cuh"
struct Reach { long long low, high; };
struct Log { int is_bounded, leaves; };
template <class T> struct Watched { const T *at; Reach *reach; Log *log; };

// Notes what is read, or whether it is beyond what was.
template <class Value, class T, class Offset>
Value read(const Watched<T> &tensor, Offset offset) {
    Reach &reach = *tensor.reach;
    if (!tensor.log->is_bounded) {
        if (offset < reach.low) reach.low = offset;
        if (offset > reach.high) reach.high = offset;
    } else if (offset < reach.low || offset > reach.high) {
        tensor.log->leaves = 1;
        return Value();
    }
    return static_cast<Value>(tensor.at[offset]);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Of each text a function that evaluates all elements of a rectangle, and one that asks by ranges."""
    folder: Path = tmp_path_factory.mktemp("ranges")
    members = "".join(f"Watched<{kind}> {each.field};\n" for each, _, kind in TENSORS.values())
    members += "".join(f"int {each.extent(1)};\n" for each, *_ in TENSORS.values() if each.rank > 1)
    named = {name: each for name, (each, *_) in TENSORS.items()}
    trees = [parse.mask(text, named) for text in TEXTS]
    functions = "".join(
        f'extern "C" int all{n}(const Params &params, Place at, Range q, Range k) {{ Maybe x{{false, true}};\n'
        "for (at.q = q.low; at.q <= q.high; ++at.q) for (at.k = k.low; at.k <= k.high; ++at.k) "
        f"{{ const bool one = {c(tree)}; x.may |= one, x.must &= one; }} return x.may + 2 * x.must; }}\n"
        f'extern "C" int within{n}(const Params &params, Place at, Range q, Range k) '
        f"{{ const Maybe x = {ranges.c(tree)}; return x.may + 2 * x.must; }}\n"
        for n, tree in enumerate(trees)
    )
    (folder / "ranges.cpp").write_text(f"{SOURCE}struct Params {{\n{members}}};\n{functions}")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-I", CUDA_HEADERS]
    command = [toolchain().host_compiler, *flags, folder / "ranges.cpp", "-o", folder / "ranges.so"]
    subprocess.run([str(word) for word in command], check=True)
    return ctypes.CDLL(str(folder / "ranges.so"))


class Range(ctypes.Structure):
    _fields_ = (("low", ctypes.c_longlong), ("high", ctypes.c_longlong))


class Place(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("b", "h", "q", "k", "seqlen_q", "seqlen_k"))


class Log(ctypes.Structure):
    _fields_ = (("is_bounded", ctypes.c_int), ("leaves", ctypes.c_int))


class Watched(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("at", "reach", "log"))


class Params(ctypes.Structure):
    _fields_ = (
        *((each.field, Watched) for each, *_ in TENSORS.values()),
        *((each.extent(1), ctypes.c_int) for each, *_ in TENSORS.values() if each.rank > 1),
    )


def asked(library: ctypes.CDLL, number: int, seed: int, runs: int, q: Range, k: Range) -> tuple[int, int]:
    """What all elements of a rectangle say, and what ranges do: 1 if it may be true, 2 if it must be.

    Requires that for ranges nothing is read but between the first and the last element that these read.
    """
    chance = np.random.default_rng(seed)
    kept, params, log = [], Params(), Log()
    for each, dtype, _ in TENSORS.values():
        length = 200 if each.rank == 1 else 8 * EXTENT
        values = np.repeat(chance.integers(0, 4, length), runs)[:length].astype(dtype)
        reach = Range(2**63 - 1, -(2**63))
        kept += [values, reach]
        setattr(params, each.field, Watched(values.ctypes.data, ctypes.addressof(reach), ctypes.addressof(log)))
        if each.rank > 1:
            setattr(params, each.extent(1), EXTENT)
    at = Place(0, 0, q.low, k.low, MOST, MOST)
    exact = getattr(library, f"all{number}")(ctypes.byref(params), at, q, k)
    log.is_bounded = 1
    known = getattr(library, f"within{number}")(ctypes.byref(params), at, q, k)
    assert not log.leaves
    return exact, known


ENDS = st.tuples(st.integers(0, MOST - 1), st.integers(0, 15)).map(lambda x: Range(x[0], min(sum(x), MOST - 1)))
DRAWN = {"seed": st.integers(0, 2**20), "runs": st.sampled_from([1, 4, 16, 64]), "q": ENDS, "k": ENDS}


@pytest.mark.parametrize("number", range(len(TEXTS)), ids=TEXTS)
def test_ranges_never_say_what_an_element_denies(library: ctypes.CDLL, number: int) -> None:
    @given(**DRAWN)
    def holds(seed: int, runs: int, q: Range, k: Range) -> None:
        exact, known = asked(library, number, seed, runs, q, k)
        assert known & 1 or not exact & 1
        assert not known & 2 or exact & 2

    holds()


def told(library: ctypes.CDLL, text: str) -> tuple[int, int]:
    """How many of 200 rectangles of 8 rows and 16 keys have one answer, and of how many ranges know it."""
    same = known = 0
    for seed in range(200):
        q, k = (int(x) for x in np.random.default_rng(seed).integers(0, 32, 2))
        exact, found = asked(library, TEXTS.index(text), seed, 32, Range(q, q + 7), Range(k, k + 15))
        same += exact in (0, 3)
        known += found in (0, 3)
    return same, known


@pytest.mark.parametrize("text", ["doc[q] == doc[k]", "doc[q] != doc[k] && k <= q", "flag[k]"])
def test_of_long_runs_ranges_know_what_elements_say(library: ctypes.CDLL, text: str) -> None:
    same, known = told(library, text)
    assert known >= same * 0.9 > 50


@pytest.mark.parametrize("text", [text for text in ONE_WAY if "20" not in text])  # there some are NaN
def test_of_numbers_that_go_one_way_ranges_know_what_elements_say(library: ctypes.CDLL, text: str) -> None:
    same, known = told(library, text)
    assert known >= same * 0.6 > 6


@pytest.mark.parametrize("text", ROUNDED_ONCE)
def test_nothing_is_known_of_sums_that_may_have_one_rounding(text: str) -> None:
    assert "ends_of" not in ranges.c(parse.mask(text, {}))


def test_many_elements_are_not_read(library: ctypes.CDLL) -> None:
    """They may be anything, though all are alike."""
    for last, known in ((31, 3), (32, 1)):
        exact, found = asked(library, FREE.index("wide[q] < wide[k] + 1"), 1, 200, Range(0, last), Range(0, 0))
        assert (exact, found) == (3, known)
