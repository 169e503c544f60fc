"""Rows of 656 bytes that a cache of latents may have: FlashMLA's.

512 e4m3, four fp32 scales, each of 128 of these, and the 64 columns that are K's alone, in bf16. An 8-bit number means
itself times its scale. Kernels may round that to bf16, as FlashMLA's do.
"""

from __future__ import annotations

import torch

from flashladder.common.problem.fp8 import FP8, LARGEST, quantised

LATENT, ROTATED, GROUP = 512, 64, 128  # columns: in 8 bits, in 16 bits, of one scale
ROW_BYTES = LATENT + LATENT // GROUP * 4 + 2 * ROTATED
DTYPES = (torch.uint8, torch.int8, FP8)  # that a tensor of such rows may have


def to_bytes(latent: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """(..., 512) and (..., 64) as (..., 656), uint8. A scale is that of the largest of its numbers, or 1 of zeros."""
    groups = latent.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
    numbers = quantised(groups, scales).flatten(-2)
    parts = (numbers, scales, rotated.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def to_numbers(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What rows (..., 656) mean: (..., 576), each number rounded once; in fp64 exactly."""
    of_scales = ROW_BYTES - LATENT - 2 * ROTATED
    parts = rows.view(torch.uint8).split((LATENT, of_scales, 2 * ROTATED), -1)
    numbers, scales, rotated = (part.contiguous() for part in parts)
    exact = torch.promote_types(dtype, torch.float32)
    groups = numbers.view(FP8).to(exact).unflatten(-1, (-1, GROUP)) * scales.view(torch.float32).to(exact)[..., None]
    return torch.cat((groups.flatten(-2).to(dtype), rotated.view(torch.bfloat16).to(dtype)), -1)


def times_signs(rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Rows (..., 656), or V's first 512 bytes of them, of the same numbers times the signs (576,) of their columns."""
    signed = rows.view(torch.uint8).clone()
    upper = torch.cat((signed[..., :LATENT], signed[..., ROW_BYTES - 2 * ROTATED + 1 :: 2]), -1)  # bytes with a sign
    upper ^= (signs[: upper.shape[-1]] < 0).to(torch.uint8) << 7
    signed[..., :LATENT], signed[..., ROW_BYTES - 2 * ROTATED + 1 :: 2] = upper[..., :LATENT], upper[..., LATENT:]
    return signed.view(rows.dtype)
