"""Decode attention: one query row a sequence, or a few, against a long cache of keys and values.

    q              (batch, seqlen_q, num_heads, head_dim), and o like it
    k_cache        (batch, seqlen_k, num_heads_k, head_dim), and v_cache: there is room for seqlen_k keys
    cache_seqlens  (batch), int32: how many of them a sequence has
    cache_leftpad  (batch), int32, with the option leftpad: how many of these, the first ones, are padding and not seen
    tree_mask      (batch, seqlen_q), int32, with the option tree: bit i of a row's mask is set if it sees row i's key,
                   of the last keys, as many as rows
    alibi_slopes   (batch, num_heads), fp32, with ALiBi
    k_descale      (batch, num_heads_k), fp32, and v_descale, with the option fp8_cache: the caches are float8_e4m3fn,
                   and a number in them means itself times its head's descale; with tensor_scales (1), for the whole
                   cache, and with page_scales (num_pages, num_heads_k, 1)
    k_new, v_new   (batch, seqlen_new, num_heads_k, head_dim), with new_keys: written behind the cached keys, and seen
    rotary_cos     (rotary_positions, rotary_dim / 2), and rotary_sin, with rotary: by which Q and k_new are turned
    lse            (batch, num_heads, seqlen_q), fp32

With packed_q the rows of all sequences lie one behind the other in a batch of one: q and o are (1, seqlen_q, num_heads,
head_dim), lse is (1, num_heads, seqlen_q). Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], (batch + 1),
int32. Rows behind the last one see no key.

A paged cache is (num_pages, page_size, num_heads_k, head_dim). Keys i * page_size to (i + 1) * page_size of sequence b
are page block_table[b, i], int32. Under the causal rule the last row sees all keys, and each row before it one less;
windows and distances of ALiBi are aligned to the end alike. New keys have the positions from cache_seqlens on. So have
rows of Q under a causal mask or a window; else all of them have the first of these. A row beyond the last of the
rotary_positions turns as that one. Sinks are a logit a head, (num_heads), fp32, which joins the sum of each row.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import buffers, tree
from flashladder.common.problem.buffers import INPUT, OUTPUT, UPDATED, Tensor, contiguous, laid_out
from flashladder.common.problem.caches import (
    DESCALES,
    TABLE,
    appended,
    check_pages,
    draw_scales,
    draw_table,
    read,
    shape_of_scales,
    write,
)
from flashladder.common.problem.decode_sizes import (
    all_keys,
    max_pages,
    num_pages,
    num_parts,
    num_splits,
    packed_rows,
    rotary_dim,
    rotary_positions,
    seqlen_new,
    seqlens,
    seqlens_q,
    target_parts,
)
from flashladder.common.problem.fp8 import FP8
from flashladder.common.problem.operations import forward
from flashladder.common.problem.operations.forward import (
    SINKS,
    SLOPES,
    TREE,
    Forward,
    attention,
    draw_sinks,
    draw_slopes,
    lse_of,
    of_features,
)
from flashladder.common.problem.options import Option
from flashladder.common.problem.problem import BANDWIDTH, BOUNDS, DTYPES, LSE, Problem
from flashladder.common.problem.rotary import Rotary

LENGTHS, LEFTPAD, STARTS = "cache_seqlens", "cache_leftpad", "cu_seqlens_q"
CACHES = ("k_cache", "v_cache")
NEW = ("k_new", "v_new")
ROTARY = ("rotary_cos", "rotary_sin")
ROW_BYTES = 16  # rows begin at multiples of so many


class Decode(Forward):
    """Beyond a sequence's length the cache holds anything: NaN in drawn inputs."""

    name = "decode"
    features: ClassVar[tuple[str, ...]] = (*BOUNDS, "sinks", "seqlens_q", "seqlens_k")
    layouts = buffers.LAYOUTS
    options: ClassVar[tuple[Option, ...]] = (
        Option("paged", bool, "the cache consists of pages, which a block table finds", default=False),
        Option("page_size", int, "keys of a page", default=64),
        Option("num_pages", int, "pages of the cache; 0: what the sequences need, and some", minimum=0, default=0),
        Option("fp8_cache", bool, "the caches are 8-bit floats; tensors say their scales", default=False),
        Option("tensor_scales", bool, "one scale for a cache of 8-bit floats", default=False),
        Option("page_scales", bool, "a scale for each page and head of a cache of 8-bit floats", default=False),
        Option("tree", bool, "rows are of a draft tree; a mask says which of the last keys each sees", default=False),
        Option("leftpad", bool, "a sequence's first keys are padding; a tensor says how many", default=False),
        Option("new_keys", bool, "keys are appended to the cache before they are read", default=False),
        Option("seqlen_new", int, "new keys of each sequence", default=1),
        Option("rotary", bool, "Q and new keys are turned by rotary embeddings", default=False),
        Option("rotary_dim", int, "columns that turn; 0: all", minimum=0, default=0),
        Option("rotary_interleaved", bool, "neighbouring columns turn together", default=False),
        Option("rotary_positions", int, "of angles, where more than the cache has room for", minimum=0, default=0),
        Option("packed_q", bool, "the rows of all sequences lie one behind the other", default=False),
        Option("num_splits", int, "parts of the keys that are computed apart; 0: by the sizes", minimum=0, default=0),
    )
    sizes = ("num_splits", "num_parts", "target_parts", "seqlen_new", "packed_rows")
    signed_together: ClassVar[tuple[tuple[str, ...], ...]] = (("q", "k_cache"), ("v_cache", "o"))
    tile_rows: ClassVar[int] = 16  # of Q, that a CTA has
    unit = BANDWIDTH
    usual: ClassVar = {"batch": 8, "num_heads": 32, "num_heads_k": 8, "seqlen_q": 1, "seqlen_k": 8192}
    sampled: ClassVar = {"batch": 8, "num_heads": 32, "num_heads_k": 8, "seqlen_q": 1, "seqlen_k": 4096}
    small: ClassVar = {"batch": 2, "num_heads": 8, "num_heads_k": 2, "seqlen_q": 1, "seqlen_k": 512}

    def implied(self, problem: Problem) -> dict[str, Any]:
        """The number of sequences, and room for the longest, from their lengths."""
        lengths, rows = problem.seqlens_k, problem.seqlens_q
        for name, found in (("seqlens_k", lengths), ("seqlens_q", rows)):
            if found and min(found) < 0:
                raise UnsupportedProblemError(f"{name}={found}: no sequence is shorter than 0")
        of_rows = {"batch": len(rows), "seqlen_q": max(1, sum(rows))} if rows else {}
        if not lengths:
            return of_rows
        if rows and len(rows) != len(lengths):
            raise UnsupportedProblemError(f"seqlens_q are {len(rows)}, seqlens_k {len(lengths)} lengths")
        new = seqlen_new(problem)
        room = max(1, max(lengths) + new) if problem.seqlen_k is None else problem.seqlen_k
        if max(lengths) + new > room:
            raise UnsupportedProblemError(
                f"seqlens_k={lengths} and {new} new keys: the cache has room for seqlen_k={room} keys"
            )
        return {**of_rows, "batch": len(lengths), "seqlen_k": room}

    def check(self, problem: Problem) -> None:
        """There are pages for the sequences, where the problem says how long they are, and an angle for each place."""
        if problem.paged and problem.seqlens_k:
            check_pages(problem)
        if seqlen_new(problem) > problem.seqlen_k:
            raise UnsupportedProblemError(
                f"seqlen_new={problem.seqlen_new}: the cache has room for seqlen_k={problem.seqlen_k} keys"
            )
        if problem.rotary:
            _check_rotary(problem)
        if problem.tree and (not problem.causal or problem.seqlen_q > tree.MOST_ROWS or problem.rotary):
            raise UnsupportedProblemError(
                f"tree=true takes causal=true, up to {tree.MOST_ROWS} rows and no rotary embeddings, which count rows; "
                f"causal={problem.causal}, seqlen_q={problem.seqlen_q}"
            )
        kinds = [name for name in ("tensor_scales", "page_scales") if getattr(problem, name)]
        if kinds and not problem.fp8_cache:
            raise UnsupportedProblemError(f"{kinds[0]}=true takes fp8_cache=true: other caches have no scales")
        if len(kinds) > 1 or (problem.page_scales and not problem.paged):
            raise UnsupportedProblemError("page_scales=true takes paged=true, and tensor_scales=false")
        if problem.fp8_cache and (problem.head_dim % ROW_BYTES or problem.head_dim_v % ROW_BYTES):
            raise UnsupportedProblemError(
                f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}: rows of 8-bit caches are multiples of "
                f"{ROW_BYTES} bytes"
            )
        if problem.seqlens_q and not problem.packed_q:
            raise UnsupportedProblemError(
                f"seqlens_q={problem.seqlens_q}: sequences with rows of their own are packed_q=true"
            )

    def sized(self, sizes: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """As many rows of each sequence where they are packed."""
        packed = {"seqlen_q": sizes["batch"] * sizes["seqlen_q"]} if options.get("packed_q") else {}
        return {**sizes, **packed}

    def of_length(self, seqlen: int, tokens: int) -> dict[str, Any]:
        """One row against so many keys."""
        return {"batch": max(1, tokens // seqlen), "seqlen_q": 1, "seqlen_k": seqlen}

    def of_rows(self, rows: int, heads: int) -> dict[str, Any]:
        """All are heads of Q that share one of K and V: the rows of a tile."""
        return {"num_heads": rows * heads, "num_heads_k": 1, "seqlen_q": 1}

    def one_sequence(self, problem: Problem) -> Problem:
        """The longest, where the problem says how long they are, in pages of its own."""
        longest = tuple(sorted(problem.seqlens_k)[-1:])
        options = tuple({**dict(problem.options), "num_pages": 0}.items())
        return dataclasses.replace(problem, batch=1, seqlens_q=(), seqlens_k=longest, options=options)

    def argument(self, problem: Problem, name: str) -> Any:
        """What is 0 in a problem, as the sizes decide it."""
        decided = {
            "num_splits": num_splits,
            "num_parts": num_parts,
            "target_parts": target_parts,
            "seqlen_new": seqlen_new,
            "rotary_dim": rotary_dim,
            "rotary_positions": rotary_positions,
            "num_pages": num_pages,
            "max_pages": max_pages,
            "packed_rows": packed_rows,
        }
        return decided[name](problem) if name in decided else super().argument(problem, name)

    def flops(self, problem: Problem) -> float:
        """The sum over the sequences, as if none had padding."""
        each = zip(seqlens_q(problem), all_keys(problem), strict=True)
        return sum(forward.OPERATION.flops(_alone(problem, rows, keys)) for rows, keys in each if rows and keys)

    def bytes_moved(self, problem: Problem) -> float:
        """K and V of the keys that some row may see. All else is small beside it."""
        p = problem
        beyond = p.seqlen_k if p.window_left is None else p.window_left
        keys = sum(min(length, beyond + rows) for rows, length in zip(seqlens_q(p), all_keys(p), strict=True) if rows)
        return float(keys * p.num_heads_k * (p.head_dim + p.head_dim_v) * p.tensors[CACHES[0]].dtype.itemsize)

    def row_tiles(self, problem: Problem, block_m: int) -> int:
        """The rows of heads that share K are in one tile."""
        p = problem
        return p.num_heads_k * sum(math.ceil(p.num_heads // p.num_heads_k * rows / block_m) for rows in seqlens_q(p))

    def tensors(self, problem: Problem) -> dict[str, Tensor]:
        """Each in a buffer of its own. With new keys the caches are updated."""
        p, dtype = problem, DTYPES[problem.dtype]
        cached, role = FP8 if p.fp8_cache else dtype, UPDATED if p.new_keys else INPUT

        def laid(batch: int, seqlen: int, heads: int, columns: int, dtype: torch.dtype, role: str = INPUT) -> Tensor:
            return Tensor(laid_out(p.layout, (batch, seqlen, heads, columns), ROW_BYTES // dtype.itemsize), dtype, role)

        rows: tuple[int, int] = (num_pages(p), p.page_size) if p.paged else (p.batch, p.seqlen_k)
        of_q = 1 if p.packed_q else p.batch
        found = {
            "q": laid(of_q, p.seqlen_q, p.num_heads, p.head_dim, dtype),
            CACHES[0]: dataclasses.replace(laid(*rows, p.num_heads_k, p.head_dim, cached, role), stays=True),
            CACHES[1]: dataclasses.replace(laid(*rows, p.num_heads_k, p.head_dim_v, cached, role), stays=True),
            LENGTHS: Tensor(contiguous(p.batch), torch.int32),
        }
        if p.paged:
            found[TABLE] = Tensor(contiguous(p.batch, max_pages(p)), torch.int32)
        if p.leftpad:
            found[LEFTPAD] = Tensor(contiguous(p.batch), torch.int32)
        if p.tree:
            found[TREE] = Tensor(contiguous(p.batch, p.seqlen_q), torch.int32)
        if p.packed_q:
            found[STARTS] = Tensor(contiguous(p.batch + 1), torch.int32)
        found |= of_features(p)
        if p.fp8_cache:
            found |= dict.fromkeys(DESCALES.values(), Tensor(contiguous(*shape_of_scales(p)), torch.float32))
        if p.new_keys:
            new = p.batch, p.seqlen_new, p.num_heads_k
            found |= {NEW[0]: laid(*new, p.head_dim, dtype), NEW[1]: laid(*new, p.head_dim_v, dtype)}
        if p.rotary:
            found |= dict.fromkeys(ROTARY, Tensor(contiguous(rotary_positions(p), rotary_dim(p) // 2), dtype))
        found["o"] = laid(of_q, p.seqlen_q, p.num_heads, p.head_dim_v, dtype, OUTPUT)
        return {**found, LSE: lse_of(p, of_q, p.num_heads, p.seqlen_q)}

    def draw(self, problem: Problem, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Each sequence as its family designs it, in pages that lie in random order; NaN in padding."""
        p = problem
        for name in CACHES:
            tensors[name].fill_(math.nan)
        tensors[LENGTHS].copy_(torch.tensor(seqlens(p), dtype=torch.int32))
        if p.paged:
            draw_table(p, tensors[TABLE], generator)
        draw_scales(p, tensors)
        if p.tree:
            tree.draw(tensors[TREE], generator)
        if p.packed_q:
            tensors[STARTS].copy_(torch.tensor([0, *itertools.accumulate(seqlens_q(p))], dtype=torch.int32))
        if p.alibi:
            draw_slopes(tensors[SLOPES], generator)
        if p.sinks:
            draw_sinks(tensors[SINKS], generator)
        padding = [0] * p.batch
        if p.leftpad:
            drawn = torch.rand(p.batch, generator=generator, device=generator.device)
            padding = [int(share * (length + 1)) for share, length in zip(drawn.tolist(), seqlens(p), strict=True)]
            tensors[LEFTPAD].copy_(torch.tensor(padding, dtype=torch.int32))
        if p.rotary:
            _draw_angles(tensors)
        for sequence, (length, end) in enumerate(zip(seqlens(p), all_keys(p), strict=True)):
            shapes = ((1, max(1, end), p.num_heads_k, columns) for columns in (p.head_dim, p.head_dim_v))
            k, v = (torch.empty(shape, dtype=DTYPES[p.dtype], device=generator.device) for shape in shapes)
            rows = _rows(p, tensors, tensors["q"], sequence)
            q = torch.empty(rows.shape, dtype=DTYPES[p.dtype], device=generator.device)
            self._design(p, q, k, v, generator)
            rows.copy_(q)
            for name, keys in zip(CACHES, (k, v), strict=True):
                keys[:, : padding[sequence]] = math.nan
                write(p, tensors, name, sequence, keys[0, :length])
            if p.new_keys:
                for name, keys in zip(NEW, (k, v), strict=True):
                    tensors[name][sequence].copy_(keys[0, length:end])

    def compute(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Each sequence as `attention` computes it, of the keys that there are behind its padding."""
        p, q = problem, tensors["q"]
        new = [tensors[name] for name in NEW if p.new_keys]
        if p.rotary:
            q, new[0] = _turned(p, tensors)
        found = {name: torch.zeros(p.tensors[name].shape, dtype=dtype, device=q.device) for name in ("o", LSE)}
        found[LSE] += tensors[SINKS][:, None] if p.sinks else -math.inf
        padding = tensors[LEFTPAD].tolist() if p.leftpad else [0] * p.batch
        for sequence, (length, begin) in enumerate(zip(tensors[LENGTHS].tolist(), padding, strict=True)):
            rows = _rows(p, tensors, q, sequence)
            if (end := length + seqlen_new(p)) > begin and rows.shape[1]:
                lying = [[read(p, tensors, name, sequence, length)] if length else [] for name in CACHES]
                for name, places, keys in zip(CACHES, lying, new, strict=False):
                    places.append(appended(p, tensors, name, sequence, length, keys[sequence]))
                k, v = (torch.cat(places)[None, begin:] for places in lying)
                parts = {"q": rows, "k": k, "v": v, **{name: tensors[name] for name in (SINKS,) if p.sinks}}
                of_sequences = [name for name in (SLOPES, TREE) if name in tensors]
                parts |= {name: tensors[name][sequence : sequence + 1] for name in of_sequences}
                o, lse = attention(_alone(p, rows.shape[1], end - begin), parts, dtype)
                for x, rows_of_x in ((found["o"], o), (found[LSE].mT, lse.mT)):
                    _rows(p, tensors, x, sequence).copy_(rows_of_x)
        return found


def _rows(problem: Problem, tensors: Mapping[str, torch.Tensor], x: torch.Tensor, sequence: int) -> torch.Tensor:
    """Of one sequence those of x, (batch, seqlen_q, ...), as of a batch of one."""
    if not problem.packed_q:
        return x[sequence : sequence + 1]
    begin, end = tensors[STARTS][sequence : sequence + 2].tolist()
    return x[:, begin:end]


def _check_rotary(problem: Problem) -> None:
    if not problem.new_keys:
        raise UnsupportedProblemError("rotary=true takes new_keys=true: keys in the cache are turned already")
    if rotary_dim(problem) > problem.head_dim or rotary_dim(problem) % 2:
        raise UnsupportedProblemError(
            f"rotary_dim={problem.rotary_dim}: pairs of columns turn, of head_dim={problem.head_dim}"
        )


def _draw_angles(tensors: Mapping[str, torch.Tensor]) -> None:
    """As models have them: a position's pairs turn at speeds from 1 down to nearly 1 / 10000."""
    positions, pairs = tensors[ROTARY[0]].shape
    angles = torch.outer(torch.arange(positions), 10000.0 ** -(torch.arange(pairs) / pairs))
    for name, values in zip(ROTARY, (angles.cos(), angles.sin()), strict=True):
        tensors[name].copy_(values)


def _turned(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Q and new keys."""
    p, first = problem, tensors[LENGTHS].long()[:, None]
    cos, sin = (tensors[name] for name in ROTARY)
    rotary = Rotary(cos, sin, bool(p.rotary_interleaved))
    rows = p.seqlen_q if p.causal or p.window else 1
    made = []
    for name, count in (("q", rows), (NEW[0], seqlen_new(p))):
        positions = first + torch.arange(count, device=first.device)
        made.append(rotary.turned(tensors[name], positions.expand(-1, tensors[name].shape[1])))
    return made


def _alone(problem: Problem, rows: int, keys: int) -> Problem:
    """Of one sequence, all of whose keys lie together."""
    sizes: dict[str, Any] = {"batch": 1, "seqlen_q": rows, "seqlen_k": keys, "seqlens_q": (), "seqlens_k": ()}
    return dataclasses.replace(problem, operation=forward.OPERATION.name, options=(), layout="bshd", **sizes)


OPERATION = Decode()
