"""Masks with names: what `attention` takes of them, attention(q, k, v, **masks.documents(document)).

Each function returns keyword arguments: `mask`, an expression; `tensors`, those that it reads; and `causal` or `window`
where these hide whole blocks, which kernels then skip. So does `packed_attention` take them, where b is the number of a
sequence. Positions count from the start of a sequence, of which q has the last rows; tensors lie on q's device. Whole
numbers of Python stand in the text, so that another number is another kernel. docs/masks.md has them in a table.
"""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import validate
from flashladder.common.api.tree import parents_of
from flashladder.common.errors import UnsupportedProblemError


def documents(document: torch.Tensor, causal: bool = True) -> dict[str, Any]:
    """Tokens see their own document alone, whose number document, (seqlen_k,) or (batch, seqlen_k), has: whole ones."""
    at = _of_sequence("document", document, 1)
    return {"mask": f"document{at}[q] == document{at}[k]", "tensors": {"document": document}, "causal": causal}


def prefix(length: torch.Tensor) -> dict[str, Any]:
    """A causal mask, but the first `length` tokens see each other both ways. length, () or (batch,), whole numbers."""
    at = _of_sequence("length", length, 0)
    return {"mask": f"k <= q || k < length{at}", "tensors": {"length": length}}


def images(image: torch.Tensor) -> dict[str, Any]:
    """A causal mask, but the tokens of an image see each other both ways.

    image, (seqlen_k,) or (batch, seqlen_k), whole numbers, has the number of a token's image; 0 is text.
    """
    at = _of_sequence("image", image, 1)
    own = f"image{at}[q]"
    return {"mask": f"k <= q || {own} != 0 && {own} == image{at}[k]", "tensors": {"image": image}}


def chunks(size: int, start: torch.Tensor | None = None) -> dict[str, Any]:
    """Under a causal mask tokens see the chunk of `size` tokens alone that they are in, as in Llama 4.

    Chunks count from the start of the sequence, in packed_attention that of each. With `start`, (seqlen_k,) or (batch,
    seqlen_k), whole numbers, sequences lie in one row: it has the first position of a token's own, from which its
    chunks count.
    """
    size = _count("size", size, 1)
    if start is None:
        return {"mask": f"q / {size} == k / {size}", "causal": True}
    at = _of_sequence("start", start, 1)
    first = f"start{at}[q]"
    mask = f"k >= {first} + (q - {first}) / {size} * {size}"
    return {"mask": mask, "tensors": {"start": start}, "causal": True}


def sinks_and_window(sinks: int, left: int) -> dict[str, Any]:
    """Under a causal mask tokens see the first `sinks` tokens, and up to `left` before themselves (StreamingLLM)."""
    return {"mask": f"k < {_count('sinks', sinks)} || q - k <= {_count('left', left)}", "causal": True}


def prompt_and_window(prompt: torch.Tensor, left: int) -> dict[str, Any]:
    """The same, but all see the whole prompt. prompt, () or (batch,), whole numbers, says how many tokens that is."""
    at = _of_sequence("prompt", prompt, 0)
    mask = f"k < prompt{at} || q - k <= {_count('left', left)}"
    return {"mask": mask, "tensors": {"prompt": prompt}, "causal": True}


def dilated(step: int, left: int, right: int = 0) -> dict[str, Any]:
    """Tokens see each `step`-th one: `left` of them before themselves, and `right` behind."""
    step = _count("step", step, 1)
    window = _count("left", left) * step, _count("right", right) * step
    return {"mask": f"(q - k) % {step} == 0", "window": window}


def neighbourhood(width: int, rows: int, columns: int) -> dict[str, Any]:
    """Tokens are places of a grid, row after row of `width`; each sees those up to `rows` and `columns` away.

    At the grid's edge it sees fewer. seqlen_k is a multiple of the width.
    """
    width, rows, columns = _count("width", width, 1), _count("rows", rows), _count("columns", columns)
    mask = f"abs(q / {width} - k / {width}) <= {rows} && abs(q % {width} - k % {width}) <= {columns}"
    far = rows * width + columns
    return {"mask": mask, "window": (far, far)}


