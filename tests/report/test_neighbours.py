"""How far neighbours are apart: how lines are counted, that no step grows, and where PTX may stand."""

import csv
import dataclasses
import re

import pytest

from flashladder.common import catalog, console, own
from flashladder.common.paths import CUDA_HEADERS, VERSIONS
from flashladder.common.report import neighbours
from flashladder.tests.support.tiny_ladder import VERSION_YAML, make_rung
from flashladder.tools.commands import neighbours as tool

HEADERS = sorted([*CUDA_HEADERS.rglob("*.cuh"), *VERSIONS.glob("forward/[0-9]*/*.cuh"), *VERSIONS.glob("*/cuda/*.cuh")])
STEPPED = [
    version
    for name in catalog.ladders()
    if name not in own.ladders()
    for version in catalog.versions(ladder=name)[1:]
    if not version.draft
]
PTX_LINES = 150  # of a ptx header, comments among them; a longer one is to be split by roles: copy, mma, barrier, ...

LOWER = """
#include "config.cuh"
#include "params.cuh"
FLASHLADDER_LAUNCH(32, 0, 64, 64);
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams params) {
    params.lse[0] = 1.0f;  // nothing else
}
"""
UPPER = LOWER.replace('"params.cuh"', '"params.cuh"\n#include "helper.cuh"').replace("1.0f;", "\n\n  one() +\n 0.0f;")
HELPER = """
#pragma once
/* Two lines
   of comment. */
#include <math.h>
#define UNUSED(x) \\
    (x + 1)
constexpr float base = 0.5f;  // "} not a bracket"
struct Unused {
    int one[3];
};
template <class T, int n = (2 > 1)>
__device__ T twice(T x) {
    return 2 * x;
}
__device__ inline float one() {
    asm volatile("{ // not a comment }");
    return twice<float>(base);
}
"""


@pytest.fixture
def pair(tmp_path):
    kept = make_rung(tmp_path, "00_lower", kernel=LOWER)
    return kept, make_rung(tmp_path, "01_upper", kernel=UPPER, helper=HELPER)


def test_lines_are_counted_without_comments(pair):
    step = neighbours.step(*pair)
    assert (step.added, step.removed) == (4, 1)  # the include and the three lines that one line became
    assert step.headers == {"helper.cuh": 16}
    assert {each.name: len(each.lines) for each in step.definitions} == {"base": 1, "twice": 4, "one": 4}
    assert (step.whole, step.used) == (20, 13)


def test_a_comment_or_an_indentation_is_no_step(pair, tmp_path):
    lower, _ = pair
    upper = make_rung(tmp_path, "02_same", kernel="// Another.\n" + LOWER.replace("    params", "\tparams"))
    step = neighbours.step(lower, upper)
    assert (step.added, step.removed, step.headers, step.definitions) == (0, 0, {}, ())


def test_what_comes_from_a_header_that_was_there_is_used_but_not_whole(tmp_path):
    (tmp_path / "forward").mkdir()
    (tmp_path / "forward" / "shared.cuh").write_text(HELPER)
    kernel = UPPER.replace("helper.cuh", "../shared.cuh")
    lower = make_rung(tmp_path, "00_lower", kernel=kernel)
    upper = make_rung(tmp_path, "01_upper", kernel=kernel.replace("one()", "one() + sizeof(Unused)"))
    step = neighbours.step(lower, upper)
    assert (step.added, step.headers, [each.name for each in step.definitions]) == (1, {}, ["Unused"])
    assert (step.whole, step.used) == (1, 4)


def test_what_a_lower_rung_used_is_not_new(pair, tmp_path):
    _, helped = pair
    without = make_rung(tmp_path, "02_without", kernel=LOWER)
    again = make_rung(tmp_path, "03_again", kernel=UPPER, helper=HELPER)
    assert [rung.number for rung in neighbours.lower(again)] == ["00", "01", "02"]
    (step,) = neighbours.steps([again])
    assert (step.below, step.added, step.definitions) == (without, 4, ())
    assert {each.name for each in neighbours.step(without, again).definitions} == {"base", "twice", "one"}
    assert {each.name for each in neighbours.step(without, again, [helped]).definitions} == set()


