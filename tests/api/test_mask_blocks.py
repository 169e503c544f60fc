"""mask_blocks: the lists of rung 52's kernels, beside the exact evaluation of the mask; and how they are shown."""

import random
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from flashladder import masks
from flashladder.common.api.mask_blocks import EMPTY, PARTIAL, WHOLE, BlockList, MaskBlocks, mask_blocks
from flashladder.common.console import EXIT_ERROR, run
from flashladder.common.expression import Mods
from flashladder.common.problem.modified import modified
from flashladder.common.problem.problem import Problem
from flashladder.common.report import masks as report
from flashladder.tests.support.random_expressions import random_mask, random_tensors
from flashladder.tools.commands import mask as command

SIZES = {"batch": 1, "num_heads": 2, "num_heads_k": 1, "seqlen_q": 330, "seqlen_k": 410, "head_dim": 128}


def exact_classes(found, tensors, b, h):
    """What each tile sees of each block, by evaluating the mask for each element."""
    problem = found.problem
    lengths = problem.seqlen_q, problem.seqlen_k
    own, key = torch.arange(lengths[1] - lengths[0], lengths[1])[:, None], torch.arange(lengths[1])
    left, right = (lengths[1] if x is None else x for x in (problem.window_left, problem.window_right))
    bound = (key >= own - left) & (key <= own + (0 if problem.causal else right))
    scores = modified(Mods.parse(problem.mods), tensors, torch.zeros(2, *lengths), b, 0, lengths, bound)[h]
    shown = ~scores.isneginf()
    tiles = [shown[found.rows(tile).start : found.rows(tile).stop] for tile in range(len(found.lists[0].classes))]
    assert sum(map(len, tiles)) == lengths[0]

    def kind(block):
        is_short = block.shape[1] < found.block_n  # behind the end no key is seen
        return EMPTY if not block.any() else WHOLE if block.all() and not is_short else PARTIAL

    return [[kind(block) for block in tile.split(found.block_n, dim=1)] for tile in tiles]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "sizes", "titles"),
    [
        (masks.sinks_and_window(40, 100), {}, [""]),
        (masks.dilated(2, 60, 20), {}, [""]),
        (masks.documents(torch.arange(820).reshape(2, 410) // 150), {"batch": 2}, ["b=0", "b=1"]),
        ({"mask": "k % 3 != h || k < 200"}, {"head_dim": 64}, ["h=0", "h=1"]),
    ],
    ids=["sinks", "dilated", "documents", "heads"],
)
def test_lists_are_what_each_element_says(asked, sizes, titles):
    left, right = asked.get("window", (None, None))
    bounds = {"causal": asked.get("causal", False), "window_left": left, "window_right": right}
    tensors = asked.get("tensors", {})
    found = mask_blocks(Problem(**{**SIZES, **sizes}, **bounds), asked["mask"], tensors)
    assert [each.title for each in found.lists] == titles
    for each in found.lists:
        at = dict(part.split("=") for part in each.title.split(", ") if part)
        assert each.classes.tolist() == exact_classes(found, tensors, int(at.get("b", 0)), int(at.get("h", 0)))


@pytest.mark.slow
def test_lists_of_random_expressions():
    """Which hold blocks of every kind, over all of them."""
    chance, kinds = random.Random(53), set()
    for seed in range(3):
        mask = random_mask(chance, depth=3)
        tensors = {tensor.name: random_tensors(seed)[tensor.name] for tensor in mask.tensors}
        found = mask_blocks(Problem(**{**SIZES, "batch": 2}), mask.sources["mask"], tensors)
        for each in found.lists:
            at = dict(part.split("=") for part in each.title.split(", ") if part)
            classes = exact_classes(found, tensors, int(at.get("b", 0)), int(at.get("h", 0)))
            assert each.classes.tolist() == classes, mask.sources["mask"]
            kinds.update(np.unique(each.classes).tolist())
    assert kinds == {EMPTY, PARTIAL, WHOLE}


def made(classes, **sizes):
    problem = Problem(**{**SIZES, "head_dim": 64, **sizes, "mods": "mask=k<=q"})
    lists = tuple(BlockList(title, np.array(each, np.uint8)) for title, each in classes.items())
    return MaskBlocks(problem, 192, 64, True, lists)


def test_tiles_have_the_rows_of_the_kernel():
    found = made({}, seqlen_q=450)
    assert [found.rows(tile) for tile in range(3)] == [range(128), range(128, 320), range(320, 450)]
    from_the_first = MaskBlocks(found.problem, 192, 64, False, ())
    assert [from_the_first.rows(tile) for tile in range(3)] == [range(192), range(192, 384), range(384, 450)]


def test_a_picture_has_each_block_in_its_place():
    classes = [[WHOLE, PARTIAL, EMPTY, PARTIAL], [EMPTY, EMPTY, WHOLE, WHOLE]]
    text = report.draw(made({"": classes}))
    ElementTree.fromstring(text)
    (_, top, width, height), *_ = [
        tuple(map(float, each))
        for each in re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)" fill="#ffffff" stroke', text)
    ]
    drawn = np.full((2, 4), EMPTY)
    for path, fill in re.findall(r'<path d="([^"]*)" fill="([^"]*)"', text):
        (kind,) = (kind for kind, colour in report._FILLS.items() if colour == fill)
        for x, y, run_width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", path):
            first, count = (float(x) - report._LEFT) / (width / 4), float(run_width) / (width / 4)
            drawn[round((float(y) - top) / (height / 2)), round(first) : round(first + count)] = kind
    assert drawn.tolist() == classes


def test_counts_and_a_map_in_the_terminal(monkeypatch, capsys):
    classes = [[WHOLE, PARTIAL, EMPTY, PARTIAL], [EMPTY, EMPTY, WHOLE, WHOLE]]
    monkeypatch.setattr("flashladder.common.api.mask_blocks.mask_blocks", lambda *_: made({"": classes}))
    assert run(command.main, command.parser(), ["k <= q"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"all +3 +2 +3 +62.5%", printed)
    assert "  0 to 191  █▒·▒\n192 to 329  ··██\n" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["k <= p"], "no name p"),
        (["k <= q", "--seqlen", "0"], "seqlen"),
        (["t[q] == 0", "--tensor", "t=zeros:9:int32"], "its index is 9"),
        (["k <= q", "--head-dim", "512"], "52_listed_blocks"),
    ],
)
def test_what_has_no_blocks_is_refused(words, said, capsys):
    assert run(command.main, command.parser(), words) == EXIT_ERROR
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_writes_a_picture(tmp_path, capsys):
    picture = tmp_path / "mask.svg"
    words = ["q - k < far", "--causal", "--seqlen", "1024", "--tensor", "far=100", "--picture", str(picture)]
    assert run(command.main, command.parser(), words) == 0
    assert "computed" in capsys.readouterr().out
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.slow
def test_the_pictures_of_the_docs_are_what_the_kernels_list():
    from flashladder.common.report.pictures import gallery

    assert all(each.is_current() for each in gallery.mask_maps()), "flashladder picture masks"