def draft_tree(parents: torch.Tensor) -> dict[str, Any]:
    """The rows of q are drafted tokens: each sees all keys before them, and of them itself and those above it.

    parents, (tokens,) or (batch, tokens), int32 or int64, has each token's parent: one before it, or -1 for none. There
    are as many tokens as rows of q, and the last seqlen_q keys are theirs. Unlike `tree_mask`, of any number of tokens;
    it takes a byte for each pair of them.
    """
    sees = _lineage(parents_of(parents, 1 if validate.tensor("parents", parents).dim() == 1 else 2))
    of_sequence = "b, " if sees.dim() == 3 else ""
    first = "seqlen_k - seqlen_q"
    mask = f"k < {first} || sees[{of_sequence}q - ({first}), k - ({first})]"
    return {"mask": mask, "tensors": {"sees": sees}}


def of_blocks(
    seen: torch.Tensor, block_q: int = 128, block_k: int = 64, group: int = 1, causal: bool = False
) -> dict[str, Any]:
    """Block-sparse attention: blocks of `block_q` rows see the blocks of `block_k` keys for which `seen` is true.

    seen, bool, is (row blocks, key blocks), or (heads, row blocks, key blocks), or has the batch in front of these; 1
    stands for all heads or sequences. `group` heads of q share one of its heads. Rows count from the first of q, keys
    from the first of k; with block_q=1 each row has its own blocks. A block of a row that sees none gives 0.
    """
    found = validate.tensor("seen", seen)
    if found.dtype != torch.bool or found.dim() not in (2, 3, 4):
        raise UnsupportedProblemError(
            f"seen is {tuple(found.shape)} {found.dtype}; it should be bool, (row blocks, key blocks), with heads in "
            "front, or with the batch and heads"
        )
    if not found.numel():
        raise UnsupportedProblemError(
            f"seen is {tuple(found.shape)}; it should have 1 or more of each: blocks of rows and of keys, and of the "
            "heads and sequences in front of them"
        )
    block_q, block_k, group = _count("block_q", block_q, 1), _count("block_k", block_k, 1), _count("group", group, 1)
    head = "h" if group == 1 else f"h / {group}"
    front = [name if size > 1 else "0" for name, size in zip(("b", head)[4 - found.dim() :], found.shape, strict=False)]
    row = f"(q - (seqlen_k - seqlen_q)) / {block_q}"
    mask = f"seen[{', '.join([*front, row, f'k / {block_k}'])}]"
    return {"mask": mask, "tensors": {"seen": seen}, **({"causal": True} if validate.flag("causal", causal) else {})}


def _of_sequence(name: str, tensor: torch.Tensor, dimensions: int) -> str:
    """How an expression names a sequence's part of a tensor, of so many dimensions without the batch."""
    found = validate.tensor(name, tensor)
    if found.is_floating_point() or found.dim() not in (dimensions, dimensions + 1):
        raise UnsupportedProblemError(
            f"{name} is {tuple(found.shape)} {found.dtype}; it should be of whole numbers, with {dimensions} "
            "dimensions, or one more in front for the batch"
        )
    return "[b]" if found.dim() > dimensions else ""


def _count(name: str, value: int, least: int = 0) -> int:
    found = validate.whole(name, value)
    if found < least:
        raise UnsupportedProblemError(f"{name}={found}: it should be {least} or more")
    return found


def _lineage(parents: torch.Tensor) -> torch.Tensor:
    """Which tokens each one sees, (..., tokens, tokens), bool: itself, its parent, that one's, and so on."""
    tokens = torch.arange(parents.shape[-1], device=parents.device)
    sees = ((tokens == parents[..., None]) | (tokens == tokens[:, None])).float()
    for _ in range(len(tokens).bit_length()):  # twice as far up each time
        sees = (sees @ sees).clamp(max=1)
    return sees.bool()