def test_what_is_lower_than_a_parent_in_another_ladder_is_lower(pair, tmp_path):
    yaml = VERSION_YAML.replace("title: Tiny", "title: Tiny\nparent: 01_upper")
    further = make_rung(tmp_path, "further/00_first", kernel=UPPER, helper=HELPER, yaml=yaml)
    second = make_rung(tmp_path, "further/01_second", kernel=UPPER, helper=HELPER)
    assert {rung.name for rung in neighbours.lower(further)} == {"00_lower", "01_upper"}
    assert {rung.name for rung in neighbours.lower(second)} == {"00_lower", "01_upper", "further/00_first"}
    assert [step.below.name for step in neighbours.steps([further, second])] == ["01_upper", "further/00_first"]


def test_no_two_headers_have_one_name():
    """What is said of a line names its file without the folder."""
    names = [header.name for header in HEADERS]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.stem)
def test_every_line_of_a_header_is_in_one_definition_with_a_name(header):
    left_out = [line for line in neighbours.code(header) if re.match(r"#(pragma once|include|undef)", line)]
    found = neighbours.definitions(header)
    assert sum(len(each.lines) for each in found) == len(neighbours.code(header)) - len(left_out)
    for each in found:
        assert re.fullmatch(r"\w+", each.name), each
        assert any(re.search(rf"\b{each.name}\b", line) for line in each.lines[:3]), each


@pytest.mark.parametrize("version", STEPPED, ids=lambda version: version.name)
def test_no_step_is_larger_than_it_may_be(version):
    (step,) = neighbours.steps([version])
    assert not step.is_too_large, (
        f"{max(step.whole, step.used)} lines, {step.limit} allowed: split it, or say why in version.yaml"
    )


@pytest.mark.parametrize("version", [each for each in STEPPED if each.step], ids=lambda version: version.name)
def test_what_may_be_larger_is_so(version):
    (step,) = neighbours.steps([version])
    assert step.upper == version
    assert neighbours.LIMIT < max(step.whole, step.used) <= version.step.lines
    assert re.fullmatch(r"[A-Z].{20,}\.", version.step.why)


def test_from_one_instruction_set_to_the_next_there_is_no_limit(pair):
    lower, upper = pair
    step = neighbours.step(lower, dataclasses.replace(upper, instruction_set="hopper"))
    assert (step.limit, step.is_too_large) == (None, False)
    assert neighbours.step(lower, upper).limit == neighbours.LIMIT


def test_ptx_stands_in_ptx_headers_alone():
    sources = [*CUDA_HEADERS.rglob("*.cuh"), *VERSIONS.rglob("*.cu"), *VERSIONS.rglob("*.cuh")]
    with_asm = {path for path in sources if any(re.search(r"\basm\b", line) for line in neighbours.code(path))}
    assert with_asm
    assert not [path for path in with_asm if path.parent != CUDA_HEADERS / "ptx"]
    for path in with_asm:
        assert len(path.read_text().splitlines()) <= PTX_LINES, path.name


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setattr(console.console, "width", 160)

    def call(*arguments):
        code = console.run(tool.main, tool.parser(), arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_all_steps(run, tmp_path):
    code, out, err = run("--check", "--csv", str(tmp_path / "steps.csv"))
    assert (code, err) == (0, "")
    (line,) = [line.split() for line in out.splitlines() if line.strip().startswith("09 ")]
    (row,) = [row for row in csv.DictReader((tmp_path / "steps.csv").open()) if row["rung"].startswith("09")]
    assert line == ["09", "Fewer", "moves", row["added"], row["removed"], row["whole"], row["used"]]
    assert (row["below"], row["title"]) == ("08_fewer_address_ops", "Fewer moves")
    assert row["definitions"] == "Serpentine ByRow"


def test_a_step_and_what_it_uses(run):
    code, out, _ = run("02")
    assert code == 0
    assert re.search(r"Swizzled +layout\.cuh +9", out)
    assert "Eager" not in out


def test_a_step_that_is_too_large_fails_the_check(run, monkeypatch):
    monkeypatch.setattr(neighbours, "LIMIT", 5)
    code, out, _ = run("02", "03", "--check")
    assert code == 1
    assert "03_eager_load has 13 lines; it may have 5" in out
    assert run("02", "03")[0] == 0


def test_what_cannot_be_done_is_said(run, tmp_path):
    assert run("00")[::2] == (2, "error: 00 has no rung below; name a higher one\n")
    code, _, err = run("02", "--csv", str(tmp_path / "nowhere" / "steps.csv"))
    assert code == 2
    assert "non-existent directory" in err
