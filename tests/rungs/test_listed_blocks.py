"""Rung 52 lists the blocks of keys that a tile of rows sees, by a mask that is an expression."""

import math
import re
from unittest.mock import patch

import numpy as np
import pytest
import torch

from flashladder.common import catalog, emulator
from flashladder.common.compiler import build_one, translate
from flashladder.common.compiler.sass import code
from flashladder.common.expression import Mods
from flashladder.common.problem.inputs import Tensors, make_inputs
from flashladder.common.problem.modified import modified, shaped
from flashladder.common.problem.operations.packed import parts
from flashladder.common.runtime.launch import Launcher
from flashladder.tests.support.rung_table import emulated, masked, packed

RUNG = catalog.find("52")
WHOLE, ALL, ENDS, WORDS = 0, 1, 2, 8  # of a list: what its first words are, and how many there are before the blocks
HALF_OF_THE_ROWS = "mask=k<64||k>=128||q%2==0"  # see the middle one of three blocks: the others begin in a whole one


def seen(problem, tensors):
    """Which keys each row sees, (batch, num_heads, seqlen_q, seqlen_k)."""
    mods, lengths = Mods.parse(problem.mods), (problem.seqlen_q, problem.seqlen_k)
    own = torch.arange(problem.seqlen_q)[:, None] + problem.seqlen_k - problem.seqlen_q
    key, far = torch.arange(problem.seqlen_k), sum(lengths)
    left, right = (far if each is None else each for each in (problem.window_left, problem.window_right))
    bound = (key >= own - left) & (key <= own + (0 if problem.causal else right))
    read = shaped(mods, problem.extents, tensors.by_name)
    scores = torch.zeros(problem.num_heads, *lengths)
    return torch.stack([modified(mods, read, scores, b, 0, lengths, bound) > -math.inf for b in range(problem.batch)])


