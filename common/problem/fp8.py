"""8-bit floats, e4m3, with a scale a head: what they mean is themselves times the scale."""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448


def quantised(numbers: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 of numbers / descale, where numbers are (..., heads, columns) and descale (..., heads).

    What is beyond 448, the largest one, becomes that; NaN stays.
    """
    return (numbers.float() / descale[..., None]).clamp(-LARGEST, LARGEST).to(FP8)
