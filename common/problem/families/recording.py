"""What a trained model gave its attention: the file that it is kept in, and inputs made of it.

The file is a compressed .npz of three arrays, q, k and v. Each is (layers, heads, tokens, columns) of uint16, the bits
of bf16 numbers: the rows of one sequence of text as each layer's attention got them, for a few heads.
`flashladder train --record` writes one. The family `trained` reads the one that is beside this module.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch

from flashladder.common.errors import ResultsError
from flashladder.common.paths import TRAINED
from flashladder.common.problem.families.sketch import Sketch

# What numpy raises for a file that is damaged, or another's.
_DAMAGE = (OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)


def write(path: Path, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes q, k and v, (layers, heads, tokens, columns), to a new file.

    ResultsError where that cannot be done, or the file is there already.
    """
    bits = [tensor.bfloat16().contiguous().view(torch.uint16).cpu().numpy() for tensor in (q, k, v)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            np.savez_compressed(file, q=bits[0], k=bits[1], v=bits[2])
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror or error}") from error


@cache
def read(path: Path = TRAINED) -> dict[str, torch.Tensor]:
    """q, k and v, (layers * heads, tokens, columns), in bf16. ResultsError where the file does not hold them."""
    try:
        with np.load(path) as file:
            arrays = [file[name] for name in "qkv"]
    except _DAMAGE as error:
        raise _unusable(path, str(error)) from error
    if {array.dtype for array in arrays} != {np.dtype(np.uint16)} or len({array.shape for array in arrays}) > 1:
        raise _unusable(path, ", ".join(f"{array.dtype} {array.shape}" for array in arrays))
    if arrays[0].ndim != 4 or not arrays[0].size:
        raise _unusable(path, f"arrays of the shape {arrays[0].shape}")
    tensors = [torch.from_numpy(array).view(torch.bfloat16).flatten(0, 1) for array in arrays]
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise _unusable(path, "NaN or infinity among its numbers")
    return dict(zip("qkv", tensors, strict=True))


def fill(sketch: Sketch, recorded: Mapping[str, torch.Tensor]) -> None:
    """Makes the inputs of recorded rows. The layers' heads, their tokens and their columns go round.

    - A sequence begins with a head drawn at random. The next head of K and V has the next one recorded.
    - A row of Q is of the token of its own key, as a causal mask aligns them. Heads of Q that share one of K have Q of
      one recorded head: the second is of one token before, the third of two, and so on.
    - Columns beyond those recorded are of the next head: scores are then sums of several heads' scores. Of more columns
      than are needed the first are taken.

    Scores in nats are the model's in their spread, whatever the head_dim and the softmax_scale: Q and K are as recorded
    where that is 1/sqrt(head_dim), and else multiplied by one number.
    """
    heads, rows, head_dim = sketch.q.shape
    heads_k, keys, _ = sketch.k.shape
    device = sketch.q.device
    first = int(sketch.uniform(1) * len(recorded["k"]))
    own = torch.arange(keys - rows, keys, device=device)
    member = torch.arange(heads, device=device) % (heads // heads_k)
    of_k = first + torch.arange(heads_k, device=device)
    of_q = of_k.repeat_interleave(heads // heads_k)
    sketch.q.copy_(_taken(recorded["q"], of_q, own - member[:, None], head_dim))
    sketch.k.copy_(_taken(recorded["k"], of_k, sketch.key[None], head_dim))
    sketch.v.copy_(_taken(recorded["v"], of_k, sketch.key[None], sketch.v.shape[-1]))
    share = (head_dim**-0.5 / sketch.scale) ** 0.5
    sketch.q *= share
    sketch.k *= share


def _taken(recorded: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor, columns: int) -> torch.Tensor:
    """(heads, rows, columns): of each head, (heads,), the rows of tokens, (heads or 1, rows)."""
    count, length, width = recorded.shape
    column = torch.arange(columns, device=heads.device)
    head = (heads[:, None, None] + column // width) % count
    return recorded.to(heads.device)[head, tokens[..., None] % length, column % width]


def _unusable(path: Path, found: str) -> ResultsError:
    return ResultsError(
        f"{path} is no recording of q, k and v, each (layers, heads, tokens, columns) of uint16: {found}; "
        "`flashladder train --record FILE` writes one"
    )