def lists_of(problem, tensors, config):
    """What lists should be, by sequence and head; a tile's are its blocks that are seen whole, those seen in part, and
    of each warpgroup behind which of them there is none that it sees."""
    visible, m, n = seen(problem, tensors), config.block_m, config.block_n
    rows = -(-problem.seqlen_q // 64) * 64
    tiles = -(-problem.seqlen_q // m)
    above = tiles * m - rows if problem.window_left is None else 0  # tiles are counted from the last row
    for b, h in np.ndindex(problem.batch, problem.num_heads):
        for tile in range(tiles):
            begin = tile * m - above
            of_tile = visible[b, h, max(begin, 0) : begin + m]
            blocks = dict(enumerate(of_tile.split(n, dim=1)))
            cut = problem.seqlen_k % n and problem.seqlen_k // n  # of the last block, keys behind the end are not seen
            whole = [j for j, each in blocks.items() if each.all() and not (cut and j == cut)]
            part = [j for j, each in blocks.items() if each.any() and j not in whole]
            ends = [
                max((i + 1 for i, j in enumerate([*whole, *part]) if group[:, j * n : j * n + n].any()), default=0)
                for group in of_tile.split(64)
            ]
            yield b, h, tile, whole, part, ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mods", "options"),
    [
        ("mask=k<=q", {}),
        ("mask=k>q-70||k%64==h", {"causal": True}),
        ("mask=q/100==k/100", {"window_left": 150, "window_right": 90}),
        ("image:int32[];mask=image[q]==image[k]&&b!=1", {"batch": 2, "num_heads_k": 1, "extents": ((410,),)}),
        ("mask=(k+64*b)/64%3!=h&&q!=250", {"batch": 2, "causal": True}),
        ("mask=k%50==60", {}),
        ("seen:bool[][][];mask=seen[h][(q-(seqlen_k-seqlen_q))/128][k/64]", {"extents": ((2, 3, 7),)}),
        (HALF_OF_THE_ROWS, {"head_dim": 128}),
    ],
)
def test_lists_have_what_rows_see(mods, options):
    problem = masked(**{"causal": False, "num_heads": 2, "seqlen_q": 330, "seqlen_k": 410, **options}, mods=mods)
    tensors = make_inputs(problem)
    for image in (tensors.by_name[name] for name in problem.inputs if name == "of_image"):
        image.copy_(torch.arange(410) // 90)
    config = RUNG.config_for(problem)
    found, _ = lists_found(problem, tensors, config)
    named = {name: re.search(rf"\b{name}\b", mods.partition("mask=")[2]) for name in "bh"}
    tiles = -(-problem.seqlen_q // config.block_m)
    assert len(found) == tiles * (problem.batch if named["b"] else 1) * (problem.num_heads if named["h"] else 1)
    for b, h, tile, whole, part, ends in lists_of(problem, tensors, config):
        number = (b if named["b"] else 0) * (problem.num_heads if named["h"] else 1) + (h if named["h"] else 0)
        check_list(found[number * tiles + tile].tolist(), whole, part, ends)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": True, "window_left": 150}])
def test_lists_of_packed_sequences(options):
    """A sequence's blocks are its own; of one without keys the list is empty."""
    problem = packed(
        (1, 0, 330, 64, 200, 70), (90, 20, 410, 0, 130, 260), num_heads=2, **options, mods="mask=k/64%3!=h"
    )
    tensors, config = make_inputs(problem), RUNG.config_for(problem)
    found, numbers = lists_found(problem, tensors, config)
    of_head = problem.total_q // config.block_m + problem.batch + 1
    assert len(found) == of_head * problem.num_heads
    for number, rows, _, alone in parts(problem):
        for _, h, tile, whole, part, ends in lists_of(alone, tensors, config):
            own = rows.start // config.block_m + number + tile
            assert own in numbers[rows]
            check_list(found[h * of_head + own].tolist(), whole, part, ends)
    empty = numbers[sum(problem.seqlens_q[:3])]
    assert found[[empty, of_head + empty], WHOLE : ALL + 1].tolist() == [[0, 0]] * 2


def lists_found(problem, tensors, config):
    """What the kernels have left: the lists, a row for each; of packed sequences also their numbers."""
    memory = emulator.GlobalMemory()
    with patch.object(emulator, "GlobalMemory", lambda: memory):
        emulated(RUNG, problem, tensors)
    words = -(-problem.seqlen_k // config.block_n) + WORDS
    lists, numbers = (memory.read(f"workspace {name}").view(np.int32) for name in ("lists", "numbers"))
    return lists.reshape(-1, words), numbers


def check_list(found, whole, part, ends):
    assert found[:ENDS] == [len(whole), len(whole) + len(part)]
    assert found[WORDS : WORDS + found[ALL]] == [*whole, *part]
    assert found[ENDS : ENDS + len(ends)] == ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mods", "launched"),
    [
        ("mask=k<=q", [("list_blocks", False), ("attention_forward", True)]),
        ("mask=k<=q+b-h", [("list_blocks", False), ("attention_forward", True)]),
        ("score=s-b", [("attention_forward", False)]),  # else it would begin before what its inputs come of has ended
    ],
)
def test_the_main_kernel_is_a_dependent_launch_where_a_list_is_made_alone(mods, launched):
    problem = masked(batch=2200, num_heads=64, seqlen_q=70, seqlen_k=130, causal=False, mods=mods)
    given = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in problem.tensors.items()}
    module = translate(RUNG, RUNG.config_for(problem), "sm_90a")
    launches = Launcher(module).launches(problem, Tensors(given, problem), num_sms=132)
    assert [(each.entry, each.is_dependent) for each in launches] == launched


@pytest.mark.slow
def test_packed_sequences():
    """Of unequal lengths, some of them empty; tile after tile on one SM."""
    sizes = {"seqlens_q": (70, 0, 33, 1, 130, 0, 300), "seqlens_k": (120, 10, 33, 0, 200, 0, 90), "num_heads": 2}
    for mods, options in (
        ("mask=k%3==h||k<=q", {"num_heads_k": 1, "causal": False}),
        ("mask=(k+b)%5!=0;score=s-b", {"alibi": True, "sinks": True}),
        ("mask=k/64!=1", {"causal": True, "window_left": 60}),
        ("score=s-b", {"causal": False}),
    ):
        emulated(RUNG, packed(**sizes, **options, mods=mods))
    emulated(RUNG, packed(**sizes, mods="mask=k%70!=b"), num_sms=1)


@pytest.mark.slow
def test_blocks_of_packed_sequences_that_no_row_sees_are_not_computed():
    sizes = {"seqlens_q": (384, 10), "seqlens_k": (1024, 64), "num_heads": 1, "causal": False}
    of_all = emulated(RUNG, packed(**sizes, mods="mask=k<=q+1024"))[1].mma_flops
    of_few = emulated(RUNG, packed(**sizes, mods="mask=b==0&&(k/64==3||k/64==11)"))[1].mma_flops
    assert of_few * 97 == of_all * 12  # blocks of six warpgroups with 64 rows, and of one with 10


@pytest.mark.slow
def test_blocks_that_no_row_sees_are_not_computed():
    """Nor is a tile without any."""
    sizes = {"num_heads": 1, "seqlen_q": 384, "seqlen_k": 1024, "causal": False}
    of_all = emulated(RUNG, masked(**sizes, mods="mask=k<=q+1024"))[1].mma_flops
    of_few = emulated(RUNG, masked(**sizes, mods="mask=k/64==3||k/64==11"))[1].mma_flops
    of_one_tile = emulated(RUNG, masked(**sizes, mods="mask=q-640<192"))[1].mma_flops
    assert (of_few, of_one_tile) == (of_all / 8, of_all / 2)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_by_text_a_causal_mask_has_the_bits_of_the_option(head_dim):
    """Its blocks are those that the option computes, in the same order."""
    sizes = {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 500, "seqlen_k": 610, "head_dim": head_dim}
    tile = {"block_m": 192, "block_n": 64, "q_in_registers": False, "num_stages": 3}
    built_in, _ = emulated(RUNG, masked(**sizes), **tile)
    by_text, _ = emulated(RUNG, masked(**sizes, causal=False, mods="mask=k<=q"), **tile)
    assert torch.equal(built_in.o, by_text.o)
    assert torch.equal(built_in.lse, by_text.lse)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16"), (192, "fp16"), (256, "bf16")])
def test_rows_that_begin_in_a_whole_block_and_scores_that_jump(head_dim, dtype):
    """By thousands from block to block, up and down; of some rows alone."""
    sizes = {"num_heads": 2, "seqlen_q": 130, "seqlen_k": 400, "causal": False, "head_dim": head_dim, "dtype": dtype}
    jumps = "k/64%3==q%3?s+5000:k/64%3==1?s-5000:s"
    for mods in (HALF_OF_THE_ROWS, f"score={jumps}", f"{HALF_OF_THE_ROWS};score={jumps}"):
        emulated(RUNG, masked(**sizes, mods=mods))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 192])
