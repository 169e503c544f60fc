"""Dropout: which weights of P count. The same as common/cuda/softmax/dropout.cuh, in Python.

A weight is dropped where its byte is below `dropped(p)`: of 256 as many. So p is that number / 256, and what is kept
is multiplied by 1 / (1 - p) for that p: then the mean of O is O without dropout. The bytes are those of Philox
4x32 (Salmon et al., SC 2011) of 7 rounds, the fewest that pass the test suite BigCrush. Its key is the seed, its
counter the place of the score and the offset. So the mask depends on neither tiles nor kernels.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

RNG_STATE = "rng_state"  # the tensor: words of int32, two of seed and one of offset
STATE_WORDS = 3
ROUNDS = 7
_LEVELS = 256
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_WORD = np.uint64(32)
_SQUARE, _CALLS = 16, 4  # rows and keys of a square, and calls along each of its sides


def dropped(dropout_p: float) -> int:
    """Of 256 weights as many are dropped: the nearest number, but neither none nor all where 0 < p < 1."""
    return min(max(round(dropout_p * _LEVELS), 1), _LEVELS - 1) if dropout_p else 0


def quantised(dropout_p: float) -> float:
    """The p of the mask and of the scale."""
    return dropped(dropout_p) / _LEVELS


def rescale(dropout_p: float) -> float:
    """What is kept is multiplied by it."""
    return 1 / (1 - quantised(dropout_p))


def drawn(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """A state from torch's generator, the device's own where none is given. It stays on the device."""
    return torch.randint(-(2**31), 2**31, (STATE_WORDS,), dtype=torch.int32, device=device, generator=generator)


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int], rounds: int = ROUNDS) -> tuple[np.ndarray, ...]:
    """Four words of uint32 for each counter, which are four arrays of uint32 that broadcast."""
    a, b, c, d = np.broadcast_arrays(*counter)
    first, second = (np.array([word], np.uint32) for word in key)  # arrays wrap around without a warning
    for _ in range(rounds):
        left, right = _FACTORS[0] * a.astype(np.uint64), _FACTORS[1] * c.astype(np.uint64)
        a, b, c, d = (
            _high(right) ^ b ^ first,
            right.astype(np.uint32),
            _high(left) ^ d ^ second,
            left.astype(np.uint32),
        )
        first, second = first + _STEPS[0], second + _STEPS[1]
    return a, b, c, d


def kept(rng_state: torch.Tensor, dropout_p: float, heads: range, rows: range, num_keys: int) -> torch.Tensor:
    """Whether weights count, (heads, rows, num_keys), on the device of `rng_state`.

    Heads are counted over all of the batch: batch * num_heads + head. A call has the 16 scores at rows r, r + 1, r + 8,
    r + 9 and keys k, k + 1, k + 8, k + 9 of a square of 16 by 16.
    """
    *seed, offset = (word % 2**32 for word in rng_state.tolist())
    first = rows.start // _SQUARE
    of_rows, of_keys = np.arange(first, -(-rows.stop // _SQUARE)), np.arange(-(-num_keys // _SQUARE))
    calls = ((squares[:, None] * _CALLS + np.arange(_CALLS)).ravel() for squares in (of_rows, of_keys))
    head, row, key = (each.astype(np.uint32) for each in np.ix_(np.array(heads), *calls))
    words = philox((head, row, np.uint32(offset), key), (seed[0], seed[1]))
    counts = _bytes(words, of_rows, of_keys) >= dropped(dropout_p)
    counts = counts[:, rows.start - first * _SQUARE :][:, : len(rows), :num_keys]
    return torch.from_numpy(np.ascontiguousarray(counts)).to(rng_state.device)


def _bytes(words: tuple[np.ndarray, ...], of_rows: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
    """The byte of each score of these squares, (heads, rows, keys), of the four words of each call.

    A call's words are those of its even and odd rows and keys, in turns from square to square; the bytes of a word are
    those of the halves of a square.
    """
    num_heads = len(words[0])
    found = np.empty((num_heads, len(of_rows), 2, _CALLS, 2, len(of_keys), 2, _CALLS, 2), np.uint8)
    of_calls = [word.reshape(num_heads, len(of_rows), _CALLS, len(of_keys), _CALLS) for word in words]
    for odd_row, odd_key in itertools.product((0, 1), (0, 1)):
        which = (odd_row + of_keys) % 2 * 2 + (odd_key + of_rows[:, None]) % 2
        word = np.choose(which[:, None, :, None], of_calls).astype("<u4")
        of_halves = word[..., None].view(np.uint8).reshape(*word.shape, 2, 2)
        found[:, :, :, :, odd_row, :, :, :, odd_key] = of_halves.transpose(0, 1, 5, 2, 3, 6, 4)
    return found.reshape(num_heads, len(of_rows) * _SQUARE, len(of_keys) * _SQUARE)


def _high(product: np.ndarray) -> np.ndarray:
    return (product >> _WORD).astype(np.uint32)
