"""Keys in a cache: in one piece or in pages, in 16 bits or as 8-bit floats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.decode_sizes import all_keys, num_pages
from flashladder.common.problem.fp8 import LARGEST, quantised
from flashladder.common.problem.problem import Problem

TABLE = "block_table"
DESCALES = {"k_cache": "k_descale", "v_cache": "v_descale"}
NO_PAGE = -1  # in the table, behind the pages of a sequence


def write(problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, keys: torch.Tensor) -> None:
    """Keys of a sequence, (length, heads_k, columns), to a cache, with their scales if it has some.

    A head's scale is that of its largest number, times 0.75 to 1.5: in some heads the largest ones saturate.
    """
    if DESCALES[name] in tensors:
        if not (problem.tensor_scales or problem.page_scales):
            numbers = keys if len(keys) else keys.new_zeros((1, *keys.shape[1:]))
            largest = numbers.float().nan_to_num(0.0).abs().amax((0, 2))
            heads = torch.arange(len(largest), device=largest.device)
            spread = 0.75 * 2 ** ((heads + sequence) % 8 / 7)
            descale = torch.where(largest > 0, spread * largest / LARGEST, 1.0)
            tensors[DESCALES[name]][sequence].copy_(descale)
        keys = quantised(keys, _scales(problem, tensors, name, sequence, 0, len(keys)))
    for rows, place in _places(problem, tensors, name, sequence, len(keys)):
        place.copy_(keys[rows])


def read(problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, length: int) -> torch.Tensor:
    """What keys of a sequence mean, (length, heads_k, columns): 8-bit numbers times their scale, exact in fp64."""
    numbers = torch.cat([place for _, place in _places(problem, tensors, name, sequence, length)])
    if DESCALES[name] in tensors:
        numbers = numbers.double() * _scales(problem, tensors, name, sequence, 0, length).double()[..., None]
    return numbers


def appended(
    problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, first: int, keys: torch.Tensor
) -> torch.Tensor:
    """What new keys of a sequence, (length, heads_k, columns), mean in its cache from key `first` on."""
    if DESCALES[name] not in tensors:
        return keys
    scales = _scales(problem, tensors, name, sequence, first, len(keys))
    return quantised(keys, scales).double() * scales.double()[..., None]


def shape_of_scales(problem: Problem) -> tuple[int, ...]:
    """Of a cache; of its pages and heads, with one more dimension, which tells them apart; of sequences and heads."""
    if problem.tensor_scales:
        return (1,)
    return (num_pages(problem), problem.num_heads_k, 1) if problem.page_scales else (problem.batch, problem.num_heads_k)


def draw_scales(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> None:
    """Those that do not follow from a sequence's numbers: NaN for pages of none."""
    for number, name in enumerate(DESCALES.values()):
        if problem.tensor_scales:
            tensors[name].fill_(2.0 ** -(5 + number))
        elif problem.page_scales:
            tensors[name].fill_(math.nan)
            for sequence, length in enumerate(all_keys(problem)):
                pages = tensors[TABLE][sequence, : -(-length // problem.page_size)].long()
                heads = torch.arange(problem.num_heads_k, device=pages.device)
                tensors[name][pages] = 1.3 * 2.0 ** ((5 * pages[:, None] + 3 * heads + number) % 9 - 10)[..., None]


def _scales(
    problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, first: int, length: int
) -> torch.Tensor:
    """Those of keys of a sequence, (length, heads_k)."""
    scales = tensors[DESCALES[name]]
    if problem.page_scales:
        keys = torch.arange(first, first + length, device=scales.device)
        return scales[tensors[TABLE][sequence, keys // problem.page_size].long(), :, 0]
    return (scales if problem.tensor_scales else scales[sequence]).expand(length, problem.num_heads_k)


def _places(
    problem: Problem, tensors: Mapping[str, torch.Tensor], name: str, sequence: int, length: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Keys of a sequence that lie together, with their place in a cache."""
    if not problem.paged:
        yield slice(0, length), tensors[name][sequence, :length]
        return
    size = problem.page_size
    for page, number in enumerate(tensors[TABLE][sequence, : -(-length // size)].tolist()):
        rows = slice(page * size, min((page + 1) * size, length))
        yield rows, tensors[name][number, : rows.stop - rows.start]


def draw_table(problem: Problem, table: torch.Tensor, generator: torch.Generator) -> None:
    """Pages in random order."""
    check_pages(problem)
    pages = torch.randperm(num_pages(problem), generator=generator, device=generator.device).int().to(table.device)
    table.fill_(NO_PAGE)
    taken = 0
    for sequence, length in enumerate(all_keys(problem)):
        count = -(-length // problem.page_size)
        table[sequence, :count] = pages[taken : taken + count]
        taken += count


def check_pages(problem: Problem) -> None:
    """UnsupportedProblemError where the sequences have more keys than there are pages for."""
    needed = sum(-(-length // int(problem.page_size)) for length in all_keys(problem))
    if needed > num_pages(problem):
        raise UnsupportedProblemError(
            f"num_pages={problem.num_pages}: the sequences need {needed} pages of page_size={problem.page_size}"
        )