def test_options_beside_a_mask(head_dim):
    """Without a score these are done in the softmax, in whole blocks."""
    sizes = {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 200, "seqlen_k": 390, "head_dim": head_dim}
    for options in (
        {"softcap": 5.0, "causal": False},
        {"alibi": True, "sinks": True},
        {"softcap": 5.0, "alibi": True, "lse": False},
    ):
        emulated(RUNG, masked(**sizes, **options, mods="mask=k<130||k%50>q%40"))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_dropout_beside_a_mask(head_dim):
    """What draws the weights that are kept goes through the list too, also where a warpgroup begins at its own end."""
    sizes = {"num_heads": 2, "num_heads_k": 1, "head_dim": head_dim, "dropout_p": 0.3}
    several = {"seqlens_q": (70, 0, 33, 1, 130, 0, 300), "seqlens_k": (120, 10, 33, 0, 200, 0, 290)}
    emulated(RUNG, masked(**sizes, seqlen_q=330, seqlen_k=410, causal=False, mods="mask=k%200<q&&q%5!=0"), num_sms=2)
    emulated(RUNG, packed(**sizes, **several, mods="mask=(k+b)/64%3!=h;score=s-b"))


@pytest.mark.slow
def test_one_row_and_tile_after_tile_on_one_sm():
    emulated(RUNG, masked(seqlen_q=1, seqlen_k=300, causal=False, mods="mask=k%3==0"))
    for mods in ("mask=k<=q-200", "mask=k%200<100&&q%5!=0;score=s+h"):
        emulated(RUNG, masked(num_heads=3, seqlen_q=520, seqlen_k=400, causal=False, mods=mods), num_sms=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(64, {}), (96, {}), (128, {}), (128, {"packed": True}), (128, {"dropout": True}), (256, {"dropout": True})],
)
def test_a_simple_mask_leaves_the_main_loop_registers(head_dim, options):
    """What is not in a register is read behind the vote that P has passed its limit, as seldom happens."""
    artifact = build_one(RUNG, RUNG.config(head_dim=head_dim, mods="mask=k<=q", **options), "sm_90a")
    opcodes = [each.base for each in code.read(artifact).loop]
    usual = opcodes[: opcodes.index("VOTE")]
    assert "HGMMA" in usual
    assert not {"LDL", "STL"}.intersection(usual)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_an_expression_it_is_its_parent(head_dim):
    """Instruction by instruction of the main kernel, but for where its parameters lie."""
    found = [
        [each.opcode for each in code.read(build_one(rung, rung.config(head_dim=head_dim), "sm_90a")).instructions]
        for rung in (RUNG, catalog.find(RUNG.parent))
    ]
    assert found[0] == found[1]
