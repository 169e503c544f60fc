"""Which blocks of keys a mask costs: the lists of rung 52, by its own kernels on the emulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flashladder.common import catalog
from flashladder.common.api import mask_check
from flashladder.common.catalog.instruction_sets import INSTRUCTION_SETS
from flashladder.common.compiler import translate
from flashladder.common.expression import Mods, names
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

RUNG = "52"
EMPTY, PARTIAL, WHOLE = range(3)
TITLES = ("empty", "partial", "whole")
_NUM_WHOLE, _NUM_BLOCKS, _HEAD = 0, 1, 8  # words of a list in block_lists.cuh: the first two, and before the blocks
_WARPGROUP_ROWS = 64


@dataclass(frozen=True)
class BlockList:
    """What the tiles of rows see of the blocks of keys, for the sequences and heads that share a list."""

    title: str  # which these are: "b=0, h=1"; empty: all
    classes: np.ndarray  # (tiles, blocks), of EMPTY, PARTIAL and WHOLE

    def count(self, kind: int) -> int:
        """The blocks of a kind, over all tiles."""
        return int((self.classes == kind).sum())


@dataclass(frozen=True)
class MaskBlocks:
    """The lists of a mask, and the tiles that they are of."""

    problem: Problem
    block_m: int  # rows of a tile
    block_n: int  # keys of a block
    counts_from_the_end: bool  # whether tiles are counted from the last row, so that the first one may be short
    lists: tuple[BlockList, ...]

    def rows(self, tile: int) -> range:
        """Those of a tile."""
        rows, tiles = self.problem.seqlen_q, -(-self.problem.seqlen_q // self.block_m)
        above = tiles * self.block_m - -(-rows // _WARPGROUP_ROWS) * _WARPGROUP_ROWS
        begin = tile * self.block_m - (above if self.counts_from_the_end else 0)
        return range(max(begin, 0), min(begin + self.block_m, rows))


def mask_blocks(problem: Problem, mask: str, tensors: Mapping[str, torch.Tensor] | None = None) -> MaskBlocks:
    """The lists of a problem of attention, with a mask and what it reads.

    Attention itself does not run, so that some thousand rows and keys take a second. Raises as `attention` does, and
    EmulatorError for what is wrong in the kernels that list.
    """
    problem, asked = mask_check.of_problem(problem, mask, None, tensors or {})
    rung = catalog.find(RUNG)
    config = rung.config_for(problem)
    inputs = make_inputs(problem)
    workspaces: dict[str, np.ndarray] = {}
    for name, read in asked.tensors.items():
        inputs.by_name[name].copy_(read)
    module = translate(rung, config, INSTRUCTION_SETS[rung.instruction_set].arch)
    on_emulator(module, problem, inputs, race=False, before="attention_forward", kept=workspaces)
    blocks = -(-problem.seqlen_k // config.block_n)
    words = workspaces["lists"].view(np.int32).reshape(-1, -(-problem.seqlen_q // config.block_m), _HEAD + blocks)
    titles = _titles(problem, Mods.parse(problem.mods))
    lists = tuple(BlockList(title, _classes(each, blocks)) for title, each in zip(titles, words, strict=True))
    return MaskBlocks(problem, config.block_m, config.block_n, not config.window, lists)


def _titles(problem: Problem, mods: Mods) -> Iterator[str]:
    """Of lists, in their order: there is one for each sequence and head that the mask names."""
    named = names(mods.mask) if mods.mask else set()
    for b in range(problem.batch if "b" in named else 1):
        for h in range(problem.num_heads if "h" in named else 1):
            yield ", ".join(f"{name}={at}" for name, at in (("b", b), ("h", h)) if name in named)


def _classes(lists: np.ndarray, blocks: int) -> np.ndarray:
    """Of the lists of tiles."""
    classes = np.full((len(lists), blocks), EMPTY, np.uint8)
    for found, each in zip(classes, lists, strict=True):
        listed = each[_HEAD : _HEAD + each[_NUM_BLOCKS]]
        found[listed] = PARTIAL
        found[listed[: each[_NUM_WHOLE]]] = WHOLE
    return classes
